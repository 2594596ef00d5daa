"""The model merger as a script: see `python -m rlsys.model_merger --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlsys.model_merger.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
