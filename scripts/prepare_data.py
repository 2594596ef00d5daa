"""Write generated, verifiable tasks as verl-style parquet: OUT/train.parquet and OUT/test.parquet.

python scripts/prepare_data.py --task mix --train 4096 --val 256 --out data/mix --seed 1
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlsys.data.start_assets import write_rows
from rlsys.data.tasks import TASKS, make_split
from rlsys.utils.errors import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both files and say what is in them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=[*TASKS, "mix"], default="mix")
    parser.add_argument("--train", type=int, default=4096, metavar="N", help="rows to train on")
    parser.add_argument("--val", type=int, default=256, metavar="M", help="rows to validate on")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    try:
        train, val = make_split(options.task, num_train=options.train, num_val=options.val, seed=options.seed)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    for name, rows in (("train", train), ("test", val)):
        path = options.out / f"{name}.parquet"
        write_rows(path, rows)
        num_different = len({row["extra_info"]["question"] for row in rows})
        print(f"{path}: {len(rows)} rows, {num_different} different questions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
