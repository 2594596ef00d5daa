"""The script that measures how many of verl's commands are accepted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.timing import scaled_s

ROOT = Path(__file__).resolve().parents[3]
LAUNCHER = """
set -xeuo pipefail
cd "$(dirname "$0")/.."
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' && echo npu || echo gpu)}
DATA=(data.train_files="['$HOME/a.parquet', '$HOME/b.parquet']" data.train_batch_size=${BATCH:-256})
mkdir -p /somewhere; rm -rf /somewhere
uv run python3 -m verl.trainer.main_ppo "${DATA[@]}" algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.model.path=Qwen/Qwen3-8B trainer.logger='["console","wandb"]' \\
    ray_kwargs.ray_init.runtime_env.py_executable="uv run" %s "$@" 2>&1 | tee log.txt
"""
SFT = """
[ "$#" -lt 2 ] && exit 1
torchrun --nproc_per_node=$1 -m verl.trainer.sft_trainer engine=fsdp optim=fsdp model=hf_model \\
    model.path=Qwen/Qwen3-8B engine.ulysses_sequence_parallel_size=8 optim.min_lr=1e-6 optim.lr=1e-5
"""


def test_the_share_of_accepted_commands_is_printed_with_the_reasons(tmp_path: Path) -> None:
    scripts = {"good": "", "bad": "trainer.total_epoch=1", "images": "data.image_key=images"}
    for name, override in scripts.items():
        (tmp_path / f"{name}.sh").write_text(LAUNCHER % override)
    (tmp_path / "sft.sh").write_text(SFT)
    command = [sys.executable, ROOT / "scripts/verl_commands.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled_s(60), check=True)
    share, reason, apart = done.stdout.splitlines()
    assert share == "2 of 3 commands are accepted (67%)"
    assert reason.startswith("    1 trainer.total_epoch (command line): no such key")
    assert apart == "not counted: 1 images, audio or video"
