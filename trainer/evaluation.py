"""Evaluation without training: answers of a model to validation prompts, graded."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from rlsys.config import EvalConfig
from rlsys.telemetry.log import setup_logging
from rlsys.telemetry.trackers import check_loggers
from trainer.errors import told


def run_eval(config: EvalConfig) -> int:
    """Answer, grade, and print `val-core/*`; exit code 0, or 1 with one clear error."""
    setup_logging()
    start = time.perf_counter()
    with told(sys.stderr) as outcome:
        check_loggers(config.trainer.logger)
        metrics = evaluate(config)
        root = Path(config.trainer.default_local_dir)
        root.mkdir(parents=True, exist_ok=True)
        (root / "evaluation.json").write_text(json.dumps(metrics, indent=1, sort_keys=True))
        for name, value in sorted(metrics.items()):
            if name.startswith("val-core/"):
                print(f"{name} = {value:.4f}")
        print(f"rlsys: done in {time.perf_counter() - start:.0f} s; all metrics in {root / 'evaluation.json'}")
    return outcome.exit_code
