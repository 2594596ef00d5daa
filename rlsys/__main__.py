"""rlsys COMMAND ...: the jobs and tools of this package under one name."""

import runpy
import sys
from pathlib import Path

from rlsys.utils.data_files import read_table

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = read_table(__file__, "commands.toml")


def main() -> None:
    """Run the command of `sys.argv`, which exits with its own code, or with 2 for a command that does not exist."""
    name, *rest = sys.argv[1:] or ["--help"]
    program = str(Path(sys.executable).with_name("rlsys"))  # Ray's workers look for modules beside it
    if name in ("--version", "-V"):
        from importlib.metadata import version

        print(f"rlsys {version('rlsys')}")
    elif name in ("--help", "-h", "help"):
        print(_help())
    elif name in COMMANDS:
        command = COMMANDS[name]
        sys.argv = [program, *command.get("arguments", ()), *rest]
        if "module" in command:
            from rlsys.utils.plugins import search_last_beside_namesakes

            search_last_beside_namesakes()
            runpy.run_module(command["module"], run_name="__main__")
        else:
            in_wheel = Path(__file__).parent / "commands"
            scripts = (in_wheel if in_wheel.is_dir() else ROOT) / "scripts"
            runpy.run_path(str(scripts / command["script"]), run_name="__main__")
    else:
        print(f"rlsys: {name} is not a command\n{_help()}", file=sys.stderr)
        raise SystemExit(2)


def _help() -> str:
    lines = (f"  {name:<12} {command['help']}" for name, command in COMMANDS.items())
    return "\n".join(["rlsys COMMAND ... (rlsys COMMAND --help)", *lines])


if __name__ == "__main__":
    main()
