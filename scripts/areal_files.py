"""How many of AReaL's example files are read here as they stand: `areal_files.py CHECKOUT [--verbose]`.

Each YAML file of a training job is resolved in this process, as `--dry-run` does, with only model and data replaced by
files that exist. Where a file sets arguments of a workflow, the class is the one that the script beside it passes to
AReaL's trainer. Prints the share that is accepted by kind of job and, for the rest, how many files meet each reason.
"""

import argparse
import os
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from verl_commands import print_shares, problems_of, stand_ins  # pyrefly: ignore

from rlsys.config.schema.base import Section
from rlsys.config.schema.jobs import DPOConfig, PPOConfig, RMConfig, SFTConfig

JOBS: dict[str, type[Section]] = {"rl": PPOConfig, "sft": SFTConfig, "rw": RMConfig, "dpo": DPOConfig}
APART = {
    "images": r"vlm|vision|VL-",
    "FP8 of AReaL's own engine": r"archon:\n\s+fp8_config",
    "agents that users run beside the job": r"openclaw|online_rollout",
}
ARGUMENTS = {"max_turns", "max_tokens_per_trajectory", "agent_run_args", "tir", "econfig", "agent_builder_path"}


def replaced(file: Path, tree: dict[str, Any], folder: Path) -> list[str]:
    """The command line of a file: our model and data, and the workflow of the script beside it."""
    model, data = stand_ins(folder)
    argv = [f"--config-name={file}"]
    argv += [f"{role}.path={model}" for role in ("actor", "critic") if role in tree]
    argv += [f"{rows}.path={data}" for rows in ("train_dataset", "valid_dataset") if tree.get(rows)]
    scripts = "".join(script.read_text() for script in sorted(file.parent.glob("*.py")))
    workflow = re.search(r"\bworkflow=\"([\w.]+)\"", scripts)
    if ARGUMENTS & tree.keys() and "workflow" not in tree:
        argv.append(f"workflow={workflow[1] if workflow else 'module.Class'}")
    return argv


def main() -> None:
    """Print the shares and the reasons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--verbose", action="store_true", help="print the problems of each file")
    args = parser.parse_args()
    root = args.checkout.absolute()
    apart, reasons, accepted, total = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        for file in sorted(root.rglob("*.yaml")):
            text = file.read_text()
            tree = next(iter(yaml.safe_load_all(text)), None) if "\nactor:" in text else None
            if not isinstance(tree, dict):
                continue
            if reason := next((why for why, words in APART.items() if re.search(words, f"{file}\n{text}")), ""):
                apart[reason] += 1
                continue
            kind = tree["train_dataset"].get("type", "rl")
            problems = problems_of(replaced(file, tree, Path(name)), JOBS[kind])
            total[kind] += 1
            accepted[kind] += not problems
            reasons.update({re.sub(r" = .*?(?=[:(] |$)|=\S+| \(\S+yaml\)", "", problem) for problem in problems})
            if args.verbose:
                print(f"{'accepted' if not problems else 'refused'}: {file.relative_to(root)}")
                print("".join(f"    {problem}\n" for problem in problems), end="")
    print_shares("files", total, accepted, reasons, apart)


if __name__ == "__main__":
    main()
