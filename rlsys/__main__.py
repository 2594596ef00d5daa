"""rlsys COMMAND ...: the jobs and tools of this package under one name."""

import runpy
import sys
from pathlib import Path

MERGER = "rlsys.model_merger"
ROOT = Path(__file__).resolve().parents[1]
MODULES = {
    "train": ("trainer.main_ppo", "PPO, GRPO and related algorithms"),
    "sft": ("trainer.main_sft", "supervised fine-tuning"),
    "rm": ("trainer.main_rm", "training a reward model"),
    "dpo": ("trainer.main_dpo", "learning from preferences: DPO, IPO, KTO"),
    "eval": ("trainer.main_eval", "answers to validation prompts, graded"),
    "report": ("rlsys.telemetry.report", "the report page of a run: rlsys report RUN_FOLDER"),
    "reward-test": ("trainer.main_reward", "rows scored by a reward function: rlsys reward-test FILE ROWS"),
    "merge": (MERGER, "checkpoints to Hugging Face folders: rlsys merge --local_dir CHECKPOINT ..."),
    "split": (MERGER, "Hugging Face folders to checkpoints"),
    "verify": (MERGER, "compare a checkpoint with a Hugging Face folder"),
}
SCRIPTS = {
    "prepare-data": "rows of gsm8k, math and other tasks: rlsys prepare-data --task gsm8k --out FOLDER",
    "plan": "memory of a run before it starts",
    "doctor": "what this machine has",
}


def main() -> None:
    """Run the command of `sys.argv`, which exits with its own code, or with 2 for a command that does not exist."""
    name, *rest = sys.argv[1:] or ["--help"]
    program = str(Path(sys.executable).with_name("rlsys"))  # Ray's workers look for modules beside it
    if name in ("--version", "-V"):
        from importlib.metadata import version

        print(f"rlsys {version('rlsys')}")
    elif name in ("--help", "-h", "help"):
        print(_help())
    elif name in MODULES:
        from rlsys.utils.plugins import search_last_beside_namesakes

        search_last_beside_namesakes()
        module, _ = MODULES[name]
        sys.argv = [program, *([name] if module == MERGER else []), *rest]
        runpy.run_module(module, run_name="__main__")
    elif name in SCRIPTS:
        sys.argv = [program, *rest]
        in_wheel = Path(__file__).parent / "commands"
        scripts = (in_wheel if in_wheel.is_dir() else ROOT) / "scripts"
        runpy.run_path(str(scripts / f"{name.replace('-', '_')}.py"), run_name="__main__")
    else:
        print(f"rlsys: {name} is not a command\n{_help()}", file=sys.stderr)
        raise SystemExit(2)


def _help() -> str:
    described = {name: text for name, (_, text) in MODULES.items()} | SCRIPTS
    return "\n".join(["rlsys COMMAND ... (rlsys COMMAND --help)", *(f"  {n:<12} {t}" for n, t in described.items())])


if __name__ == "__main__":
    main()
