"""Write the quickstart's problems as rows for SFT, reward models and DPO: OUT/train.parquet and OUT/test.parquet.

python scripts/preference_rows.py --out data/preferences

Columns: prompt, response and chosen (the answer), rejected (the answer to another problem).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlsys.data.files import Row, read_rows
from rlsys.data.start_assets import HELD_OUT_ROWS, TRAIN_ROWS
from scripts.prepare_data import write_rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seed", type=int, default=1, help="draws the rejected answers")
    options = parser.parse_args(arguments)
    for split, file in (("train", TRAIN_ROWS), ("test", HELD_OUT_ROWS)):
        random, rows = Random(options.seed), [row.values for row in read_rows(str(file)) if isinstance(row, Row)]
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
