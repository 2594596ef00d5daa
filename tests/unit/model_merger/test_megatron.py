"""Checkpoints that a MegatronEngine wrote, of masters cut by the distributed optimizer, become what it exports."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlsys.config.schema.model import ModelConfig, OptimConfig
from rlsys.engines.base import TrainEngineOptions
from rlsys.engines.megatron.engine import MegatronEngine
from rlsys.engines.micro_batches import MicroBatches
from rlsys.interfaces import LossSum
from rlsys.model_merger.convert import compare, merge
from rlsys.models.megatron.parallel import ParallelSizes
from rlsys.protocol import DataProto
from rlsys.utils.errors import CheckpointError
from tests.contracts.train_engine import megatron_section
from tests.ranks import run_ranks
from tests.unit.models.megatron_families.tiny import write_model

CASES = {
    "deepseek-v3": ParallelSizes(tp=2, ep=2, etp=1, sequence_parallel=True),
    "qwen2-tied": ParallelSizes(tp=2, pp=2),
}


def train_and_save(model: Path, sizes: ParallelSizes, path: Path) -> None:
    ids = torch.randint(1, 101, (4, 9), generator=torch.Generator().manual_seed(0))
    ones = torch.ones_like(ids)
    rows = {"input_ids": ids, "prompts": ids[:, :3], "responses": ids[:, 3:], "attention_mask": ones}
    engine = MegatronEngine(
        ModelConfig(path=str(model)),
        TrainEngineOptions(optim=OptimConfig(lr=1e-2), training=MicroBatches(rows=2)),
        megatron=megatron_section(sizes),
    )

    def nll(outputs: Any, rows: Any) -> LossSum:
        return LossSum(-outputs["log_probs"].sum(), float(rows["responses"].numel()))

    engine.forward_backward(DataProto.from_dict({**rows, "position_ids": ones.cumsum(1) - 1}), nll)
    assert engine.optim_step().applied
    engine.save(path, "resume")
    engine.save(path / "huggingface", "export")


@pytest.mark.parametrize("name", CASES)
def test_a_megatron_checkpoint_becomes_what_the_engine_exports(name: str, tmp_path: Path) -> None:
    write_model(name, tmp_path / "model")
    run_ranks(4, train_and_save, tmp_path / "model", CASES[name], tmp_path / "actor")
    exported = tmp_path / "actor" / "huggingface"
    merge(tmp_path / "actor", tmp_path / "hf", backend="megatron")
    assert compare(tmp_path / "hf", exported) == []
    assert len(compare(tmp_path / "hf", tmp_path / "model")) > 20
    assert compare(tmp_path / "actor", exported, backend="megatron") == []

    file = next(iter(json.loads((tmp_path / "actor" / "manifest.json").read_text())["files"]))
    (tmp_path / "actor" / file).write_bytes(b"")
    with pytest.raises(CheckpointError, match="is truncated"):
        merge(tmp_path / "actor", tmp_path / "hf2")
    assert not (tmp_path / "hf2").exists()
    assert load_file(next((tmp_path / "hf").glob("*.safetensors")))
