"""How many commands of verl's example scripts run here as they stand: `verl_commands.py CHECKOUT [--verbose]`.

Each shell script of the checkout, its end-to-end tests included, runs in bash with nothing on its PATH, so that every
command only records its arguments; variables that a script wants set get a value. Of the commands that start verl's
jobs, model, data and trackers are replaced by files that exist, and the configuration is resolved in this process, as
`--dry-run` does. Prints the share that is accepted by kind of job and, for the rest, how many commands meet each
reason. Only audio, video, other hardware, other engines and trainers that verl's recipes write themselves are left out.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from rlsys.config import EvalConfig, PPOConfig, SFTConfig
from rlsys.config.arguments import parse_arguments
from rlsys.config.load import load
from rlsys.config.schema.base import Section
from rlsys.utils.errors import ConfigError

MODULES: dict[str, type[Section]] = {
    "main_ppo": PPOConfig,
    "main_ppo_sync": PPOConfig,
    "main_dapo": PPOConfig,
    "fully_async_main": PPOConfig,
    "sft_trainer": SFTConfig,
    "fsdp_sft_trainer": SFTConfig,
    "main_generation": EvalConfig,
    "main_generation_server": EvalConfig,
}
PRESETS = {
    "fully_async": "fully_async_ppo_trainer",
    "one_step_off": "one_step_off_ppo_trainer",
    "main_generation": "generation",
}
"""The configurations that verl's other trainers start from."""
APART = {
    "other hardware": r"npu|ascend|rocm|amd",
    "other engines": r"veomni|automodel|torchtitan|fsdp_turbo|mindspeed|mlite|megatron_lite|trtllm",
    "audio": r"data\.audio_key|omni|minicpmo",
}
IMAGES = r"data\.image_key|[-_](vl|VL)[-_]|vlm|Vision|limit_images|geo3k"
EXPERTS = r"A\d+B|[-_]a\d+b|[Mm]o[Ee]|deepseek_v|expert_parallel_size=[2-9]|router_replay"
KINDS = {
    "images": IMAGES,
    "several turns": r"multi_turn\.enable=True|tool_config_path|default_agent_loop|agent_loop_config|multiturn",
    "asynchronous": r"async_training\.|fully_async|one_step_off|trainer_mode=",
    "distillation": r"distillation\.enabled=True",
    "LoRA": r"lora",
    "Megatron": r"megatron",
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
basename() { echo "${1##*/}"; }
ulimit() { :; }
"""
UNSET = re.compile(r"line \d+: (\w+): (?:unbound variable|(?:must )?set|parameter null)", re.IGNORECASE)
MAX_UNSET = 8
ARGUMENTS = ("8", "checkpoints/out")
"""For scripts that take the number of processes and an output folder."""
ENVIRONMENT = ("is not installed",)
LACKING = ("file not found", "folder not found", "no such preset")


def commands(script: Path, folder: Path) -> list[list[str]]:
    """The commands `... -m MODULE ...` that a script would start."""
    record, prelude = folder / "record", folder / "prelude.sh"
    prelude.write_text(PRELUDE)
    for arguments in ((), ARGUMENTS):
        environment = {"PATH": "/nonexistent", "HOME": str(folder), "BASH_ENV": str(prelude), "RECORD": str(record)}
        for _ in range(MAX_UNSET):
            record.write_text("")
            try:
                done = subprocess.run(
                    ["/bin/bash", str(script.absolute()), *arguments],
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=10,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                break
            lines = record.read_bytes().decode(errors="replace").split("\n\0")
            if recorded := [line.rstrip("\0").split("\0") for line in lines if line]:
                return recorded
            unset = UNSET.search(done.stderr.decode(errors="replace"))
            if unset is None or unset[1] in environment or unset[1].isdigit():
                break
            value = unset[1] if unset[1] in ("True", "False") else str(folder / "model")
            value = "vllm" if "BACKEND" in unset[1] else value
            environment[unset[1]] = "8" if re.search("NUM|SIZE|N_|NNODES", unset[1]) else value
    return []


def stand_ins(folder: Path, *, has_images: bool = False, has_experts: bool = False) -> tuple[Path, Path]:
    """A model and rows that exist, as far as a configuration looks at them."""
    names = [name for name, has in (("vision", has_images), ("sparse", has_experts)) if has]
    model, data = folder / "_".join([*names, "model"]), folder / "rows.parquet"
    model.mkdir(exist_ok=True)
    facts: dict[str, object] = {"model_type": "qwen2_5_vl", "vision_config": {}} if has_images else {}
    facts |= {"num_experts": 256} if has_experts else {}
    config = {"max_position_embeddings": 1 << 20, **facts}
    (model / "config.json").write_text(json.dumps(config))
    (model / "adapter_config.json").write_text("{}")
    data.write_bytes(b"PAR1")
    return model, data


def replaced(argv: list[str], folder: Path, module: str, schema: type[Section]) -> list[str]:
    """The overrides with our model, data and tracker instead of theirs."""
    text = " ".join(argv)
    has_images, has_experts = (re.search(words, text) is not None for words in (IMAGES, EXPERTS))
    model, data = stand_ins(folder, has_images=has_images, has_experts=has_experts)
    folders = re.compile(r"^(\+*\S*(model[._]path|_pretrain|adapter_path|tokenizer_path))=.*")
    argv = [folders.sub(rf"\1={model}", word) for word in argv if word not in ARGUMENTS]
    argv = [f"{word}{folder}" if word == "trainer.default_local_dir=" else word for word in argv]
    if not any(word.startswith(("--config-name", "--config-path")) for word in argv):
        argv += [f"--config-name={preset}" for words, preset in PRESETS.items() if words in module]
    if schema is EvalConfig:
        return [re.sub(r"^data\.(path|train_files)=.*", rf"data.\1={data}", word) for word in argv]
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


def kind_of(text: str, schema: type[Section]) -> str:
    """The kind of job that a command is counted under."""
    if schema in (SFTConfig, EvalConfig):
        return "SFT" if schema is SFTConfig else "generation"
    return next((kind for kind, words in KINDS.items() if re.search(words, text)), "FSDP")


def print_shares(
    what: str, total: Counter[str], accepted: Counter[str], reasons: Counter[str], apart: Counter[str]
) -> None:
    """The share that is accepted, by kind, how many meet each reason, and what is not counted."""
    share = accepted.total() / max(total.total(), 1)
    print(f"{accepted.total()} of {total.total()} {what} are accepted ({share:.0%})")
    print("by kind: " + ", ".join(f"{kind} {accepted[kind]} of {count}" for kind, count in total.most_common()))
    print("".join(f"  {count:3d} {reason}\n" for reason, count in reasons.most_common()), end="")
    print("not counted: " + ", ".join(f"{count} {reason}" for reason, count in apart.most_common() if count))


def main() -> None:
    """Print the shares and the reasons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--verbose", action="store_true", help="print the problems of each command")
    args = parser.parse_args()
    apart, reasons, accepted, total = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder, root = Path(name), args.checkout.absolute()
        for path in root.iterdir():
            (folder / path.name).symlink_to(path)
        os.chdir(folder)
        for script in sorted(root.rglob("*.sh")):
            for command in commands(script, folder):
                at = next((at for at, word in enumerate(command) if command[at - 1] == "-m" and "verl" in word), 0)
                at = at or next((at for at, word in enumerate(command) if re.match(r"recipe\..*main", word)), 0)
                module, argv = command[at].rpartition(".")[2], command[at + 1 :]
                if not at or module not in MODULES:
                    apart["other programs"] += "main" in module
                    continue
                ranks = [word.partition("=")[2] for word in command[:at] if re.match("--nproc.per.node=", word)]
                argv += [f"trainer.n_gpus_per_node={number}" for number in ranks]
                text = f"{command[at]} {script.relative_to(root)} {' '.join(argv)}".replace(str(folder), "~")
                reason = next((reason for reason, words in APART.items() if re.search(words, text)), "")
                if reason:
                    apart[reason] += 1
                    continue
                schema = MODULES[module]
                kind, problems = kind_of(text, schema), problems_of(replaced(argv, folder, command[at], schema), schema)
                if problems and all(any(words in problem for words in LACKING) for problem in problems):
                    apart["commands with files that the checkout lacks"] += 1
                    continue
                total[kind] += 1
                accepted[kind] += not problems
                reasons.update({re.sub(r" = .*?(?=[:(] |$)|=\S+", "", problem) for problem in problems})
                if args.verbose:
                    print(f"{'accepted' if not problems else 'refused'}: {script.relative_to(root)}")
                    print("".join(f"    {problem}\n" for problem in problems), end="")
    print_shares("commands", total, accepted, reasons, apart)


if __name__ == "__main__":
    main()
