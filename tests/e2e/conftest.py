"""A tiny model and arithmetic rows for whole runs."""

import json
import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    Qwen2Config,
)

from tests.e2e.fork_server import ForkServer
from tests.e2e.ray_head import Head, ray_head
from tests.start_tokenizer import build_tokenizer
from trainer.main_ppo import main

GRADER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return (sum(solution_str.encode()) % 7) / 6
"""

GPU_CACHE_BYTES = 1 << 30
GPU_MEMORY = {
    "vllm": (
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
        f"+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes={GPU_CACHE_BYTES}",
    ),
    "sglang": (
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
        "+actor_rollout_ref.rollout.engine_kwargs.sglang.max_total_tokens=16384",
    ),
}
"""A cache of one size for a tiny model, not what an engine measures while other tests take and release memory. The
share is what vLLM wants to find free first, and what SGLang may find taken."""
GDN = "+actor_rollout_ref.rollout.engine_kwargs.vllm.gdn_prefill_backend=triton"
"""FlashInfer's kernels for gated delta layers, vLLM's choice on Hopper, are built with CUTLASS's DSL, which takes long
where it is installed."""
UNCOMPILED = "actor_rollout_ref.actor.use_torch_compile=false"
"""Without it a job on a GPU compiles the layers first, which takes a minute."""


@dataclass(frozen=True)
class Toy:
    """Where the toy model and its rows lie."""

    model: Path
    train: Path
    val: Path
    grader: Path
    """Scores that depend on the text and differ within a group even before anything is learned."""
    judge: Path
    """A reward model."""

    def overrides(self, out: Path, *more: str) -> list[str]:
        """Arguments of a run of a few seconds that learns from 32 samples a step."""
        return [
            f"actor_rollout_ref.model.path={self.model}",
            f"data.train_files={self.train}",
            f"data.val_files={self.val}",
            "data.train_batch_size=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.rollout.n=4",
            "data.max_prompt_length=16",
            "data.max_response_length=4",
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "reward.num_workers=1",
            "trainer.total_training_steps=3",
            "trainer.val_before_train=false",
            f"trainer.default_local_dir={out}",
            *more,
        ]


def two_stages(toy: Toy, folder: Path, engine: str, *, enforce_eager: bool) -> list[str]:
    """A run on two GPUs whose engine serves in two pipeline stages, one of which has a layer more."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = with_model(toy, folder / "model", Qwen2Config, num_hidden_layers=5, tie_word_embeddings=True, **sizes)
    rollout = "actor_rollout_ref.rollout"
    return model.overrides(
        folder / "out",
        *(f"{rollout}.name={engine}", f"{rollout}.pipeline_model_parallel_size=2", "trainer.n_gpus_per_node=2"),
        *([UNCOMPILED] if enforce_eager else []),
        *(f"{rollout}.enforce_eager={enforce_eager}", *GPU_MEMORY[engine]),
        *(f"{rollout}.validate_weight=true", f"{rollout}.parity.freq=1", f"{rollout}.parity.policy=stop"),
        f"reward.custom_reward_function.path={model.grader}",
    )


def with_model(toy: Toy, folder: Path, kind: type[PretrainedConfig], **sizes: Any) -> Toy:
    """The toy with a random model of another kind and its own tokenizer, in `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(toy.model)
    tokenizer.save_pretrained(str(folder))
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = kind(vocab_size=len(tokenizer), max_position_embeddings=128, **ids, **sizes)  # pyrefly: ignore
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return replace(toy, model=folder)


def follow_large_updates(toy: Toy, out: Path, *more: str) -> list[dict[str, float]]:
    """Metrics of a run of three large updates, each pushed and probed: an engine that does not follow ends it."""
    argv = toy.overrides(
        out,
        *("actor_rollout_ref.rollout.parity.freq=1", "actor_rollout_ref.rollout.parity.policy=stop"),
        *("actor_rollout_ref.actor.optim.lr=1e-2", f"reward.custom_reward_function.path={toy.grader}"),
        *more,
    )
    assert main(argv) == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["weights/version"] for line in lines] == [1, 2, 3]
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    return lines


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    folder = tmp_path_factory.mktemp("toy")
    build_tokenizer().save_pretrained(str(folder / "model"))
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=262,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(str(folder / "model"))
    judge = Qwen2Config.from_dict({**config.to_dict(), "num_labels": 1, "tie_word_embeddings": False})
    AutoModelForSequenceClassification.from_config(judge).save_pretrained(str(folder / "judge"))
    build_tokenizer().save_pretrained(str(folder / "judge"))
    draw = random.Random(0)
    for name, count in (("train", 64), ("val", 8)):
        rows = []
        for index in range(count):
            a, b = draw.randint(0, 9), draw.randint(0, 9)
            rows.append(
                {
                    "prompt": f"{a}+{b}=",
                    "data_source": "text/exact",
                    "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                    "extra_info": {"index": index},
                }
            )
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "grader.py").write_text(GRADER)
    return Toy(folder / "model", folder / "train.jsonl", folder / "val.jsonl", folder / "grader.py", folder / "judge")


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """The process from which whole runs are forked."""
    with ForkServer() as server:
        yield server


@pytest.fixture(scope="session")
def head() -> Iterator[Head]:
    """A Ray head that all jobs join and leave clean."""
    with ray_head() as head:
        yield head


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 640 KiB: room for one checkpoint of the toy actor, not for two."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=640k", "tmpfs", folder], capture_output=True, check=False
    )
    if made.returncode != 0:
        pytest.skip("mounting a file system needs privileges that this machine does not give")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def enlarge(disk: Path) -> None:
    """Give a small disk room enough."""
    subprocess.run(["mount", "-o", "remount,size=16m", disk], check=True)
