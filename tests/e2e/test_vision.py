"""Whole runs on rows with images: local and on Ray, with validation, a checkpoint and what follows from it."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlsys.model_merger.convert import merge
from rlsys.rollout.hf.engine import HFRollout
from tests.e2e.conftest import GDN, GPU_MEMORY, GRADER, UNCOMPILED
from tests.fla_stand_in import HAS_PACKED_DELTA
from tests.tiny_vision import MODELS, QWEN35, wide, write_model, write_rows
from trainer.main_ppo import main

NEEDS_VLLM, NEEDS_SGLANG = (
    [getattr(pytest.mark, name), pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}")]
    for name in ("vllm", "sglang")
)


def arguments(
    place: Path, *more: str, config: dict[str, Any] = MODELS["qwen2_5_vl"], videos: bool = False
) -> list[str]:
    """Arguments of a run of two steps in `place`/out."""
    (place / "grader.py").write_text(GRADER)
    rows = write_rows(place / "rows.parquet", videos=videos)
    return [
        f"actor_rollout_ref.model.path={write_model(place / 'model', config)}",
        f"data.train_files={rows}",
        f"data.val_files={rows}",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        "data.max_prompt_length=128",
        "data.max_response_length=4",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={place}/grader.py",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        "actor_rollout_ref.rollout.parity.freq=1",
        "actor_rollout_ref.rollout.parity.policy=stop",
        f"trainer.default_local_dir={place}/out",
        *more,
    ]


def metrics_of(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "out" / "metrics.jsonl").read_text().splitlines()]


def test_a_run_on_images_and_videos_validates_and_leaves_a_model_with_its_processor(tmp_path: Path) -> None:
    assert main(arguments(tmp_path, "trainer.backend=local", videos=True)) == 0
    lines = metrics_of(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert max(line["parity/max_abs"] for line in lines) < 1e-4
    assert any(name.startswith("val-core/toy/") for name in lines[2])
    merge(tmp_path / "out", tmp_path / "merged")
    assert (tmp_path / "merged" / "preprocessor_config.json").is_file()
    HFRollout.from_path(tmp_path / "merged").close()


@pytest.mark.parametrize(
    ("engine", "workflow"),
    [
        pytest.param("vllm", "VisionRLVRWorkflow", marks=pytest.mark.vllm),
        pytest.param("vllm", "MultiTurnWorkflow", marks=pytest.mark.vllm),
        pytest.param("sglang", "MultiTurnWorkflow", marks=pytest.mark.sglang),
    ],
)
def test_an_engine_draws_answers_to_images_as_the_trainer_reads_them(
    tmp_path: Path, engine: str, workflow: str
) -> None:
    engines = [f"actor_rollout_ref.rollout.name={engine}", "actor_rollout_ref.rollout.enforce_eager=true"]
    more = [*engines, f"actor_rollout_ref.rollout.workflow={workflow}", "data.max_response_length=96"]
    assert main(arguments(tmp_path, "trainer.backend=local", *more, config=wide(MODELS["qwen2_5_vl"]))) == 0
    lines = metrics_of(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert max(line["parity/max_abs"] for line in lines) < 1e-4


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_sglang_draws_answers_to_images_in_two_stages(tmp_path: Path, family: str) -> None:
    sizes = ("trainer.n_gpus_per_node=2", "trainer.device=cpu", "ray_kwargs.ray_init.num_cpus=2")
    served = ("name=sglang", "pipeline_model_parallel_size=2", "validate_weight=true")
    more = ["trainer.backend=ray", *sizes, *(f"actor_rollout_ref.rollout.{setting}" for setting in served)]
    assert main(arguments(tmp_path, *more, config=wide(MODELS[family]))) == 0
    lines = metrics_of(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert max(line["parity/max_abs"] for line in lines) < 1e-4


@pytest.mark.vllm
def test_gated_delta_layers_are_trained_and_served_with_images(tmp_path: Path) -> None:
    more = ["trainer.backend=local", "trainer.device=cpu", "actor_rollout_ref.model.use_remove_padding=false"]
    served = ("name=vllm", "enforce_eager=true", "dtype=bfloat16", "validate_weight=true")
    more += [f"actor_rollout_ref.rollout.{setting}" for setting in served]
    assert main(arguments(tmp_path, *more, config=wide(QWEN35, head_dim=64))) == 0
    assert max(line["parity/mean_abs"] for line in metrics_of(tmp_path)) < 0.01


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_gated_delta_layers_see_images_on_a_gpu(strategy: str, tmp_path: Path) -> None:
    if strategy == "megatron" and not (HAS_PACKED_DELTA and find_spec("fla")):
        pytest.skip("needs megatron-core>=0.19 and flash-linear-attention")
    served = ("name=vllm", "dtype=bfloat16", "validate_weight=true")
    more = [f"actor_rollout_ref.rollout.{setting}" for setting in served]
    more += [f"actor_rollout_ref.actor.strategy={strategy}", UNCOMPILED, *GPU_MEMORY["vllm"], GDN]
    more += [f"actor_rollout_ref.model.use_remove_padding={str(strategy == 'megatron').lower()}"]
    assert main(arguments(tmp_path, *more, config=wide(QWEN35, head_dim=64))) == 0
    assert max(line["parity/mean_abs"] for line in metrics_of(tmp_path)) < 0.02


@pytest.mark.slow
def test_episodes_on_images_have_the_log_probs_of_the_trainer(tmp_path: Path) -> None:
    workflow = "actor_rollout_ref.rollout.workflow=MultiTurnWorkflow"
    more = [workflow, "data.max_response_length=96", "trainer.test_freq=-1"]
    assert main(arguments(tmp_path, "trainer.backend=local", *more)) == 0
    lines = metrics_of(tmp_path)
    assert max(line["parity/max_abs"] for line in lines) < 1e-4
    assert max(line.get("agent/num_turns/mean", 0) for line in lines) > 1
    assert list((tmp_path / "out" / "rollouts" / "images").glob("*.png"))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["actor_rollout_ref.rollout.name=sglang"], "patches of 14 pixels only; the model's have 4"),
        (
            ["actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.model.lora_rank=2"],
            "actor_rollout_ref.actor.strategy=fsdp",
        ),
        (["actor_rollout_ref.rollout.name=sglang_remote"], "set actor_rollout_ref.rollout.name=vllm_remote"),
        (
            [
                "actor_rollout_ref.rollout.name=vllm_remote",
                "actor_rollout_ref.model.lora_rank=2",
                "actor_rollout_ref.rollout.servers.lora_name=actor",
            ],
            "actor_rollout_ref.rollout.servers.lora_name = actor: servers may apply adapters to the language model",
        ),
        (["algorithm.adv_estimator=gae"], "algorithm.adv_estimator=grpo"),
        (["actor_rollout_ref.rollout.workflow=MultiTurnWorkflow"], "row 0: workflows take no videos"),
        (["data.mm_processor_kwargs={max_pixel: 4}"], "max_pixel is not among"),
    ],
)
def test_what_takes_no_images_is_refused_before_a_worker_starts(
    tmp_path: Path, settings: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(arguments(tmp_path, "trainer.backend=local", *settings, videos=True))
    except SystemExit as end:
        code = end.code
    assert code in (1, 2)
    assert why in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl"])
def test_two_ranks_on_ray_freeze_the_tower_and_continue_a_checkpoint(tmp_path: Path, family: str) -> None:
    more = ["trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.freeze_vision_tower=true", "trainer.save_freq=1"]
    given = arguments(tmp_path, "trainer.backend=ray", *more, config=MODELS[family])
    assert main(given) == 0
    assert max(line["parity/max_abs"] for line in metrics_of(tmp_path)) < 1e-4
    assert main([*given, "trainer.total_training_steps=3"]) == 0
    assert [line["step"] for line in metrics_of(tmp_path)][-1] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes", "engine"),
    [
        ("qwen2_5_vl", {"tensor": 2}, "hf"),
        ("qwen2_5_vl", {"pipeline": 2}, "hf"),
        ("qwen3_vl", {"tensor": 2}, "hf"),
        pytest.param("qwen2_5_vl", {"pipeline": 2}, "vllm", marks=NEEDS_VLLM),
        pytest.param("qwen3_vl", {"tensor": 2}, "vllm", marks=NEEDS_VLLM),
        pytest.param("qwen2_5_vl", {"tensor": 2}, "sglang", marks=NEEDS_SGLANG),
    ],
)
def test_megatron_trains_on_images_and_continues_a_checkpoint(
    tmp_path: Path, family: str, sizes: dict[str, int], engine: str
) -> None:
    """A push into any engine brings the image encoder too."""
    sections = [f"actor_rollout_ref.{role}.megatron" for role in ("actor", "ref")]
    split = [f"{key}.{name}_model_parallel_size={n}" for key in sections for name, n in sizes.items()]
    more = ["actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.actor.use_kl_loss=true", *split]
    more += [f"actor_rollout_ref.rollout.name={engine}", "actor_rollout_ref.rollout.enforce_eager=true"]
    config: dict[str, Any] = MODELS[family] if engine == "hf" else wide(MODELS[family])
    text = {**config["text_config"], "num_hidden_layers": 4}
    given = arguments(
        tmp_path,
        *("trainer.backend=ray", "trainer.n_gpus_per_node=2", "trainer.save_freq=1", *more),
        config={**config, "text_config": text},
    )
    assert main(given) == 0
    assert max(line["parity/max_abs"] for line in metrics_of(tmp_path)) < 1e-4
    assert main([*given, "trainer.total_training_steps=3"]) == 0
    assert [line["step"] for line in metrics_of(tmp_path)][-1] == 3
    merge(tmp_path / "out", tmp_path / "merged")
    HFRollout.from_path(tmp_path / "merged").close()
