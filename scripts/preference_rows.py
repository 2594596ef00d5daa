"""Write the quickstart's problems as rows for SFT, reward models and DPO: OUT/train.parquet and OUT/test.parquet.

python scripts/preference_rows.py --out data/preferences

Columns: prompt, response and chosen (the answer), rejected (the answer to another problem).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlsys.data.start_assets import prompt_rows, write_rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seed", type=int, default=1, help="draws the rejected answers")
    options = parser.parse_args(arguments)
    splits: tuple[Literal["train", "test"], ...] = ("train", "test")
    for split in splits:
        random, rows = Random(options.seed), prompt_rows(split)
        answers = sorted({row["extra_info"]["answer"] for row in rows})
        written = []
        for row in rows:
            right = row["extra_info"]["answer"]
            wrong = random.choice([answer for answer in answers if answer != right])
            written.append({"prompt": row["prompt"], "response": right, "chosen": right, "rejected": wrong})
        write_rows(options.out / f"{split}.parquet", written)
        print(f"{options.out / split}.parquet: {len(written)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
