"""The text of --help: every key with its default, allowed values and description, from the schema's source.

Descriptions are the strings below the attributes. They are parsed here, on demand, because pydantic's
use_attribute_docstrings parses the source of every class at import.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from functools import cache
from itertools import pairwise

from rlsys.config.introspect import allowed, default_of, job_name, leaves, sections, shown
from rlsys.config.presets import preset_names, presets_folder
from rlsys.config.schema.base import Section

_WIDTH = 110
_OPTIONS = """\
Options
  --config-name NAME    preset or YAML file to start from
  --config-path FOLDER  where to look for it first
  --print-config        print the settings as YAML, with derived values as comments
  --dry-run             check everything, print the plan and exit
  --help                this text

Settings, any number; the last one of a key wins
  key=value             set a key: text, numbers, true, null, [a,b], {a: 1}, ${other.key}
  +key=value            the same, as Hydra writes new keys of override_config, reward_kwargs, ...
  ~key                  reset to the default, or remove an added key
"""


def help_text(schema: type[Section]) -> str:
    """The help of a job."""
    parts = [
        f"{inspect.getdoc(schema)}\n\npython -m trainer.main_{job_name(schema)} [options] [key=value ...]\n",
        _OPTIONS,
    ]
    parts.append(f"Presets in {presets_folder()}\n  {', '.join(preset_names())}\n")
    for path, section in sections(schema).items():
        own = [name for name in section.model_fields if (f"{path}.{name}" if path else name) in leaves(schema)]
        if own:
            title = f"{path}: {inspect.getdoc(section)}" if path else "Keys outside of sections"
            parts.append("\n".join([title, *(_key_text(schema, section, path, name) for name in own), ""]))
    return "\n".join(parts)


def _key_text(schema: type[Section], section: type[Section], path: str, name: str) -> str:
    key = f"{path}.{name}" if path else name
    field = leaves(schema)[key]
    words = f"{describe(section, name)} [{allowed(field)}]"
    default = default_of(field)
    follows = re.fullmatch(r"\$\{(\.?)([\w.]+)\}", default) if isinstance(default, str) else None
    if follows:
        head = f"{key}   (follows {f'{path}.' if follows[1] and path else ''}{follows[2]})"
    else:
        head = f"{key}={shown(default)}"
    return f"  {head}\n{textwrap.indent(textwrap.fill(words, _WIDTH), ' ' * 6)}"


def describe(section: type[Section], name: str) -> str:
    """The description of a key, from its section or the nearest parent class that has one."""
    texts = (_descriptions(cls.__module__).get((cls.__name__, name), "") for cls in section.__mro__)
    return next(filter(None, texts), "")


@cache
def _descriptions(module: str) -> dict[tuple[str, str], str]:
    """{(class, attribute): the string below it} of a module."""
    descriptions: dict[tuple[str, str], str] = {}
    classes = (
        node for node in ast.parse(inspect.getsource(sys.modules[module])).body if isinstance(node, ast.ClassDef)
    )
    for node in classes if module.startswith("rlsys.") else ():
        for this, below in pairwise(node.body):
            match this, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    descriptions[node.name, name] = text
    return descriptions
