"""The record of names in tests/golden/engine_names.json, made again from the wheels of pip's index.

`scripts/test.sh -m wheels tests/wheels`; RLSYS_WHEELS=all reads every version of the record (8 GB pass by), otherwise
the first and the last version of each row of the tables.
"""

import os

import pytest
from packaging.version import Version

from rlsys.fleet.external.capabilities import SERVERS
from rlsys.rollout.versions import SGLANG, VLLM
from tests.wheels.uses import names_of, read_record, wheel

pytestmark = [pytest.mark.wheels, pytest.mark.timeout(900)]
RECORD = read_record()
TABLES = {"vllm": VLLM, "sglang": SGLANG}


def ends_of_rows() -> list[str]:
    chosen = []
    for package, found in RECORD.items():
        rows = [row for table in (SERVERS[package], TABLES[package]) for row in table.rows]
        inside = [sorted((v for v in found if v in row), key=Version) for row in rows]
        ends = {version for versions in inside if versions for version in (versions[0], versions[-1])}
        every = os.environ.get("RLSYS_WHEELS") == "all"
        chosen += [f"{package}=={version}" for version in sorted(found if every else ends, key=Version)]
    return chosen


@pytest.mark.parametrize("requirement", ends_of_rows())
def test_the_record_says_what_the_wheel_has(requirement: str) -> None:
    package, _, version = requirement.partition("==")
    with wheel(requirement) as root:
        assert names_of(package, root) == RECORD[package][version]
