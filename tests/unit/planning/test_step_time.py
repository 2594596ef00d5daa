"""The planner of seconds: its arithmetic by hand and against simulations, the steps that were measured, layouts."""

from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.config import PPOConfig, load_config
from rlsys.config.introspect import replaced, shown
from rlsys.planning import footprint as fp
from rlsys.planning import step_time as steps
from rlsys.planning.layouts import propose_layouts
from rlsys.planning.memory import Lengths, Machine, PlanInputs, plan_memory
from rlsys.planning.step_time import GpuCluster, Phase, plan_step, response_quantiles, step_seconds
from rlsys.utils.gpus import GPUS, Gpu
from scripts.bench.step_times import PHASES, RUNS, WITHIN, planned
from scripts.model_shapes import SHAPES
from scripts.plan import step_table

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FILES = ("data.train_files=null", "data.val_files=null", "actor_rollout_ref.model.path=null")
H100 = GpuCluster(GPUS["H100"], 8)
PEER, FAR = steps.LINK * 450e9, steps.NETWORK * 50e9


def config(*more: str) -> PPOConfig:
    rows = ("data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=64", f"{ROLLOUT}.n=8", f"{ROLLOUT}.name=vllm")
    budget = (f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=16384")
    tokens = ("data.max_prompt_length=1024", "data.max_response_length=3072")
    return load_config(["--config-name", "smollm2", *FILES, *rows, *budget, *tokens, *more])


def machine(model: str) -> Machine:
    return Machine("cuda", GPUS["H100"].memory_bytes, SHAPES[model])


def megatron(tp: int = 1, pp: int = 1, ep: int = 1, *more: str) -> tuple[str, ...]:
    sizes = {"tensor_model": tp, "pipeline_model": pp, "expert_model": ep}
    keys = [f"{ACTOR}.megatron.{name}_parallel_size={size}" for name, size in sizes.items()]
    return (f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.expert_tensor_parallel_size=1", *keys, *more)


def phases(model: str, *more: str, cluster: GpuCluster = H100) -> dict[str, Phase]:
    return {phase.name: phase for phase in plan_step(config(*more), machine(model), cluster)}


def test_work_of_known_models_by_hand() -> None:
    dense, sparse, latent = (fp.decoder_of(SHAPES[name]) for name in ("7B", "30B-A3B", "671B"))
    layer = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944
    assert dense.active == 28 * layer
    assert dense.attended == 28 * 28 * 2 * 128
    assert dense.cached == 28 * 2 * 512
    expert, attention = 3 * 2048 * 768, 2 * 2048 * 4096 + 2 * 2048 * 512
    assert sparse.active == 48 * (attention + 2048 * 128 + 8 * expert)
    assert sparse.in_experts == 48 * 128 * expert
    assert latent.cached == 61 * (512 + 64)
    assert latent.attended == 61 * 128 * (128 + 64 + 128)
    assert 36e9 < latent.active + latent.vocab * latent.hidden < 38e9  # published as 37B activated


def test_collectives_inside_a_node_and_across_by_hand() -> None:
    assert H100.ring_s(8e9, 4) == pytest.approx(6e9 / PEER)
    assert H100.ring_s(8e9, 1) == H100.all_to_all_s(8e9, 1) == 0.0
    assert H100.ring_s(8e9, 16) == pytest.approx(7.5e9 / min(PEER, 8 * FAR))  # all eight adapters of a node
    assert H100.ring_s(8e9, 2, 8) == pytest.approx(4e9 / FAR)  # one rank of a node: one adapter
    assert H100.all_to_all_s(8e9, 8) == pytest.approx(7e9 / PEER)
    assert H100.all_to_all_s(8e9, 32) == pytest.approx(6e9 / FAR)


@given(st.integers(1, 128), st.sampled_from([1, 2, 4, 8]))
def test_an_all_to_all_waits_for_the_slower_of_its_links(ranks: int, node_size: int) -> None:
    cluster = GpuCluster(GPUS["H100"], node_size)
    sent = [1e9 / ranks / (PEER if peer // node_size == 0 else FAR) for peer in range(1, ranks)]
    near, far = sum(sent[: node_size - 1]), sum(sent[node_size - 1 :])
    assert cluster.all_to_all_s(1e9, ranks) == pytest.approx(max(near, far))


def test_bytes_that_experts_exchange_by_hand() -> None:
    """30B-A3B on eight ranks, EP8: forward and backward, there and back, each token to eight experts."""
    own = ("trainer.n_gpus_per_node=8", "actor_rollout_ref.model.enable_gradient_checkpointing=false")
    split, whole = (phases("30B-A3B", *megatron(ep=ep), *own)["update_actor"].seconds["communication"] for ep in (8, 1))
    tokens = 64 * 8 * 4096 / 8
    exchanged = 3 * 2 * 48 * 8 * 2048 * 2 * tokens * 7 / 8
    experts = 48 * 128 * 3 * 2048 * 768
    reduced = (4 + 2) * experts * 7 / 8  # without EP all experts' gradients are added up over eight ranks
    assert split - whole == pytest.approx((exchanged - reduced) / PEER, rel=1e-6)


def test_layers_that_stay_gathered_are_sent_once_for_an_update_by_hand() -> None:
    """Of a GPU that computes in no time: with each micro-batch half as many parameters in bfloat16 are gathered."""
    cluster = GpuCluster(Gpu(1e30, 1e30, 1e6, 1e30, 450e9), 8)
    size, stay = ("trainer.n_gpus_per_node=8",), f"{ACTOR}.fsdp_config.reshard_after_forward=false"
    twice, once = (phases("7B", *size, *more, cluster=cluster) for more in ((), (stay,)))
    saved = twice["update_actor"].seconds["communication"] - once["update_actor"].seconds["communication"]
    sent = 2 * fp.decoder_of(SHAPES["7B"]).parameters * 7 / 8 / PEER
    assert saved == pytest.approx(512 * 4096 / 8 / 16384 * sent, rel=1e-6)
    assert twice["old_log_prob"] == once["old_log_prob"]


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([2, 4, 7]), st.sampled_from([8192, 16384, 65536]))
def test_bubbles_are_those_of_a_simulated_schedule(pp: int, tokens: int) -> None:
    sizes = (*megatron(pp=pp), f"trainer.n_gpus_per_node={pp}", f"{ACTOR}.ppo_max_token_len_per_gpu={tokens}")
    update = phases("7B", *sizes, "actor_rollout_ref.model.enable_gradient_checkpointing=false")["update_actor"].seconds
    num_micro = -(-512 // (tokens // 4096))
    slot = update["bubble"] / (pp - 1)
    ends = simulated_1f1b(pp, num_micro, forward_s=slot / 3)
    assert update["bubble"] == pytest.approx(ends - num_micro * slot)


def simulated_1f1b(pp: int, num_micro: int, *, forward_s: float) -> float:
    """When the last backward pass ends; each takes twice as long as a forward pass. Stages hold at most `pp` inputs."""
    orders = []
    for stage in range(pp):
        warm = min(num_micro, pp - stage - 1)
        order = [("f", micro) for micro in range(warm)]
        for micro in range(num_micro):
            order += [("f", micro + warm)] * (micro + warm < num_micro) + [("b", micro)]
        orders.append(order)
    done, free = dict[tuple[str, int, int], float](), [0.0] * pp
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                kind, micro = order[0]
                before = (kind, stage - 1 if kind == "f" else stage + 1, micro)
                needs = [before] if 0 <= before[1] < pp else [("f", stage, micro)] if kind == "b" else []
                if any(need not in done for need in needs):
                    break
                start = max([free[stage], *(done[need] for need in needs)])
                free[stage] = done[kind, stage, micro] = start + forward_s * (1 if kind == "f" else 2)
                order.pop(0)
    return max(done.values())


def test_compute_is_the_flops_of_all_passes_by_hand() -> None:
    d, rows, row = fp.decoder_of(SHAPES["7B"]), 512, 4096
    blocks, attended = 2 * rows * row * d.active, rows * row * d.attended * (row + 1)
    head = 2 * rows * 3072 * d.vocab * d.hidden
    for recompute, passes in ((False, 3), (True, 4)):
        key = f"actor_rollout_ref.model.enable_gradient_checkpointing={str(recompute).lower()}"
        update = phases("7B", key, "trainer.n_gpus_per_node=8")["update_actor"].seconds["compute"]
        products, attention = passes * blocks + 4 * head, (passes + 0.5) * attended  # backward: five products for two
        expected = products / steps.MATMUL + attention / steps.ATTENTION
        assert update == pytest.approx(expected / 8 / 989e12)


def test_bytes_that_an_update_moves_by_hand() -> None:
    """7B on one GPU: a row of 4,096 tokens at a time, 512 of them, and AdamW in float32."""
    d, key = fp.decoder_of(SHAPES["7B"]), "actor_rollout_ref.model.enable_gradient_checkpointing=false"
    sizes = (key, f"{ACTOR}.ppo_max_token_len_per_gpu=4096", "trainer.n_gpus_per_node=1")
    normed, inner = 3584, 2 * (3584 + 512) + 18944
    for compile_layers, layer in (
        (False, 18 * normed + 2 * (inner + 3 * 18944)),
        (True, 8 * normed + 2 * (inner + 2 * 18944)),
    ):
        cfg = (*sizes, f"{ACTOR}.fsdp_config.use_torch_compile={str(compile_layers).lower()}")
        micro = 2 * steps.READS * 28 * 4096 * layer + 2 * steps.LOGITS_READS * 4 * 3072 * 152064
        weights = d.parameters * (3 * 2 + 2 + 8)  # three passes, the gradient, and the sum of gradients there and back
        moved = 512 * (micro + weights) + steps.OPTIMIZER_READS * 8 * d.parameters
        update = phases("7B", *cfg)["update_actor"].seconds["memory"]
        assert update == pytest.approx(moved / (steps.MEMORY * 3.35e12))


def test_a_decode_step_reads_weights_and_cache_once_by_hand() -> None:
    free = GpuCluster(Gpu(1e30, 1e30, 1e6, 3.35e12, 450e9), 8)
    cfg = config("trainer.n_gpus_per_node=8", f"{ROLLOUT}.max_num_seqs=64")
    job = PlanInputs(cfg, machine("7B"), Lengths(1024, 3072, 1024, 3072))
    d, seconds = fp.decoder_of(SHAPES["7B"]), steps.rollout_phase(job, free, 0.0).seconds
    read = 2 * (d.parameters - d.vocab * d.hidden - d.hidden) + 2 * 64 * d.cached * (1024 + 1536)
    assert seconds["memory"] == pytest.approx(3072 * read / (steps.MEMORY * 3.35e12), rel=1e-4)
    job = PlanInputs(replaced(cfg, {f"{ROLLOUT}.pipeline_model_parallel_size": 4}), machine("7B"), job.lengths)
    sent = 2 * 64 * (2 * 4 * d.hidden + d.vocab) * 3 / 4 / PEER  # four turns: half as many copies of the model
    seconds = steps.rollout_phase(job, free, 0.0).seconds
    assert seconds["memory"] == pytest.approx(4 * 3072 * (read / (steps.MEMORY * 3.35e12) + sent), rel=1e-4)


def test_a_larger_sglang_decodes_the_answers_that_its_share_of_the_free_memory_holds() -> None:
    """Beside the trainer as many at a time as with so much less memory alone."""
    size = ("trainer.n_gpus_per_node=8", f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.max_num_seqs=1024")
    share = (f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.gpu_memory_utilization=0.3")
    rows = ("data.train_batch_size=512", f"{ACTOR}.ppo_mini_batch_size=512", f"{ACTOR}.use_kl_loss=false")
    cfg = config(*size, *share, *rows)
    held = 12 * fp.decoder_of(SHAPES["7B"]).parameters / 8
    less = GpuCluster(replace(H100.gpu, memory_gib=H100.gpu.memory_gib - held / (1 << 30)), 8)
    job = PlanInputs(cfg, machine("7B"), Lengths.longest(cfg))
    beside = phases("7B", *size, *share, *rows)["rollout"].total
    assert beside == pytest.approx(steps.rollout_phase(job, less, 0.0).total, rel=1e-6)
    assert beside > 1.05 * steps.rollout_phase(job, H100, 0.0).total


def test_weights_in_fp8_are_read_as_bytes_and_multiplied_faster_by_hand() -> None:
    """Few rows wait for memory, many for products: of layers 1.25 times as fast, of the head as before."""
    d, gpu, seconds = fp.decoder_of(SHAPES["7B"]), Gpu(1e15, 1e15, 0, 4e12, 1e12, 1e12), []
    head = d.vocab * d.hidden
    for rate in (4e12, 1e30):
        cfg = config(f"{ROLLOUT}.quantization=fp8", f"{ROLLOUT}.max_num_seqs=64", "trainer.device=cuda")
        fast = replace(gpu, memory_rate=rate, memory_gib=141)
        job = PlanInputs(cfg, machine("7B"), Lengths(1024, 3072, 0, 2))
        seconds.append(steps.rollout_phase(job, GpuCluster(fast, 8), 0.0).seconds["memory"] / 2 / (512 / 64))
    rows = 64
    read = d.parameters - d.outer + 2 * (head + rows * d.cached * 1)
    products = 2 * rows * (d.active / 1.25 + head + d.attended * 1) / (steps.MATMUL * 1e15)
    assert seconds == pytest.approx([read / (steps.MEMORY * 4e12), products], rel=1e-3)


def test_a_decode_step_reads_the_experts_that_some_answer_is_sent_to() -> None:
    """Of 128 experts a single answer is sent to 8 in each layer; 64 answers leave (120/128)^64 of them unread."""
    free, d = GpuCluster(Gpu(1e30, 1e30, 1e6, 3.35e12, 450e9), 8), fp.decoder_of(SHAPES["30B-A3B"])
    for running in (1, 64):
        cfg = config("trainer.n_gpus_per_node=8", f"{ROLLOUT}.max_num_seqs={running}")
        job = PlanInputs(cfg, machine("30B-A3B"), Lengths(1, 1, 1, 1))
        seconds = steps.rollout_phase(job, free, 0.0).seconds["memory"]
        read = d.parameters - d.vocab * d.hidden - d.hidden - (120 / 128) ** running * d.in_experts
        assert seconds == pytest.approx(64 / running * 2 * read / (steps.MEMORY * 3.35e12), rel=1e-3)
    shared = replaced(cfg, {f"{ROLLOUT}.{of}_parallel_size": 8 for of in ("data", "expert")})
    job = PlanInputs(shared, machine("30B-A3B"), job.lengths)
    dense, reached = read + (120 / 128) ** 64 * d.in_experts - d.in_experts, 1 - (120 / 128) ** (64 * 8)
    seconds = steps.rollout_phase(job, free, 0.0).seconds["memory"]
    reads = 2 * (dense + reached * d.in_experts / 8) / (steps.MEMORY * 3.35e12)
    exchanges = 2 * d.num_sparse * (steps.ALL_REDUCE_S + 2 * 64 * 8 * d.hidden * 7 / 8 / PEER)
    assert seconds == pytest.approx(reads + exchanges, rel=1e-3)


def test_the_host_needs_its_time_for_every_answer_of_a_decode_step() -> None:
    """On a GPU that needs no time for 64 answers of 3,072 tokens nothing else is left."""
    free = GpuCluster(Gpu(1e30, 1e30, 1e6, 1e30, 1e30), 8)
    for name, (step_s, answer_s, scheduled_s) in steps.DECODE_S.items():
        for scheduler_steps, share in ((8, 1 / 8), (1, 1), (4, 1 / 4)):
            settings = (f"{ROLLOUT}.name={name}", f"{ROLLOUT}.num_scheduler_steps={scheduler_steps}")
            job = PlanInputs(
                config("trainer.n_gpus_per_node=8", *settings), machine("7B"), Lengths(1024, 3072, 1024, 3072)
            )
            took = 3072 * (step_s + 64 * (answer_s + share * scheduled_s))
            assert steps.rollout_phase(job, free, 0.0).total == pytest.approx(took)


@given(st.integers(10, 4000), st.integers(1, 8), st.floats(0, 1.5))
def test_lengths_have_their_mean_and_their_limit(mean_response: int, factor: int, sigma: float) -> None:
    longest = mean_response * factor
    ends = response_quantiles(Lengths(1, longest, 1, mean_response), sigma)
    assert list(ends) == sorted(ends)
    assert max(ends) <= longest * (1 + 1e-9)
    assert mean(ends) == pytest.approx(mean_response, rel=1e-3)


def test_a_long_tail_costs_time_with_the_same_tokens() -> None:
    cfg, lengths = config("trainer.n_gpus_per_node=8"), Lengths(1024, 3072, 1024, 800)
    even, tailed = (plan_step(cfg, machine("7B"), H100, lengths=lengths, sigma=sigma)[0] for sigma in (0.0, 1.0))
    assert tailed.total > 1.5 * even.total
    assert tailed.seconds["tail"] > 0.2 * tailed.total


def test_generation_ahead_hides_the_shorter_side() -> None:
    cfg = config("trainer.n_gpus_per_node=8", "trainer.rollout_workers=8", "trainer.max_staleness=2")
    plan = plan_step(cfg, machine("7B"), H100)
    rollout, others = plan[0].total, sum(phase.total for phase in plan[1:])
    assert step_seconds(cfg, plan) == pytest.approx(max(rollout, others))


def test_an_engine_beside_the_trainer_switches_memory_unless_it_keeps_its_own() -> None:
    def switch_s(*settings: str) -> list[float]:
        phases = plan_step(config("trainer.n_gpus_per_node=8", *settings), machine("7B"), H100)
        return [phase.total for phase in phases if phase.name == "switch"]

    assert switch_s(f"{ROLLOUT}.name=vllm") == [0.21]
    assert switch_s(f"{ROLLOUT}.name=sglang") == [0.12]
    assert switch_s(f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.free_cache_engine=false") == []
    assert switch_s(f"{ROLLOUT}.name=vllm", "trainer.rollout_workers=8") == []


def test_whole_steps_that_were_measured_are_met() -> None:
    at = PHASES.index("step")
    names = [f"{run.model}, {run.name}" for run in RUNS if run.seconds[at]]
    ratios = [planned(run)["step"] / run.seconds[at] for run in RUNS if run.seconds[at]]
    missed = [name for name, ratio in zip(names, ratios, strict=True) if abs(ratio - 1) > WITHIN]
    assert len(names) == 25
    assert missed == ["0.5B H200, the same, a third host", "0.5B H200, the same, a fourth host"]


def test_layouts_fit_come_fastest_first_and_can_be_set_on_the_command_line() -> None:
    """A proposal's settings, loaded like a user's, give the memory and the seconds that it was proposed with."""
    size = ("trainer.nnodes=2", "trainer.n_gpus_per_node=8")
    lengths, h100 = Lengths(1024, 3072, 512, 1500), machine("32B")
    proposals = propose_layouts(config(*size), h100, H100, lengths=lengths, sigma=0.8, most=3)
    assert [one.seconds for one in proposals] == sorted(one.seconds for one in proposals)
    for one in proposals:
        assert one.peak_bytes <= h100.room_bytes
        own = {key: value for key, value in one.settings.items() if not key.startswith("critic.")}
        cfg = config(*size, *(f"{key}={shown(value)}" for key, value in own.items()))
        plan = plan_memory(cfg, h100)
        assert max(stage.total for stage in (*plan.train, *plan.rollout)) == one.peak_bytes
        assert step_seconds(cfg, plan_step(cfg, h100, H100, lengths=lengths, sigma=0.8)) == one.seconds
    assert "update_actor" in step_table(proposals[0].phases)


def test_layouts_are_those_of_the_job_that_is_given_them() -> None:
    """Other stages and chunks than the job's own; layers compiled as a job would, unless that is switched off; nothing
    of a critic or a reference that is not there."""
    sizes, override = ("trainer.n_gpus_per_node=8",), f"{ACTOR}.megatron.override_transformer_config"
    off, lengths = f"{ACTOR}.fsdp_config.use_torch_compile", Lengths(1024, 3072, 1024, 3072)
    vp = f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size=7"
    own = megatron(1, 4, 1, vp, f"{override}={{recompute_granularity: selective}}")
    for asked, works in (((), True), ((f"{off}=false",), False), (own, True)):
        cfg = config(*sizes, *asked)
        cfg = cfg if asked else replaced(cfg, {off: True})
        proposals = propose_layouts(cfg, machine("7B"), H100, lengths=lengths, most=100)
        kinds = [one.name.partition(",")[0].partition(";")[0] for one in proposals]
        assert {"FSDP8", "Megatron"} <= {*kinds}
        for one, kind in zip(proposals, kinds, strict=True):
            assert not any(key.startswith(("critic.", "actor_rollout_ref.ref.")) for key in one.settings)
            given = [f"{key}={shown(value)}" for key, value in one.settings.items()]
            changed = config(*sizes, *asked, *given)
            assert step_seconds(changed, plan_step(changed, machine("7B"), H100, lengths=lengths)) == one.seconds
            if kind == "Megatron":
                kept = {"recompute_granularity": "selective"} if asked == own else {}
                assert one.settings[override] == kept
            else:
                assert one.settings[off] == (works and "Ulysses" not in one.name)


@pytest.mark.parametrize(
    "asked",
    [
        (f"{ACTOR}.ulysses_sequence_parallel_size=4",),
        ("trainer.allocation_mode=vllm:d16|fsdp:d2c8",),
        ("trainer.allocation_mode=vllm:d8+megatron:d4t2p2",),
        ("trainer.rollout_workers=8", "trainer.max_staleness=1", f"{ROLLOUT}.min_replicas=2"),
    ],
)
def test_settings_of_a_layout_are_accepted_after_those_of_the_job(asked: tuple[str, ...]) -> None:
    asked, lengths = ("trainer.nnodes=2", "trainer.n_gpus_per_node=8", *asked), Lengths(1024, 3072, 1024, 3072)
    proposals = propose_layouts(cfg := config(*asked), machine("7B"), H100, lengths=lengths, most=20)
    assert {"FSDP", "Mega"} <= {one.name[:4] for one in proposals}
    for one in proposals:
        changed = config(*asked, *one.words(cfg).split())
        assert step_seconds(changed, plan_step(changed, machine("7B"), H100, lengths=lengths)) == one.seconds


def test_copies_of_the_attention_are_proposed_for_latent_caches() -> None:
    """Eight ranks that share experts read an eighth of the cache that each of eight tensor-parallel ranks reads."""
    shape = SHAPES["671B"] | {"num_hidden_layers": 8, "n_routed_experts": 16, "hidden_size": 2048}
    h100, lengths = Machine("cuda", GPUS["H100"].memory_bytes, shape), Lengths(1024, 3072, 1024, 3072)
    cfg = config("trainer.n_gpus_per_node=8", "trainer.rollout_workers=8", *megatron())
    best = propose_layouts(cfg, h100, H100, lengths=lengths, most=1)[0]
    sizes = {name: best.settings[f"{ROLLOUT}.{name}_parallel_size"] for name in ("tensor_model", "data", "expert")}
    assert (best.name, sizes) == (
        "Megatron, DP; rollout TP1, DP attention 8 x DP1",
        {"tensor_model": 1, "data": 8, "expert": 8},
    )
    free, cache = GpuCluster(Gpu(1e30, 1e30, 1e6, 3.35e12, 1e30, 1e30), 8), 8 * (512 + 64) * (1024 + 1536)
    tensor = {"tensor_model_parallel_size": 8, "max_num_seqs": 512}
    copies = {"data_parallel_size": 8, "expert_parallel_size": 8, "max_num_seqs": 64}
    d, step_s = fp.decoder_of(shape), []
    for sizes in (tensor, copies):
        cut = replaced(cfg, {f"{ROLLOUT}.{key}": value for key, value in sizes.items()})
        job = PlanInputs(cut, h100, lengths)
        step_s.append(steps.rollout_phase(job, free, 0.0).seconds["memory"] / 3072)
    dense, rate = d.parameters - d.outer + d.vocab * d.hidden - d.in_experts, steps.MEMORY * 3.35e12
    read = [(dense + d.in_experts) / 8 + 512 * cache, dense + d.in_experts / 8 + 64 * cache]
    exchanges = [2 * steps.ALL_REDUCE_S * 8, 2 * steps.ALL_REDUCE_S * d.num_sparse]
    assert step_s == pytest.approx([2 * n / rate + other for n, other in zip(read, exchanges, strict=True)], rel=1e-4)


def test_stages_are_proposed_where_tensor_parallelism_leaves_no_room() -> None:
    """One head is not divided: 12.7 GiB are too much for the 11.7 of a device of 16, halves leave room for a cache."""
    shape = SHAPES["7B"] | {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 128}
    sizes = ("trainer.nnodes=8", "trainer.n_gpus_per_node=8", "trainer.rollout_workers=8")
    cfg, small = config(*sizes, f"{ACTOR}.ppo_max_token_len_per_gpu=4096"), Machine("cuda", 16 << 30, shape)
    best = propose_layouts(cfg, small, H100, lengths=Lengths.longest(cfg), most=1)[0]
    assert best.name == "FSDP64; rollout TP1, PP2 x DP4"
    assert best.settings[f"{ROLLOUT}.pipeline_model_parallel_size"] == 2


def test_the_fastest_layout_is_the_first_however_many_are_asked_for() -> None:
    """Layouts are tried in the order of what they reach with token budgets of their own, not with those of the job."""
    rows = ("data.train_batch_size=512", f"{ACTOR}.ppo_mini_batch_size=512", f"{ROLLOUT}.n=16")
    cfg = config("trainer.n_gpus_per_node=8", "data.max_response_length=8192", *rows)
    one, more = (
        propose_layouts(cfg, machine("7B"), H100, lengths=Lengths.longest(cfg), most=number)[0] for number in (1, 40)
    )
    assert one == more


@pytest.mark.parametrize("num_gpus", [2, 8])
def test_nothing_is_proposed_where_nothing_fits(num_gpus: int) -> None:
    """Of two GPUs the states alone are too large; on eight FSDP would fit were it not for what is kept in reserve."""
    cfg = config(f"trainer.n_gpus_per_node={num_gpus}")
    assert propose_layouts(cfg, machine("32B"), H100, lengths=Lengths.longest(cfg)) == []
