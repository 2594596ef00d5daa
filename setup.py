"""Everything is in pyproject.toml; this only puts the presets of config/ into the wheel as rlsys/presets."""

from pathlib import Path
from shutil import copy2

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithPresets(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "rlsys", "presets")
            target.mkdir(parents=True, exist_ok=True)
            for preset in sorted(Path(__file__).parent.glob("config/*.yaml")):
                copy2(preset, target)


setup(cmdclass={"build_py": BuildWithPresets})
