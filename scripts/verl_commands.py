"""How many commands of verl's example scripts run here as they stand: `verl_commands.py CHECKOUT [--verbose]`.

Each shell script of the checkout runs in bash with nothing on its PATH, so that every command only records its
arguments. Of the commands that start verl's trainers, model, data and trackers are replaced by files that exist, and
the configuration is resolved in this process, as `--dry-run` does. Prints the share that is accepted and, for the rest,
how many commands meet each reason. Several nodes, other hardware and what is not text in one turn is counted apart.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rlsys.config import PPOConfig, SFTConfig
from rlsys.config.arguments import parse_arguments
from rlsys.config.load import load
from rlsys.config.schema.base import Section
from rlsys.utils.errors import ConfigError

MODULES: dict[str, type[Section]] = {
    "verl.trainer.main_ppo": PPOConfig,
    "verl.trainer.sft_trainer": SFTConfig,
    "verl.trainer.fsdp_sft_trainer": SFTConfig,
}
APART = {
    "other hardware": r"npu|ascend|rocm|amd",
    "other training engines": r"veomni|automodel|torchtitan|mindspeed|mlite|megatron_lite|trtllm",
    "images, audio or video": r"data\.(image|video|audio)_key|_vl_|-VL-|vlm|Vision|omni|limit_images",
    "several turns": r"multi_turn\.enable=True|tool_config_path|default_agent_loop|agent_loop_config|multiturn",
    "multi-token prediction": r"mtp\.enable=True",
    "several nodes": r"nnodes=([2-9]|1\d)",
    "distillation": r"distillation\.enabled=True",
}
PRELUDE = r"""
record() { printf '%s\0' "$@" >> "$RECORD"; printf '\n\0' >> "$RECORD"; }
command_not_found_handle() {
    case "$1" in date) echo 0101 ;; nvidia-smi) return 1 ;; tee) while read -r _; do :; done ;; esac
    case " $* " in *" -c "*) return 1 ;; *" -m "*) record "$@" ;; esac
    return 0
}
cd() { builtin cd "$@" 2>/dev/null || :; }
dirname() { echo "${1%/*}"; }
"""
ARGUMENTS = ("8", "checkpoints/out")
"""For scripts that take the number of processes and an output folder."""
ENVIRONMENT = ("is not installed",)


def commands(script: Path, folder: Path) -> Iterator[list[str]]:
    """The commands `... -m MODULE ...` that a script would start."""
    for arguments in ((), ARGUMENTS):
        record, prelude = folder / "record", folder / "prelude.sh"
        record.write_text("")
        prelude.write_text(PRELUDE)
        environment = {"PATH": "/nonexistent", "HOME": str(folder), "BASH_ENV": str(prelude), "RECORD": str(record)}
        try:
            subprocess.run(
                ["/bin/bash", str(script.absolute()), *arguments],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=10,
                check=False,
            )
        except subprocess.TimeoutExpired:
            continue
        lines = record.read_bytes().decode(errors="replace").split("\n\0")
        recorded = [line.rstrip("\0").split("\0") for line in lines if line]
        if recorded:
            yield from recorded
            return


def replaced(argv: list[str], folder: Path, schema: type[Section]) -> list[str]:
    """The overrides with our model, data and tracker instead of theirs."""
    model, data = folder / "model", folder / "rows.parquet"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 1 << 20}))
    data.write_bytes(b"PAR1")
    folders = re.compile(r"^(\+*\S*(model[._]path|_pretrain|adapter_path|tokenizer_path))=.+")
    argv = [folders.sub(rf"\1={model}", word) for word in argv if word not in ARGUMENTS]
    name = "actor_rollout_ref.model.path" if schema is PPOConfig else "model.path"
    own = [] if any("pretrain=" in word or word.startswith(f"{name}=") for word in argv) else [f"{name}={model}"]
    return [*argv, *own, f"data.train_files={data}", f"data.val_files={data}", "trainer.logger=console"]


def problems_of(argv: list[str], schema: type[Section]) -> list[str]:
    """What is wrong with a command; packages that this machine lacks do not count."""
    try:
        load(parse_arguments(argv), schema)
    except ConfigError as error:
        lines = [line.removeprefix("  - ") for line in str(error).splitlines()]
        lines = [line for line in lines if not line.endswith("settings are wrong:")]
        return [line for line in lines if not any(words in line for words in ENVIRONMENT)]
    return []


def main() -> None:
    """Print the share and the reasons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--verbose", action="store_true", help="print the problems of each command")
    args = parser.parse_args()
    apart, reasons, accepted, total = Counter[str](), Counter[str](), 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder, root = Path(name), args.checkout.absolute()
        os.chdir(root)
        for script in sorted(path for path in root.rglob("*.sh") if "tests" not in path.relative_to(root).parts):
            for command in commands(script, folder):
                at = next((at for at, word in enumerate(command) if word in MODULES and command[at - 1] == "-m"), None)
                if at is None:
                    continue
                module, argv = command[at], command[at + 1 :]
                ranks = [word.partition("=")[2] for word in command[:at] if re.match("--nproc.per.node=", word)]
                argv += [f"trainer.n_gpus_per_node={number}" for number in ranks]
                text = f"{script.name} {' '.join(argv)}".replace(str(folder), "~")
                reason = next((reason for reason, words in APART.items() if re.search(words, text)), "")
                if reason:
                    apart[reason] += 1
                    continue
                schema = MODULES[module]
                problems = problems_of(replaced(argv, folder, schema), schema)
                total, accepted = total + 1, accepted + (not problems)
                reasons.update({re.sub(r" = .*?(?=[:(] |$)|=\S+", "", problem) for problem in problems})
                if args.verbose:
                    print(f"{'accepted' if not problems else 'refused'}: {script.relative_to(root)}")
                    print("".join(f"    {problem}\n" for problem in problems), end="")
    print(f"{accepted} of {total} commands are accepted ({accepted / max(total, 1):.0%})")
    print("".join(f"  {count:3d} {reason}\n" for reason, count in reasons.most_common()), end="")
    print("not counted: " + ", ".join(f"{count} {reason}" for reason, count in apart.most_common()))


if __name__ == "__main__":
    main()
