"""The start assets: what a run without a model trains, warmed up by our own SFT engine once and kept in the cache."""

from __future__ import annotations

import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from rlsys.config import PPOConfig
from rlsys.config.schema.model import ModelConfig, OptimConfig, ShardConfig
from rlsys.data.collate import collate_texts
from rlsys.data.start_assets import WarmUp, ensure_start_assets
from rlsys.data.supervised import load_texts
from rlsys.engines.fsdp.engine import FSDPEngine
from rlsys.engines.micro_batches import MicroBatches
from rlsys.roles.lm import LMEngine
from rlsys.telemetry.log import get_logger
from rlsys.telemetry.progress import Progress

log = get_logger(__name__)


def with_start_assets(config: PPOConfig) -> PPOConfig:
    """The configuration with the start model and its rows where it names none."""
    if config.actor_rollout_ref.model.path is not None:
        return config
    assets = ensure_start_assets(warm_up)
    log.info("start model: %s", assets.model)
    tree = config.model_dump()
    tree["actor_rollout_ref"]["model"]["path"] = model = str(assets.model)
    tree["critic"]["model"]["path"] = tree["critic"]["model"]["path"] or model
    data = tree["data"]
    if data["train_files"] is None:
        data["train_files"] = (str(assets.train_file),)
        data["val_files"] = data["val_files"] or (str(assets.val_file),)
    return config.model_validate(tree)


def warm_up(folder: Path, texts: Path, settings: WarmUp) -> None:
    """SFT of the model that `folder` describes on the texts, one pass in their order; the weights are left there.

    On one thread: the matrices are too small to share, and threads that wait for each other cost more than they help.
    """
    start = time.perf_counter()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    rows = load_texts(str(texts), tokenizer)
    joined_here, threads = not dist.is_initialized(), torch.get_num_threads()
    torch.set_num_threads(1)
    engine = FSDPEngine(
        ModelConfig(
            override_config=json.loads((folder / "config.json").read_text()), enable_gradient_checkpointing=False
        ),
        optim=OptimConfig(
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            lr_warmup_steps=settings.warmup_steps,
            lr_scheduler_type=settings.schedule,
        ),
        grad_clip=settings.grad_clip,
        total_steps=settings.num_steps,
        shard=ShardConfig(seed=settings.seed),
        training=MicroBatches(rows=settings.batch_size),
    )
    role, metrics = LMEngine(engine), dict[str, float]()
    with Progress(total_steps=settings.num_steps, title="making the start model (once)") as progress:
        for step in range(settings.num_steps):
            chosen = [rows[step * settings.batch_size + i] for i in range(settings.batch_size)]
            metrics = role.train_batch(collate_texts(chosen, pad_token_id=tokenizer.pad_token_id))
            progress.step_done(step + 1)
    with TemporaryDirectory(dir=folder) as beside:
        engine.save(Path(beside) / "export", "export")
        (Path(beside) / "export" / "model.safetensors").rename(folder / "model.safetensors")
    if joined_here:
        dist.destroy_process_group()
    torch.set_num_threads(threads)
    log.info("start model made in %.0f s, loss %.3f", time.perf_counter() - start, metrics["train/loss"])
