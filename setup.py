"""Everything is in pyproject.toml; this only puts the presets and the scripts of the rlsys command into the wheel."""

from pathlib import Path
from shutil import copy2

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
NAMES = ("doctor", "plan", "prepare_data", "model_shapes", "weight_layouts")
COMMANDS = [ROOT / "scripts" / f"{name}.py" for name in NAMES]
FILES = {  # folder below rlsys/: files
    "presets": sorted(ROOT.glob("config/*.yaml")),
    "commands": [ROOT / "pyproject.toml"],
    "commands/scripts": COMMANDS,
}


class BuildWithFiles(build_py):
    def run(self) -> None:
        super().run()
        for folder, files in ({} if self.editable_mode else FILES).items():
            target = Path(self.build_lib, "rlsys", folder)
            target.mkdir(parents=True, exist_ok=True)
            for file in files:
                copy2(file, target)


setup(cmdclass={"build_py": BuildWithFiles})
