"""The memory planner: tables by hand, and the peaks that H200s measured (docs/performance.md)."""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import PPOConfig, load_config
from rlsys.config.schema.model import OptimConfig, OverrideOptimizerConfig
from rlsys.config.schema.types import MicroBatches
from rlsys.models.megatron.parallel import ParallelSizes, with_recompute
from rlsys.planning import footprint as fp
from rlsys.planning.memory import Device, Lengths, Machine, MemoryPlan, Stage, largest_pass, plan_memory
from rlsys.planning.roles import Computing, FsdpRole, MegatronRole, Pass
from scripts import plan as plan_script
from scripts.model_shapes import SHAPES
from scripts.plan import plan_job, remedies, table, too_large

ROOT = Path(__file__).resolve().parents[3]
GIB = 1 << 30
SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 1e4,
}
N = fp.decoder_of(SHAPES["tiny"]).parameters
FILES = ("data.train_files=null", "data.val_files=null", "actor_rollout_ref.model.path=null")
ACTOR = "actor_rollout_ref.actor"


def sum_of(stage: Stage, *owners: str) -> int:
    return sum(stage.bytes.get(owner, 0) for owner in owners)


def config(*settings: str, preset: str = "quickstart") -> PPOConfig:
    return load_config(["--config-name", preset, *FILES, *settings])


def planned(
    cfg: PPOConfig, shape: dict[str, Any], *, device: Device = "cuda", device_bytes: int = 141 * GIB, **lengths: Lengths
) -> MemoryPlan:
    return plan_memory(cfg, Machine(device, device_bytes, shape), **lengths)


def stages(plan: MemoryPlan) -> dict[str, Stage]:
    return {stage.name: stage for stage in plan.train}


def test_packs_are_filled_and_balanced() -> None:
    def of(rows: int | None, max_tokens: int | None, sharing: int = 1) -> Pass:
        return largest_pass(Lengths(60, 40, 60, 40), 10, MicroBatches(rows, max_tokens), sharing)

    assert of(None, 450) == Pass(400, 160, 3)
    assert of(None, 50) == Pass(100, 40, 10)
    assert of(4, None) == Pass(400, 160, 3)
    assert of(None, 450, sharing=2) == Pass(250, 100, 2)
    assert of(None, None) == Pass(1000, 400, 1)


def test_what_fsdp_holds_on_one_and_on_two_ranks_by_hand() -> None:
    one = stages(planned(config("trainer.n_gpus_per_node=1"), SHAPES["tiny"]))
    assert one["start"].bytes == {"parameters": 4 * N, "optimizer": 8 * N, "rollout weights": 2 * N}
    two = stages(planned(config("trainer.n_gpus_per_node=2"), SHAPES["tiny"]))
    assert two["start"].bytes == {"parameters": 2 * N, "optimizer": 4 * N, "rollout weights": 2 * N}
    assert "rollout weights" not in one["update_actor"].bytes
    on_cpu = stages(planned(config(), SHAPES["tiny"], device="cpu"))
    assert on_cpu["update_actor"].bytes["rollout weights"] == 4 * N


def test_critic_and_reference_share_the_device_and_leave_it_where_offloaded() -> None:
    roles = ("algorithm.adv_estimator=gae", f"{ACTOR}.use_kl_loss=true")
    both = stages(planned(config(*roles), SHAPES["tiny"]))
    value = N + 64 + 1
    assert both["start"].bytes["parameters"] == 4 * (2 * N) + 4 * fp.decoder_of(SHAPES["tiny"], head="value").parameters
    assert both["start"].bytes["optimizer"] == 8 * N + 8 * fp.decoder_of(SHAPES["tiny"], head="value").parameters
    assert fp.decoder_of(SHAPES["tiny"], head="value").parameters == value
    away = (
        f"{ACTOR}.fsdp_config.param_offload=true",
        f"{ACTOR}.fsdp_config.optimizer_offload=true",
        "critic.fsdp.param_offload=true",
        "critic.fsdp.optimizer_offload=true",
        "actor_rollout_ref.ref.fsdp_config.param_offload=true",
    )
    alone = stages(planned(config(*roles, *away), SHAPES["tiny"]))
    assert alone["start"].bytes == {"parameters": 4 * value, "optimizer": 8 * value}, "one starts after the other"
    halfway = stages(planned(config(*roles, *away[:2]), SHAPES["tiny"]))
    held = {"parameters": 4 * (N + value), "optimizer": 8 * value, "rollout weights": 2 * N}
    assert halfway["start"].bytes == held, "beside the critic and the reference, which stay, the engine starts last"
    assert sum_of(alone["rollout"], "parameters", "optimizer") == 0
    assert sum_of(alone["ref"], "parameters", "optimizer") == 4 * N
    assert sum_of(alone["update_critic"], "parameters", "optimizer") == 12 * value
    assert sum_of(alone["update_weights"], "parameters", "optimizer") == 4 * N


def test_ranks_that_split_matrices_share_what_a_pass_makes_of_them() -> None:
    rows = (f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2", "trainer.n_gpus_per_node=2")
    apart, split = (
        stages(planned(config(*rows, f"{ACTOR}.fsdp_config.tensor_parallel_size={size}"), SHAPES["tiny"]))
        for size in (1, 2)
    )
    assert split["start"].bytes == apart["start"].bytes
    d = fp.decoder_of(SHAPES["tiny"])
    assert apart["old_log_prob"].bytes["gathered"] == 2 * (d.outer + 2 * d.layer), "the next layer is gathered already"
    assert split["old_log_prob"].bytes["gathered"] == 2 * (d.outer + d.layer) // 2, "nothing is left to gather"
    assert split["update_actor"].bytes["activations"] < apart["update_actor"].bytes["activations"]


def test_adapters_have_moments_and_the_base_has_none() -> None:
    lora = stages(planned(config("actor_rollout_ref.model.lora_rank=4"), SHAPES["tiny"]))
    adapters = 4 * fp.decoder_of(SHAPES["tiny"]).adaptable
    assert lora["start"].bytes["parameters"] == 4 * (N + adapters)
    assert lora["start"].bytes["optimizer"] == 8 * adapters
    assert lora["update_actor"].bytes["gradients"] <= 4 * adapters
    assert lora["update_weights"].bytes["staging"] >= 4 * N


def test_what_a_megatron_rank_holds_by_hand() -> None:
    plan = planned(config(f"{ACTOR}.strategy=megatron", "trainer.n_gpus_per_node=2"), SHAPES["tiny"])
    held = stages(plan)["update_weights"].bytes
    assert (held["parameters"], held["gradients"], held["masters"], held["optimizer"]) == (2 * N, 4 * N, 2 * N, 4 * N)


@pytest.mark.parametrize(("of_actor", "of_critic"), [(2, 1), (1, 2), (2, 4)])
def test_roles_with_other_numbers_of_stages_are_planned_on_the_ranks_that_they_share(
    of_actor: int, of_critic: int
) -> None:
    def held(*settings: str) -> Stage:
        sizes = ("algorithm.adv_estimator=gae", f"{ACTOR}.strategy=megatron", "trainer.n_gpus_per_node=4", *settings)
        return stages(planned(config(*sizes), {**SHAPES["tiny"], "num_hidden_layers": 4}))["update_weights"]

    actor = f"{ACTOR}.megatron.pipeline_model_parallel_size"
    unlike = held(f"{actor}={of_actor}", f"critic.megatron.pipeline_model_parallel_size={of_critic}")
    alike = [held(f"{actor}={size}", f"critic.megatron.pipeline_model_parallel_size={size}") for size in (1, 2, 4)]
    assert alike[2].total < alike[1].total < alike[0].total
    assert alike[2].total < unlike.total < alike[0].total


def test_ranks_that_share_sequences_share_their_activations_and_one_optimizer() -> None:
    rows = (f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2")
    megatron = (f"{ACTOR}.strategy=megatron", "trainer.n_gpus_per_node=2", *rows)
    apart, shared = (
        stages(planned(config(*megatron, f"{ACTOR}.megatron.context_parallel_size={size}"), SHAPES["tiny"]))
        for size in (1, 2)
    )
    assert shared["update_weights"].bytes == apart["update_weights"].bytes
    ours, theirs = (plan["update_actor"].bytes["activations"] for plan in (shared, apart))
    assert ours == pytest.approx(theirs / 2, rel=0.01)


def test_adapters_on_megatron_are_what_has_gradients_masters_and_moments() -> None:
    options = (f"{ACTOR}.strategy=megatron", "trainer.n_gpus_per_node=2", "actor_rollout_ref.model.lora_rank=4")
    held = stages(planned(config(*options), SHAPES["tiny"]))["update_weights"].bytes
    adapters = 4 * fp.decoder_of(SHAPES["tiny"]).adaptable
    sizes = [held[owner] for owner in ("parameters", "gradients", "masters", "optimizer")]
    assert sizes == [2 * (N + adapters), 4 * adapters, 2 * adapters, 4 * adapters]
    assert held["staging"] >= 2 * N
    cut = stages(planned(config(*options, f"{ACTOR}.megatron.tensor_model_parallel_size=2"), SHAPES["tiny"]))
    whole_factors = cut["start"].bytes["gradients"] - 4 * adapters // 2
    assert 0 < whole_factors < 4 * adapters // 2


def test_a_rollout_of_its_own_has_its_own_table() -> None:
    cfg = config("trainer.rollout_workers=1", "data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=16")
    plan = planned(cfg, SHAPES["tiny"])
    assert "rollout" not in stages(plan)
    assert [stage.name for stage in plan.rollout] == ["start", "rollout", "update_weights"]
    rows = 16 * 8
    assert plan.rollout[1].bytes["cache"] == 2 * 4 * rows * (24 + 8) * 32 * 2


def test_vllm_takes_its_share() -> None:
    name = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.gpu_memory_utilization=0.5")
    rollout = stages(planned(config(*name), SHAPES["tiny"], device_bytes=10 * GIB))["rollout"]
    assert sum_of(rollout, "rollout weights", "cache") == 5 * GIB
    for frees, cache in ((True, 0), (False, 5 * GIB - 2 * N)):
        kept = planned(
            config(*name, f"actor_rollout_ref.rollout.free_cache_engine={frees}"),
            SHAPES["tiny"],
            device_bytes=10 * GIB,
        )
        assert {stages(kept)[stage].bytes.get("cache", 0) for stage in ("update_actor", "update_weights")} == {cache}
    shared = config(*name, "actor_rollout_ref.rollout.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2")
    assert stages(planned(shared, SHAPES["tiny"]))["rollout"].bytes["rollout weights"] == N


@pytest.mark.parametrize("engine", [["strategy=fsdp"], ["strategy=megatron", "megatron.tensor_model_parallel_size=2"]])
def test_fp8_rollouts_halve_the_engine_and_stay_with_the_trainer(engine: list[str]) -> None:
    matrices = 28 * (2 * 3584**2 + 2 * 512 * 3584 + 3 * 18944 * 3584)
    scales, rest = 4 * matrices // 128**2, fp.decoder_of(SHAPES["7B"]).parameters - matrices
    names = ("actor_rollout_ref.rollout.name=vllm", "trainer.device=cuda", "trainer.n_gpus_per_node=2")
    argv = [*names, *(f"{ACTOR}.{setting}" for setting in engine)]
    plain = stages(planned(config(*argv), SHAPES["7B"]))
    fp8 = stages(planned(config(*argv, "actor_rollout_ref.rollout.quantization=fp8"), SHAPES["7B"]))
    assert fp8["rollout"].bytes["rollout weights"] == 2 * rest + matrices + scales
    assert fp8["update_actor"].total - plain["update_actor"].total == matrices // 2 + scales
    assert fp8["start"].bytes.get("fp8 weights", 0) == 0


def test_scales_of_smaller_blocks_are_counted() -> None:
    matrices = 30 * (2 * 576**2 + 2 * 192 * 576 + 3 * 1536 * 576)
    argv = ("actor_rollout_ref.rollout.name=vllm", "trainer.device=cuda", "trainer.n_gpus_per_node=1")
    plan = stages(planned(config(*argv, "actor_rollout_ref.rollout.quantization=fp8"), SMOLLM2))
    assert plan["update_actor"].bytes["fp8 weights"] == matrices + 4 * matrices // 64**2


def test_copies_of_the_attention_share_the_experts_alone() -> None:
    d, sizes = fp.decoder_of(SHAPES["30B-A3B"]), {"tensor_model": 2, "data": 4, "expert": 8}
    argv = [f"actor_rollout_ref.rollout.{name}_parallel_size={size}" for name, size in sizes.items()]
    cfg = config("actor_rollout_ref.rollout.name=vllm", *argv, "trainer.device=cuda", "trainer.n_gpus_per_node=8")
    held = stages(planned(cfg, SHAPES["30B-A3B"]))["rollout"].bytes["rollout weights"]
    assert held == 2 * ((d.parameters - d.in_experts) // 2 + d.in_experts // 8)


def test_stages_share_layers_with_their_weights_and_their_cache() -> None:
    """The largest of four stages of 61 layers has 16."""
    d, sizes = fp.decoder_of(SHAPES["671B"]), {"tensor_model": 2, "pipeline_model": 4}
    argv = [f"actor_rollout_ref.rollout.{name}_parallel_size={size}" for name, size in sizes.items()]
    cfg = config("actor_rollout_ref.rollout.name=vllm", *argv, "trainer.device=cuda", "trainer.n_gpus_per_node=8")
    rollout = cfg.actor_rollout_ref.rollout
    held = d.outer + (d.parameters - d.outer - d.in_experts) * 16 // 61 + d.in_experts * 16 // 58
    assert fp.served_bytes(SHAPES["671B"], rollout, c=2) == 2 * (held // 2)
    assert fp.served_cache(d, rollout) == 16 * (512 + 64)
    assert fp.served_cache(fp.decoder_of(SHAPES["7B"]), rollout) == 7 * 2 * 512 // 2


def test_sglang_takes_its_share_of_the_device_or_of_what_the_actor_leaves() -> None:
    """One process takes that share of the device, or what leaves 0.08 of it free; ranks of a larger replica take their
    share of what is free."""
    names = ("actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.gpu_memory_utilization=0.5")
    one, two = (f"trainer.n_gpus_per_node={size}" for size in (1, 2))
    small, tp2 = 5 * 4 * N, "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    for settings, device_bytes, size in (
        ([one], 10 * GIB, 5 * GIB),
        ([one], small, int(small - 3 * 4 * N - 0.08 * small)),
        ([two, tp2], 10 * GIB, int(10 * GIB - 3 * 4 * N / 2) // 2),
    ):
        by_name = stages(planned(config(*names, *settings), SHAPES["tiny"], device_bytes=device_bytes))
        assert sum_of(by_name["rollout"], "rollout weights", "cache") == size
    apart = config(*names, "trainer.n_gpus_per_node=1", "trainer.rollout_workers=1")
    (_, serving, _) = planned(apart, SHAPES["tiny"], device_bytes=10 * GIB).rollout
    assert sum_of(serving, "rollout weights", "cache") == 5 * GIB
    nothing_left = planned(config(*names, one), SHAPES["tiny"], device_bytes=2 * 4 * N)
    assert sum_of(stages(nothing_left)["rollout"], "cache") == 0


def test_7b_beside_vllm_that_keeps_its_memory_on_two_h200() -> None:
    """The ledger of scripts/bench/step.py, Megatron TP2 and vLLM TP2, free_cache_engine=false; GiB at the highest."""
    rollout = "actor_rollout_ref.rollout"
    cfg = config(
        *(f"{rollout}.name=vllm", "trainer.allocation_mode='vllm[r]:d1t2|megatron[a]:d1t2'"),
        *("data.train_batch_size=32", f"{ACTOR}.ppo_mini_batch_size=32", f"{rollout}.n=4", "trainer.n_gpus_per_node=2"),
        *("data.max_response_length=512", f"{ACTOR}.ppo_max_token_len_per_gpu=8192"),
        *(f"{rollout}.gpu_memory_utilization=0.3", f"{rollout}.free_cache_engine=false"),
        preset="smollm2",
    )
    by_name = stages(planned(cfg, SHAPES["7B"], device_bytes=int(139.8 * GIB)))
    measured = {"old_log_prob": 106.55, "update_actor": 108.74, "update_weights": 104.41, "save_checkpoint": 104.41}
    for name, gib in measured.items():
        assert by_name[name].total / GIB == pytest.approx(gib, rel=0.03)


@pytest.mark.parametrize(("tp", "tokens", "measured_gib"), [(1, 4096, 108.0), (2, 4096, 76.0), (2, 8192, 85.0)])
def test_megatron_training_of_7b_on_two_h200(tp: int, tokens: int, measured_gib: float) -> None:
    """scripts/bench/train_step.py: sequences of 4096 tokens, `tokens` a micro-batch, no recomputation."""
    sizes = ParallelSizes(tp=tp, sequence_parallel=tp > 1)
    how = Computing(2, "cuda", recompute=False)
    role = MegatronRole(SHAPES["7B"], how, sizes, ranks=2)
    total = sum(role.held().values()) + sum(role.training(Pass(tokens, tokens - tokens // 64, 4)).values())
    assert total / GIB == pytest.approx(measured_gib, rel=0.05)


def recomputing(overrides: dict[str, Any], *, count: int = 1, vp: int = 1) -> tuple[int, int]:
    """Bytes of activations in the first of two stages, for micro-batches of 100 tokens, and of what one layer keeps."""
    sizes, size = ParallelSizes(tp=2, pp=2, vp=vp, sequence_parallel=True), Pass(100, 1, count)
    settings = with_recompute(overrides, layers=True)
    role = MegatronRole(SHAPES["7B"], Computing(2, "cuda", recompute=True), sizes, ranks=8, recompute=settings)
    passing = fp.layer_passing_bytes(role.model, 100, c=2, tp=2, backward=True)
    return role.training(size)["activations"] - passing, role.layer_saved_bytes(size)


GRANULARITY, METHOD, NUMBER = (f"recompute_{name}" for name in ("granularity", "method", "num_layers"))


def test_activations_of_megatron_are_planned_as_its_settings_recompute_them() -> None:
    """14 layers of width 3584 in bfloat16: two ranks share all of 100 tokens."""
    point = 100 * 2 * 3584 // 2
    whole, saved = recomputing({})
    assert whole == 14 * point + saved
    assert recomputing({GRANULARITY: None})[0] == 14 * saved
    assert recomputing({GRANULARITY: "full", METHOD: None, NUMBER: None})[0] == whole
    assert recomputing({GRANULARITY: "full", METHOD: "uniform", NUMBER: 4})[0] == 4 * point + 4 * saved
    assert recomputing({NUMBER: 7}, count=2)[0] == 2 * 2 * point + 7 * saved
    assert recomputing({GRANULARITY: "full", METHOD: "block", NUMBER: 10})[0] == 10 * point + 4 * saved
    assert recomputing({GRANULARITY: "full", METHOD: "block", NUMBER: 99})[0] == 14 * point + saved
    assert recomputing({METHOD: "block", NUMBER: 3}, vp=2, count=9)[0] == 5 * (3 * point + 4 * saved), "of 7 layers"
    assert recomputing({GRANULARITY: "selective", "recompute_modules": ["mlp"]})[0] == 14 * saved, "the safe side"


def test_half_a_billion_parameters_on_either_engine_on_one_h200() -> None:
    how, size = Computing(2, "cuda", recompute=False), Pass(4096, 4032, 8)
    megatron = MegatronRole(SHAPES["0.5B"], how, ParallelSizes(), ranks=1)
    fsdp = FsdpRole(fp.decoder_of(SHAPES["0.5B"]), how, ranks=1, master=4, trained=True)
    for role, measured_gib in ((megatron, 15.0), (fsdp, 16.0)):
        total = sum(role.held().values()) + sum(role.training(size).values())
        assert total / GIB == pytest.approx(measured_gib, rel=0.06)


def test_layers_that_stay_gathered_for_the_backward_pass_are_a_whole_copy_on_every_rank() -> None:
    d, stay = fp.decoder_of(SHAPES["7B"]), f"{ACTOR}.fsdp_config.reshard_after_forward=false"
    freed, kept = (stages(planned(config("trainer.n_gpus_per_node=8", *more), SHAPES["7B"])) for more in ((), (stay,)))
    for name in ("old_log_prob", "update_actor"):
        assert kept[name].bytes["gathered"] >= 2 * d.parameters
        assert kept[name].total - freed[name].total >= 2 * (d.parameters - d.outer - 2 * d.layer)
    assert kept["update_weights"].total == freed["update_weights"].total


def test_optimizers_of_less_memory_are_planned() -> None:
    d, how = fp.decoder_of(SHAPES["0.5B"]), Computing(2, "cuda", recompute=False)
    on_host = OptimConfig(override_optimizer_config=OverrideOptimizerConfig(optimizer_cpu_offload=True))
    kinds = {name: OptimConfig(optimizer=name) for name in ("AdamW", "AdamW8bit", "Muon")} | {"host": on_host}
    held = {name: FsdpRole(d, how, 2, 4, trained=True, optim=optim).held() for name, optim in kinds.items()}
    moments = {name: by_owner["optimizer"] * 2 / d.parameters for name, by_owner in held.items()}
    assert moments["AdamW"] == pytest.approx(8)
    assert moments["AdamW8bit"] == pytest.approx(2 + 8 / 256)
    assert moments["Muon"] == pytest.approx(4 + 4 * d.outer / d.parameters)
    assert moments["host"] == 0
    settings = (f"{ACTOR}.strategy=megatron", f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=true")
    device, host = (stages(planned(config(*words), SHAPES["tiny"])) for words in (settings[:1], settings))
    assert device["start"].bytes["optimizer"] - host["start"].bytes.get("optimizer", 0) == 8 * N


def test_ppo_of_smollm2_with_everything_in_one_process() -> None:
    settings = (
        "algorithm.adv_estimator=gae",
        "data.train_batch_size=32",
        f"{ACTOR}.ppo_mini_batch_size=32",
        "data.max_response_length=256",
        f"{ACTOR}.ppo_max_token_len_per_gpu=16384",
        "critic.ppo_max_token_len_per_gpu=16384",
        "actor_rollout_ref.rollout.max_num_seqs=256",
    )
    cfg = config(*settings, preset="smollm2")
    by_name = stages(planned(cfg, SMOLLM2, lengths=Lengths(50, 256, 40, 256)))
    measured = (("update_actor", 6.72), ("update_critic", 4.77), ("old_log_prob", 5.20), ("rollout", 4.94))
    for name, gib in (*measured, ("update_weights", 3.48)):
        assert by_name[name].total / GIB == pytest.approx(gib, rel=0.05), name


def test_the_table_and_what_would_help() -> None:
    settings = ("actor_rollout_ref.rollout.max_num_seqs=384",)
    cfg = config(*settings)
    room = 2 * N

    def replan(more: Any) -> MemoryPlan:
        return planned(config(*settings, *more), SHAPES["tiny"])

    plan = replan(())
    lines = table(plan.train, room_bytes=room).splitlines()
    assert lines[0].split()[0] == "stage"
    assert all(line.endswith("!") for line in lines[1:])
    assert [stage.total for stage in too_large(plan, room_bytes=room)] == sorted(
        (stage.total for stage in plan.train), reverse=True
    )
    lines = list(remedies(cfg, replan, room_bytes=room))
    assert any(line.startswith("trainer.n_gpus_per_node=2: ") for line in lines)
    assert all("everything fits" not in line for line in lines)


def test_the_script_plans_a_model_that_is_not_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(ROOT / "scripts" / "plan.py")
    given = ["--memory", "smollm2", "--model", "7B", "--device-gib", "80", "trainer.n_gpus_per_node=1"]
    given.append("critic.ppo_epochs=2")
    times = ["--gpu", "H100", "--mean-response", "40", "trainer.rollout_workers=1", "trainer.max_staleness=4"]
    monkeypatch.setattr(sys, "argv", [script, *given, *times])
    with pytest.raises(SystemExit, match="1"):
        runpy.run_path(script, run_name="__main__")
    printed, notes = capsys.readouterr()
    assert "does not fit: " in printed
    assert notes.count("note: ") == notes.count("note: ignored: critic.ppo_epochs") == 1
    tokens_s = float(re.search(r"^ +4 +([\d.]+)", printed, re.MULTILINE)[1])  # type: ignore[index]
    step_s = float(re.search(r"a step: ([\d.]+) s", printed)[1])  # type: ignore[index]
    assert tokens_s == pytest.approx(16 * 8 * 40 / step_s, rel=0.1)
    assert "trainer.n_gpus_per_node=2: " in printed


def test_the_script_plans_the_start_model_where_none_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(ROOT / "scripts" / "plan.py")
    monkeypatch.setattr(sys, "argv", [script, "--job", "quickstart"])
    runpy.run_path(script, run_name="__main__")
    assert float(re.search(r"^update_actor .* ([\d.]+) +[\d.]+$", capsys.readouterr().out, re.MULTILINE)[1]) < 0.3  # type: ignore[index]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--gpus 64", "--gpus and --layouts need the type of the GPUs, e.g. --gpu H100"),
        ("--layouts 3", "--gpus and --layouts need the type of the GPUs, e.g. --gpu H100"),
        ("--gpu H100 --gpus 12", "--gpus 12: nodes have 8; write a multiple, or at most 8"),
        ("--gpu H100 --layouts -3", "'-3' must be a whole number above 0"),
        ("--gpu H100 --gpus 64 trainer.rollout_workers=8", "above 0; write key=value before the options"),
        ("--mean-response 0", "'0' must be a whole number above 0"),
        ("--gpu H100 --mean-response 300000", "--mean-response 300000 is more than data.max_response_length=1024"),
        ("--gpu H100 --mean-response 40 --sigma -1", "--sigma -1: must be 0 or more"),
        ("--device-gib 0", "'0' must be a number above 0"),
        ("--model {0}/text", "text is not a config.json: Expecting value"),
        ("--model {0}/list", "list is not a model's config.json: it has no model_type"),
        (
            "--model 7B trainer.n_gpus_per_node=8 actor_rollout_ref.rollout.name=vllm "
            "actor_rollout_ref.rollout.tensor_model_parallel_size=8",
            "28 attention heads, 4 key-value heads, 18944 MLP channels: these cannot be cut into 8 equal parts",
        ),
        ("--model {0}/short", "this config.json cannot be planned, it lacks or has a wrong: 'num_attention_heads'"),
    ],
)
def test_wrong_arguments_of_the_script_are_refused_with_what_to_write(
    given: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("text", "x"), ("list", "[1]"), ("short", '{"model_type": "qwen2"}')):
        (tmp_path / name).write_text(text)
    model = "" if "--model" in given else "--model 7B "
    command = f"plan.py --job gsm8k_grpo {model}{given}".format(tmp_path)
    monkeypatch.setattr(sys, "argv", command.split())
    with pytest.raises(SystemExit) as left:
        plan_job()
    assert says in f"{left.value}{capsys.readouterr().err}"


def test_the_script_fails_where_no_layout_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = "plan.py --job gsm8k_grpo --model 32B --gpu H100"
    monkeypatch.setattr(sys, "argv", [*job.split(), "--layouts", "3", "trainer.n_gpus_per_node=2"])
    with pytest.raises(SystemExit, match="1"):
        plan_job()
    assert "none fits" in (printed := capsys.readouterr().out)
    assert "use more GPUs, or rollout processes of their own" in printed


def test_what_the_script_tries_leaves_no_notes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It doubles nodes where they are whole, and divides the engine's weights."""
    size = ["trainer.n_gpus_per_node=8", "actor_rollout_ref.rollout.name=vllm"]
    monkeypatch.setattr(sys, "argv", ["plan.py", "--job", "gsm8k_grpo", "--model", "235B-A22B", *size])
    with pytest.raises(SystemExit, match="1"):
        plan_job()
    printed = capsys.readouterr()
    assert "ignored" not in printed.err
    assert "trainer.nnodes=2: " in printed.out
    assert "actor_rollout_ref.rollout.tensor_model_parallel_size=2: update_weights " in printed.out


def test_the_plan_of_a_job_has_the_sizes_that_the_job_chooses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the defaults, half of the GPU for vLLM, 7B would not start beside what trains."""
    job = ["plan.py", "--job", "smollm2", "--model", "7B", "--gpu", "H200", "trainer.n_gpus_per_node=1"]
    monkeypatch.setattr(sys, "argv", job)
    plan_job()
    printed = capsys.readouterr().out
    assert "chosen: rollout.name=vllm, " in printed
    assert " rollout.gpu_memory_utilization=0.25 " in printed
    monkeypatch.setattr(sys, "argv", [*job, "actor_rollout_ref.rollout.gpu_memory_utilization=0.5"])
    with pytest.raises(SystemExit, match="1"):
        plan_job()
    printed = capsys.readouterr().out
    assert "rollout.gpu_memory_utilization" not in printed.partition("\n")[0]
    assert "actor_rollout_ref.rollout.gpu_memory_utilization=0.25: start 155.3 -> 120.2 GiB, everything fits" in printed


def test_a_plan_without_a_model_says_which_one_it_is_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["plan.py", "--job", str(ROOT / "docs/scaling_job.yaml"), "--gpu", "H200", "trainer.n_gpus_per_node=8"]
    for model, notes in (([], 1), (["--model", "7B"], 0)):
        monkeypatch.setattr(sys, "argv", [*job, *model])
        plan_job()
        assert capsys.readouterr().err.count("no model is set, so this is the plan of the start model") == notes


def test_the_help_of_the_script_names_every_shape() -> None:
    listed = (plan_script.__doc__ or "").partition("known shape (")[2].partition(")")[0]
    assert sorted(listed.split(", ")) == sorted(SHAPES)
