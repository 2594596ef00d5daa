"""Sizes that a job chooses: by the arithmetic of the memory plan, for devices of several sizes."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import PPOConfig
from rlsys.config.arguments import parse_arguments
from rlsys.config.cli import as_yaml
from rlsys.config.load import Loaded, load
from rlsys.config.schema.types import MicroBatches
from rlsys.planning.memory import Device, Machine, MemoryPlan, plan_memory
from rlsys.planning.sizes import GIB, choose_sizes
from rlsys.utils.errors import ConfigError
from scripts.model_shapes import SHAPES

FILES = ("data.train_files=null", "data.val_files=null", "actor_rollout_ref.model.path=null")
POLICY = "actor_rollout_ref"
TOKENS, SEQS = f"{POLICY}.actor.ppo_max_token_len_per_gpu", f"{POLICY}.rollout.max_num_seqs"
ROLLOUT = f"{POLICY}.rollout"
SCORED = f"{POLICY}.rollout.log_prob_max_token_len_per_gpu"
RECOMPUTE, SHARE = f"{POLICY}.model.enable_gradient_checkpointing", f"{POLICY}.rollout.gpu_memory_utilization"
VLLM = f"{POLICY}.rollout.name=vllm"
COMPILE, ENGINE = f"{POLICY}.actor.fsdp_config.use_torch_compile", f"{POLICY}.rollout.name"
OLD_ANSWERS = ("trainer.reproducible=true", "trainer.max_staleness=2", "trainer.rollout_workers=1")
CRITIC_COMPILE = "critic.fsdp.use_torch_compile"


def loaded(*settings: str, preset: str = "gsm8k_grpo", **chosen: Any) -> Loaded[PPOConfig]:
    return load(parse_arguments(["--config-name", preset, *FILES, *settings]), PPOConfig, **chosen)


def chosen(
    shape: str, gib: float, *settings: str, device: Device = "cuda", preset: str = "gsm8k_grpo"
) -> tuple[dict[str, Any], str, MemoryPlan, Machine]:
    """What is chosen, the line of the plan, the memory plan of the job that has it, and the machine."""
    machine = Machine(device, int(gib * GIB), SHAPES[shape])
    job = loaded(*settings, preset=preset)
    sizes, text = choose_sizes(job.config, job.settings.keys(), machine)
    after = loaded(*settings, preset=preset, chosen=sizes).config
    return sizes, text, plan_memory(after, machine), machine


def highest(plan: MemoryPlan, but: Collection[str] = ()) -> int:
    return max(stage.total for stage in plan.train if stage.name not in but)


@pytest.mark.parametrize(
    ("shape", "gib", "gpus", "recompute"),
    [("0.5B", 23.5, 1, True), ("1.5B", 79.2, 8, False), ("7B", 79.2, 8, True), ("7B", 139.8, 8, False)],
)
def test_every_stage_fits_and_the_next_budget_would_not(shape: str, gib: float, gpus: int, recompute: bool) -> None:
    settings = (VLLM, f"trainer.n_gpus_per_node={gpus}")
    sizes, text, plan, machine = chosen(shape, gib, *settings)
    assert sizes[RECOMPUTE] is recompute
    assert highest(plan, but=("update_weights", "save_checkpoint")) <= machine.room_bytes
    assert machine.room_bytes == int(0.92 * machine.device_bytes) - 3 * GIB
    tokens = sizes[TOKENS]
    assert tokens >= 8192 or recompute
    if tokens < 65536:
        job = loaded(*settings, chosen={**sizes, TOKENS: tokens * 4 // 3 + 256}).config
        assert highest(plan_memory(job, machine)) > machine.room_bytes
    assert f"{TOKENS.removeprefix(POLICY + '.')}={tokens}" in text


def test_a_share_that_holds_all_sequences_by_hand() -> None:
    sizes, _, _, machine = chosen("7B", 139.8, VLLM)
    rows = 1024 * 5 // 8  # prompts, answers, GPUs
    assert sizes[SEQS] == rows
    weights = 2 * 7_615_616_512
    cache = 2 * 28 * rows * (512 + 1024) * 512 * 2
    drawing = rows * 152_064 * 14
    needed = (weights + cache + drawing + 4 * GIB) / machine.device_bytes
    assert needed <= sizes[SHARE] < needed + 0.05


def test_a_share_that_is_the_largest_beside_what_trains_by_hand() -> None:
    sizes, _, _, machine = chosen("7B", 79.2, VLLM, "trainer.n_gpus_per_node=4")
    trains = (12 + 4) * 7_615_616_512 // 4  # masters and moments, the reference; GPUs
    free = (machine.room_bytes - trains) / machine.device_bytes
    assert free - 0.05 < sizes[SHARE] <= free


@pytest.mark.parametrize(("tp", "gib", "gpus"), [(1, 139.8, 4), (2, 80, 2), (2, 80, 4), (4, 80, 4)])
def test_the_share_of_sglang_holds_all_sequences_beside_what_trains(tp: int, gib: float, gpus: int) -> None:
    """Ranks of a larger replica take their share of what is free beside the trainer, so it must be a larger one."""
    kl, gpus_key = f"{POLICY}.actor.use_kl_loss=false", f"trainer.n_gpus_per_node={gpus}"
    size = (kl, gpus_key, f"{ROLLOUT}.tensor_model_parallel_size={tp}", f"{SEQS}={128 * tp}")
    sizes, text, plan, machine = chosen("7B", gib, f"{ROLLOUT}.name=sglang", *size)
    (generates,) = [stage.bytes for stage in plan.train if stage.name == "rollout"]
    held, needed = generates["rollout weights"] + generates["cache"], float(text.split("need ")[1].split(" GiB")[0])
    assert held / GIB >= needed - 0.05
    assert sum(generates.values()) <= machine.room_bytes
    if sizes[SHARE] > 0.3:
        less = loaded(f"{ROLLOUT}.name=sglang", *size, chosen={**sizes, SHARE: sizes[SHARE] - 0.05}).config
        (smaller,) = [stage.bytes for stage in plan_memory(less, machine).train if stage.name == "rollout"]
        assert (smaller["rollout weights"] + smaller["cache"]) / GIB < needed + 0.05


@pytest.mark.parametrize(("shape", "gib", "gpus"), [("1.5B", 79.6, 1), ("7B", 79.6, 4)])
def test_of_shares_without_room_for_all_sequences_sglang_gets_the_largest_cache_that_fits(
    shape: str, gib: float, gpus: int
) -> None:
    """A share of the device that leaves 0.08 of it free; more is never a smaller cache."""
    settings, caches = (f"{ROLLOUT}.name=sglang", f"trainer.n_gpus_per_node={gpus}"), list[int]()
    sizes, _, plan, machine = chosen(shape, gib, *settings)
    (most,) = [stage for stage in plan.train if stage.name == "rollout"]
    assert most.total <= machine.room_bytes
    for percent in range(10, 95, 5):
        other = plan_memory(loaded(*settings, chosen={**sizes, SHARE: percent / 100}).config, machine)
        (one,) = [stage for stage in other.train if stage.name == "rollout"]
        assert one.bytes["cache"] <= most.bytes["cache"] or one.total > machine.room_bytes
        caches.append(one.bytes["cache"])
    assert caches == sorted(caches)


def test_what_is_set_is_never_changed() -> None:
    given = (VLLM, f"{TOKENS}=2048", f"{SHARE}=0.4", f"{SEQS}=7", f"{RECOMPUTE}=true", f"{COMPILE}=false")
    sizes, text, plan, _ = chosen("7B", 79.2, *given)
    assert not sizes
    assert text == ""
    auto, *_ = chosen("7B", 79.2, VLLM, f"{TOKENS}=auto", f"{SHARE}=auto", f"{SEQS}=auto", f"{RECOMPUTE}=auto")
    assert {TOKENS, SHARE, SEQS, RECOMPUTE} <= auto.keys()
    rows, *_ = chosen("7B", 79.2, VLLM, f"{POLICY}.actor.ppo_micro_batch_size_per_gpu=4")
    assert not {TOKENS, SCORED} & rows.keys()
    assert plan.train


def test_activations_are_kept_where_a_budget_that_is_set_leaves_room_for_them() -> None:
    for budget, recomputes in ((4096, False), (262144, True)):
        assert chosen("0.5B", 79.2, VLLM, f"{TOKENS}={budget}")[0][RECOMPUTE] is recomputes
    by_rows = ("actor.use_dynamic_bsz=false", "actor.ppo_micro_batch_size_per_gpu=2")
    assert chosen("0.5B", 79.2, VLLM, *(f"{POLICY}.{setting}" for setting in by_rows))[0][RECOMPUTE] is False


def test_a_budget_that_needs_no_more_than_one_sequence_is_taken_where_the_reserve_is_touched() -> None:
    """Stepping the optimizer takes the most, whatever the budget is."""
    sizes, *_ = chosen("7B", 139.8, VLLM, "trainer.n_gpus_per_node=1", f"{POLICY}.actor.use_kl_loss=false")
    assert sizes[TOKENS] > 8192


def test_a_model_that_fits_in_no_way_is_refused_with_the_arithmetic() -> None:
    alone = "trainer.n_gpus_per_node=1"
    with pytest.raises(ConfigError, match=r"at a time does not fit: it needs 154\.0 GiB \(parameters 56\.7 \+ opt"):
        chosen("7B", 79.2, alone)
    with pytest.raises(ConfigError, match=r"and tensors have 69\.9 of 79\.2; docs/oom\.md"):
        chosen("7B", 79.2, VLLM, alone)
    with pytest.raises(ConfigError, match=r"to try it; trainer\.n_gpus_per_node is not set; verl's default is 8"):
        chosen("7B", 79.2, VLLM, preset="ppo_trainer")
    sizes, *_ = chosen("7B", 79.2, VLLM, alone, f"{TOKENS}=1536", f"{SHARE}=0.2")
    assert TOKENS not in sizes
    megatron = (f"{POLICY}.actor.strategy=megatron", f"{POLICY}.actor.megatron.expert_model_parallel_size=8")
    with pytest.raises(ConfigError, match=r"vllm beside what trains does not fit: .* \+ rollout weights 56\.9\)"):
        chosen("30B-A3B", 139.8, VLLM, *megatron)
    with pytest.raises(ConfigError, match=r"hf beside what trains does not fit: .* or set .*max_num_seqs to try it"):
        chosen("30B-A3B", 139.8, "actor_rollout_ref.rollout.name=hf", f"{TOKENS}=4096", megatron[0])
    with pytest.raises(ConfigError, match=r"or set a larger actor_rollout_ref\.rollout\.tensor_model_parallel_size"):
        chosen("235B-A22B", 139.8, VLLM, "trainer.nnodes=16")


def test_cpus_keep_small_budgets_and_recompute_as_configured() -> None:
    sizes, *_ = chosen("135M", 20, device="cpu", preset="smollm2")
    assert sizes == {SEQS: 16 * 8, TOKENS: 4096, SCORED: 4096}
    unknown = Machine("cpu", 20 * GIB, {})
    job = loaded(preset="smollm2")
    assert choose_sizes(job.config, job.settings.keys(), unknown)[0][TOKENS] == 4096
    assert choose_sizes(job.config, job.settings.keys(), Machine("cuda", 80 * GIB, {})) == ({}, "")


def test_a_critic_and_a_reference_have_budgets_of_their_own() -> None:
    sizes, _, plan, machine = chosen("7B", 79.2, VLLM, "algorithm.adv_estimator=gae")
    keys = ("critic.ppo_max_token_len_per_gpu", "critic.forward_max_token_len_per_gpu")
    assert {*keys, f"{POLICY}.ref.log_prob_max_token_len_per_gpu"} <= sizes.keys()
    fitting = [stage.name for stage in plan.train if stage.total <= machine.room_bytes]
    assert {"update_critic", "values", "ref", "update_actor"} <= set(fitting)


def test_links_follow_what_was_chosen_and_the_saved_settings_do_not_have_it() -> None:
    job = loaded(chosen={TOKENS: 12345, RECOMPUTE: False})
    assert job.config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu == 12345
    assert job.config.critic.model.enable_gradient_checkpointing is False
    assert "12345" not in as_yaml(job).replace("#", "")[: as_yaml(job).index("# ")]


def test_budgets_grow_with_the_longest_sequence_and_micro_batches_are_filled_by_tokens() -> None:
    config = loaded("data.max_response_length=40000").config
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 40512
    assert config.actor_rollout_ref.actor.use_dynamic_bsz
    assert not loaded(f"{POLICY}.actor.ppo_micro_batch_size_per_gpu=4").config.actor_rollout_ref.actor.use_dynamic_bsz
    assert not loaded(f"{POLICY}.actor.use_dynamic_bsz=false").config.actor_rollout_ref.actor.use_dynamic_bsz


def test_layers_of_a_model_of_text_are_compiled_on_gpus_unless_it_is_set() -> None:
    sizes, text, *_ = chosen("7B", 139.8, VLLM, "algorithm.adv_estimator=gae", "trainer.n_gpus_per_node=8")
    assert sizes[COMPILE] is sizes[CRITIC_COMPILE] is True
    assert "actor.fsdp_config.use_torch_compile=true, critic.fsdp.use_torch_compile=true" in text
    policy = loaded(chosen=sizes).config.actor_rollout_ref
    assert policy.ref.fsdp_config.use_torch_compile
    for setting in (f"{COMPILE}=auto", f"{POLICY}.actor.use_torch_compile=true"):
        assert chosen("135M", 80, VLLM, setting)[0][COMPILE] is True
    for setting in (f"{COMPILE}=false", f"{COMPILE}=true", f"{POLICY}.actor.use_torch_compile=false"):
        assert COMPILE not in chosen("135M", 80, VLLM, setting)[0]
    off = loaded(f"{POLICY}.actor.use_torch_compile=false").config.actor_rollout_ref
    assert not off.ref.fsdp_config.use_torch_compile
    verls = (f"{POLICY}.actor.use_torch_compile=true", f"{COMPILE}=true", f"{POLICY}.ref.use_torch_compile=true")
    assert loaded(*verls).config.actor_rollout_ref.actor.fsdp_config.use_torch_compile


@pytest.mark.parametrize(
    "setting",
    [
        f"{POLICY}.actor.strategy=megatron",
        f"{POLICY}.actor.fsdp_config.full_determinism=true",
        f"{POLICY}.actor.fsdp_config.dtype=float32",
        f"{POLICY}.actor.fsdp_config.tensor_parallel_size=2",
        f"{POLICY}.actor.fsdp_config.offload_policy=true",
        f"{POLICY}.actor.ulysses_sequence_parallel_size=2",
        f"{POLICY}.model.use_remove_padding=false",
        f"{POLICY}.model.lora_rank=8",
    ],
)
def test_layers_are_compiled_only_where_that_is_known_to_work(setting: str) -> None:
    sizes, *_ = chosen("1.5B", 139.8, VLLM, setting, "trainer.n_gpus_per_node=8")
    assert COMPILE not in sizes
    assert TOKENS in sizes


def test_layers_with_experts_and_layers_on_a_cpu_are_not_compiled() -> None:
    assert COMPILE not in chosen("30B-A3B", 139.8, VLLM, "trainer.n_gpus_per_node=16")[0]
    assert COMPILE not in chosen("135M", 20, device="cpu", preset="smollm2")[0]


def test_a_reward_model_scores_by_tokens_unless_a_number_of_samples_is_set(tmp_path: Path) -> None:
    grader, budget = "reward.reward_model", "reward.reward_model.forward_max_token_len_per_gpu"
    (tmp_path / "config.json").write_text(
        json.dumps({**SHAPES["tiny"], "architectures": ["Qwen2ForTokenClassification"]})
    )
    on = (f"{grader}.enable=true", f"{grader}.model_path={tmp_path}")
    assert loaded(*on).config.reward.reward_model.scoring == MicroBatches(max_tokens=32768)
    own = loaded(*on, f"{grader}.micro_batch_size_per_gpu=4")
    assert own.config.reward.reward_model.scoring == MicroBatches(rows=4)
    machine = Machine("cuda", int(79.2 * GIB), SHAPES["0.5B"], reward_model=SHAPES["0.5B"])
    by_tokens, by_rows = (choose_sizes(job.config, job.settings.keys(), machine)[0] for job in (loaded(*on), own))
    assert by_tokens[budget] == 65536
    assert budget not in by_rows


def test_a_whole_share_in_one_micro_batch_is_reported() -> None:
    notes = loaded(f"{POLICY}.actor.use_dynamic_bsz=false").notes
    (note,) = [note for note in notes if "whole share" in note]
    assert note.startswith(
        f"{POLICY}.actor, {POLICY}.rollout, {POLICY}.ref: use_dynamic_bsz=false without a number of samples"
    )
    rows = (f"{POLICY}.actor.use_dynamic_bsz=false", f"{POLICY}.actor.ppo_micro_batch_size_per_gpu=4")
    assert not [note for job in (loaded(), loaded(*rows)) for note in job.notes if "whole share" in note]


@pytest.mark.parametrize(
    ("settings", "device", "engine"),
    [
        ((), "cuda", "vllm"),
        ((), "cpu", "hf"),
        ((f"{ENGINE}=auto",), "cuda", "vllm"),
        ((f"{ENGINE}=null",), "cuda", "vllm"),
        ((f"{ENGINE}=null",), "cpu", "hf"),
        ((f"{ENGINE}=hf",), "cuda", "hf"),
        (OLD_ANSWERS, "cuda", "hf"),  # for these runs serving engines need full_determinism
        ((*OLD_ANSWERS, f"{POLICY}.rollout.full_determinism=true"), "cuda", "vllm"),
    ],
)
def test_the_engine_is_the_first_on_a_gpu_that_works_with_the_settings(
    settings: tuple[str, ...], device: Device, engine: str
) -> None:
    job = loaded(*settings, preset="smollm2")
    machine = Machine(device, int(79.2 * GIB), SHAPES["135M"])
    sizes, text = choose_sizes(job.config, job.settings.keys(), machine, engines=("vllm", "sglang"))
    after = loaded(*settings, preset="smollm2", chosen=sizes)
    assert after.config.actor_rollout_ref.rollout.name == engine
    assert (SHARE in sizes) is (engine == "vllm")
    assert ("rollout.name=vllm" in text) is (engine == "vllm")
    only_engine = ({ENGINE: engine}, f"rollout.name={engine}") if engine == "vllm" else ({}, "")
    # a model of the hub before its first download, and a login node
    for unplanned in (Machine("cuda", int(79.2 * GIB), {}), Machine("cuda", 0, SHAPES["135M"])) * (device == "cuda"):
        assert choose_sizes(job.config, job.settings.keys(), unplanned, engines=("vllm",)) == only_engine


@pytest.mark.parametrize("engine", ["sglang", "hf"])
@pytest.mark.parametrize("agrees", [False, True])
def test_the_engine_of_an_allocation_is_kept(engine: str, agrees: bool) -> None:
    mode = (f"trainer.allocation_mode={engine}:d2+fsdp:d2", *[f"{ENGINE}={engine}"] * agrees)
    job, machine = loaded(*mode, preset="smollm2"), Machine("cuda", int(79.2 * GIB), SHAPES["135M"])
    sizes, _ = choose_sizes(job.config, job.settings.keys(), machine, engines=("vllm", "sglang"))
    after = loaded(*mode, preset="smollm2", chosen=sizes)
    assert after.config.actor_rollout_ref.rollout.name == engine
