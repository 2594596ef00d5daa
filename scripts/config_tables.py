"""Writes the tables of docs/config.md from the schema and the compatibility files.

A table stands between `<!-- aliases FILE JOB -->` or `<!-- keys KEY-OR-SECTION ... -->` and `<!-- end -->`.
`python scripts/config_tables.py` updates the page in place.
"""

import re
from pathlib import Path
from typing import Any

from rlsys.config import PPOConfig
from rlsys.config.compat.reader import read_blocks
from rlsys.config.help import describe
from rlsys.config.introspect import allowed, default_of, leaves, sections, shown

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config.md"
_TABLE = re.compile(r"(<!-- (aliases|keys) ([^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """The page with every table replaced by the current one."""
    rows = {"aliases": _alias_rows, "keys": _key_rows}
    return _TABLE.sub(lambda match: match[1] + "\n".join(rows[match[2]](*match[3].split())) + "\n" + match[4], page)


def _alias_rows(file: str, job: str) -> list[str]:
    rows = ["| spelling | key |", "| --- | --- |"]
    for block in read_blocks(file):
        for prefix in [f"{section}." for section in block.get("under", {}).get(job, ())]:
            rows += [f"| `{prefix}{name}` | `{prefix}{key}` |" for name, key in block.get("aliases", {}).items()]
            rows += _expansion_rows(block, prefix)
    for block in (block for block in read_blocks(file) if job in block.get("jobs", ())):
        rows += [f"| `{name}` | `{key}` |" for name, key in block.get("aliases", {}).items()]
        rows += [f"| `{name}` | `trainer.allocation_mode`, a part of it |" for name in block.get("engines", ())]
        rows += _expansion_rows(block, "")
    return rows


def _expansion_rows(block: dict[str, Any], prefix: str) -> list[str]:
    return [
        f"| `{prefix}{name}` | {', '.join(f'`{prefix}{key}`{_values(keys[key])}' for key in keys)} |"
        for name, keys in block.get("expansions", {}).items()
    ]


def _values(meanings: dict[Any, Any]) -> str:
    """What the values of an expansion become; one that is computed as a person writes it, from `it` and other keys."""
    computed = re.fullmatch(r"\$\{(?:divide|ratio):(.*)\}", str(meanings.get("otherwise")))
    if computed:
        return " = " + " / ".join(re.sub(r"[${}]", "", part) or "it" for part in computed[1].split(","))
    listed = ", ".join(f"{shown(value)}: {shown(meaning)}" for value, meaning in meanings.items())
    return f" ({listed})" if listed else ""


def _key_rows(*wanted: str) -> list[str]:
    rows = ["| key | default | meaning |", "| --- | --- | --- |"]
    for key, field in leaves(PPOConfig).items():
        if any(f"{key}.".startswith(f"{name}.") for name in wanted):
            section, _, name = key.rpartition(".")
            words = " ".join(describe(sections(PPOConfig)[section], name).split()).replace("|", "\\|")
            rows.append(f"| `{key}` | `{shown(default_of(field))}` | {words} [{allowed(field)}] |")
    return rows


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
