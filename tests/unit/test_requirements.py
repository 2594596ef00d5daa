"""The lock files hold what pyproject.toml asks for."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def asked_for(extras: list[str]) -> Iterator[Requirement]:
    """The package's requirements with some extras, and with the extras that these name."""
    for text in [*PROJECT["dependencies"], *(line for e in extras for line in PROJECT["optional-dependencies"][e])]:
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            yield from asked_for(sorted(requirement.extras))
        else:
            yield requirement


@pytest.mark.parametrize(
    ("lock", "extras", "python"),
    [("cpu", ["dev", "trackers"], "3.11"), ("cpu", ["dev", "trackers"], "3.13"), ("gpu", ["gpu"], "3.12")],
)
def test_every_requirement_is_locked_to_a_version_that_it_allows(lock: str, extras: list[str], python: str) -> None:
    environment = {"python_version": python, "python_full_version": f"{python}.1", "sys_platform": "linux"}
    lines = [Requirement(line) for line in (ROOT / f"requirements/{lock}.txt").read_text().splitlines()]
    used = [line for line in lines if line.marker is None or line.marker.evaluate(environment)]
    locked = {canonicalize_name(line.name): next(iter(line.specifier)).version for line in used}
    assert len(locked) == len(used)
    wrong = [
        f"{requirement} but {locked.get(canonicalize_name(requirement.name))}"
        for requirement in asked_for(extras)
        if not requirement.specifier.contains(locked.get(canonicalize_name(requirement.name), "0"), prereleases=True)
    ]
    assert not wrong, "run scripts/lock.sh"


def test_the_image_copies_files_that_exist() -> None:
    copied = [line.split()[1] for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("COPY ")]
    for lock in ("cpu", "gpu"):
        assert all((ROOT / source.replace("${LOCK}", lock)).exists() for source in copied)


def test_the_image_has_what_kuberays_probes_run() -> None:
    """KubeRay 1.5 asks a node for its health with wget, in its container, and ends one that has none."""
    assert "wget" in (ROOT / "Dockerfile").read_text().partition("apt-get install")[2].partition("&&")[0].split()
