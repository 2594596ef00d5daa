"""Plans made ahead: what a weight transfer moves and how long it must take, and what memory a job takes.

    python scripts/plan.py 30B-A3B TP2xPP2xEP2xDP2 TP4xDP2
    python scripts/plan.py path/to/config.json FSDP8 TP2xDP4 --ranks-per-host 4

The model is a known shape (tiny, tiny-moe, 135M, 0.5B, 1.5B, 7B, 8B, 32B, 30B-A3B, 235B-A22B, 671B) or a config.json.
The trainer is Megatron's TPnxPPnxEPnxETPnxDPn or FSDPn (LASTn: layers of the last stage), the engine TPnxPPnxEPnxDPn
with fused parameters. Rank n of both sides is on device n.

    python scripts/plan.py --job smollm2 --model 7B trainer.n_gpus_per_node=8 --gpu H100
    python scripts/plan.py --job run.yaml actor_rollout_ref.rollout.n=16 --device-gib 80

prints GiB of every stage on one device by owner, what does not fit, and what would change that (docs/oom.md); with
`--gpu` also seconds of a step by phase and cause. Settings are those of the job; `--model` stands for a folder that is
not here. With `--layouts 5`, or `--gpus 64 128`, it prints the fastest layouts that fit (docs/scaling.md).
`python scripts/plan.py --job run.yaml --help` lists the options.
"""

import argparse
import json
import random
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from rlsys.config import PPOConfig, plan_batches  # noqa: E402
from rlsys.config.arguments import parse_arguments  # noqa: E402
from rlsys.config.checks.all import check  # noqa: E402
from rlsys.config.introspect import replaced  # noqa: E402
from rlsys.config.load import load  # noqa: E402
from rlsys.data.start_assets import START_MODEL  # noqa: E402
from rlsys.models.megatron.family import family_of  # noqa: E402
from rlsys.models.megatron.parallel import ParallelSizes  # noqa: E402
from rlsys.planning.image_encoder import plan_facts  # noqa: E402
from rlsys.planning.layouts import propose_layouts  # noqa: E402
from rlsys.planning.memory import Lengths, Machine, MemoryPlan, PlanInputs, Stage, plan_memory  # noqa: E402
from rlsys.planning.roles import together  # noqa: E402
from rlsys.planning.sizes import choose_sizes, compiled_roles  # noqa: E402
from rlsys.planning.staleness_forecast import MeasuredRun, fitted_pace, staleness_advice  # noqa: E402
from rlsys.planning.step_time import (  # noqa: E402
    GpuCluster,
    Phase,
    plan_step,
    response_quantiles,
    rollout_phase,
    step_seconds,
)
from rlsys.types import WeightLayout  # noqa: E402
from rlsys.utils.errors import ConfigError, WeightTransferError, raised_as  # noqa: E402
from rlsys.utils.gpus import GPUS  # noqa: E402
from rlsys.utils.tables import aligned  # noqa: E402
from scripts.model_shapes import SHAPES, sizes_of  # noqa: E402
from trainer.machine import SERVING  # noqa: E402

if TYPE_CHECKING:  # torch, which only plans of transfers need
    from rlsys.weights.plan import Plan

MOST_LINES, NODE = 40, 8
GIB = 1 << 30
WORTH, HARDLY_ANY_S = 0.99, 0.005
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"


def positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """A number above zero, of the command line."""

    def read(text: str) -> float:
        with suppress(ValueError):
            if 0 < (number := kind(text)) < inf:
                return number
        before = "; write key=value before the options" if "=" in text else ""
        raise argparse.ArgumentTypeError(f"'{text}' must be a {'whole ' * (kind is int)}number above 0{before}")

    return read


def hf_config_of(name: str) -> dict[str, Any]:
    """A known shape, or a config.json (its folder will do)."""
    if name in SHAPES:
        return SHAPES[name]
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise ConfigError(f"'{name}' is neither a file nor one of {', '.join(SHAPES)}")
    with raised_as(ConfigError, f"{path} is not a config.json", ValueError):
        facts = json.loads(path.read_text())
    if not isinstance(facts, dict) or "model_type" not in facts:
        raise ConfigError(f"{path} is not a model's config.json: it has no model_type")
    return facts


def trainer_of(config: Mapping[str, Any], text: str, ranks_per_host: int, dtype: str) -> list[WeightLayout]:
    """The layout of every trainer rank for sizes such as TP2xPP2 or FSDP4."""
    from scripts.weight_layouts import fsdp_layouts, megatron_layouts

    sizes = sizes_of(text, ("tp", "pp", "dp", "ep", "etp", "vp", "first", "last", "fsdp"))
    family = family_of(config)
    if ranks := sizes.pop("fsdp", 0):
        aliases = family.aliases(config)
        return fsdp_layouts(
            family.hf_shapes(config), ranks, dtype=dtype, ranks_per_host=ranks_per_host, aliases=aliases
        )
    keys, dp = {"first": "first_layers", "last": "last_layers"}, sizes.pop("dp", 1)
    own: dict[str, Any] = {"etp": 1} | {keys.get(name, name): size for name, size in sizes.items()}
    megatron = ParallelSizes(**own)
    return megatron_layouts(config, megatron, dp_size=dp, dtype=dtype, ranks_per_host=ranks_per_host, te=True)


def engine_of(config: Mapping[str, Any], text: str, ranks_per_host: int, dtype: str) -> list[WeightLayout]:
    """The layout of every rollout engine rank for sizes such as TP2xDP2."""
    from scripts.weight_layouts import EngineSizes, engine_layouts

    sizes = EngineSizes(**{f"{name}_size": size for name, size in sizes_of(text, ("tp", "pp", "dp", "ep")).items()})
    family = family_of(config)
    return engine_layouts(
        family.hf_shapes(config),
        sizes,
        num_kv_heads=config.get("num_key_value_heads", config["num_attention_heads"]),
        dtype=dtype,
        tied=bool(family.aliases(config)),
        ranks_per_host=ranks_per_host,
    )


def limit_of(
    plan: "Plan", hosts: Mapping[str, Mapping[int, str]], rates: Mapping[str, float]
) -> tuple[float, int, str]:
    """Seconds of the device that needs longest, which one it is, and what holds it up."""
    from scripts.weight_layouts import bytes_by_link

    totals: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (giver, taker), num_bytes in bytes_by_link(plan).items():
        far = hosts["source"][giver] != hosts["destination"][taker]
        if giver == taker and not far:
            totals[taker]["memory"] += 2 * num_bytes / (2 * rates["local"])
            continue
        link = "network" if far else "peer"
        totals[taker][f"{link} in"] += num_bytes / rates[link]
        totals[giver][f"{link} out"] += num_bytes / rates[link]
        totals[taker]["memory"] += num_bytes / (2 * rates["local"])
        totals[giver]["memory"] += num_bytes / (2 * rates["local"])
    return max(
        ((seconds, rank, what) for rank, by in totals.items() for what, seconds in by.items()), default=(0.0, 0, "-")
    )


def transfer_table(
    plan: "Plan", args: argparse.Namespace, sources: list[WeightLayout], engines: list[WeightLayout]
) -> str:
    """Copies, bytes by rank and the heaviest links of a transfer, as text."""
    from scripts.weight_layouts import bytes_by_link

    links = bytes_by_link(plan)
    given, taken, kept = (defaultdict[int, int](int) for _ in range(3))
    for (giver, taker), num_bytes in links.items():
        if giver == taker and sources[giver].host == engines[taker].host:
            kept[taker] += num_bytes
        else:
            given[giver] += num_bytes
            taken[taker] += num_bytes
    gb = 1e9
    lines = [
        f"{args.model}: {args.trainer} ({len(sources)} ranks) -> {args.engine} ({len(engines)} ranks), {args.dtype}",
        f"{len(plan.moves)} copies, {sum(links.values()) / gb:.2f} GB; "
        f"stays on its device {sum(kept.values()) / gb:.2f}, "
        f"crosses links {sum(given.values()) / gb:.2f} GB",
        "rank    gives GB   takes GB   keeps GB",
    ]
    ranks = sorted({*given, *taken, *kept})
    lines += [
        f"{rank:4d}  {given[rank] / gb:10.3f} {taken[rank] / gb:10.3f} {kept[rank] / gb:10.3f}"
        for rank in ranks[:MOST_LINES]
    ]
    lines += [f"  ... {len(ranks) - MOST_LINES} more ranks"] if len(ranks) > MOST_LINES else []
    lines += ["link         GB"]
    heaviest = sorted(links.items(), key=lambda item: (-item[1], item[0]))
    lines += [f"{a:4d} -> {b:<4d} {n / gb:8.3f}" for (a, b), n in heaviest[: args.links]]
    lines += [f"  ... {len(heaviest) - args.links} more links"] if len(heaviest) > args.links else []
    if plan.unused:
        lines.append(f"no engine wants {len(plan.unused)} tensors: {', '.join(plan.unused[:4])}")
    rates = {"local": args.local * gb, "peer": args.peer * gb, "network": args.network * gb}
    hosts = {"source": {s.rank: s.host for s in sources}, "destination": {d.rank: d.host for d in engines}}
    seconds, rank, what = limit_of(plan, hosts, rates)
    lines.append(
        f"limit {seconds * 1e3:.2f} ms (device {rank}, {what}) at {args.local:g} GB/s local copies, "
        f"{args.peer:g} GB/s between devices, {args.network:g} GB/s between hosts, each direction"
    )
    return "\n".join(lines)


def plan_transfer() -> None:
    """Parse the command line and print the plan of a weight transfer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("trainer", help="TPnxPPnxEPnxETPnxDPn or FSDPn")
    parser.add_argument("engine", help="TPnxPPnxEPnxDPn")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--ranks-per-host", type=positive(int), default=8)
    parser.add_argument("--local", type=positive(float), default=2136, help="GB/s of a copy inside a device")
    parser.add_argument("--peer", type=positive(float), default=396, help="GB/s between devices of a host")
    parser.add_argument("--network", type=positive(float), default=50, help="GB/s of a device between hosts")
    parser.add_argument("--links", type=positive(int), default=20, help="how many of the heaviest links are printed")
    args = parser.parse_args()
    from rlsys.weights.plan import make_plan

    try:
        config = hf_config_of(args.model)
        sources = trainer_of(config, args.trainer, args.ranks_per_host, args.dtype)
        engines = engine_of(config, args.engine, args.ranks_per_host, args.dtype)
        started_s, cpu_s = time.perf_counter(), time.process_time()
        plan = make_plan(sources, engines)
        plan_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    except (ConfigError, WeightTransferError) as error:
        raise SystemExit(str(error)) from None
    print(transfer_table(plan, args, sources, engines))
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"planned in {plan_s:.2f} s ({cpu_s:.2f} s of one core); this process has used at most {peak_mib:.0f} MiB")


def plan_job() -> None:
    """The tables of `--job`; exit code 1 where a stage does not fit, or no layout does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", "--memory", metavar="CONFIG", required=True, help="preset or YAML file")
    parser.add_argument("--model", help="a known shape or a config.json instead of actor_rollout_ref.model.path")
    parser.add_argument("--gpu", choices=sorted(GPUS), help="also plan seconds, on GPUs of this type")
    parser.add_argument("--device-gib", type=positive(float), help="memory of a device; else that of --gpu, or 141")
    parser.add_argument("--reserve-gib", type=float, default=4.0, help="for the CUDA context, NCCL and fragments")
    parser.add_argument("--mean-prompt", type=positive(int), help="tokens; else prompts are as long as they may be")
    parser.add_argument("--mean-response", type=positive(int), help="tokens; else responses are as long as they may be")
    parser.add_argument("--sigma", type=float, default=0.8, help="of lognormal lengths, with --mean-response")
    parser.add_argument("--layouts", type=positive(int), metavar="N", help="with --gpu: the N fastest layouts that fit")
    parser.add_argument("--gpus", type=positive(int), nargs="+", help="with --gpu: the fastest layout on each number")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args()
    if (args.gpus or args.layouts) and not args.gpu:
        parser.error("--gpus and --layouts need the type of the GPUs, e.g. --gpu H100")
    if not 0 <= args.sigma < inf:
        parser.error(f"--sigma {args.sigma:g}: must be 0 or more")
    if odd := [number for number in args.gpus or () if number > NODE and number % NODE]:
        parser.error(f"--gpus {odd[0]}: nodes have {NODE}; write a multiple, or at most {NODE}")
    args.device_gib = args.device_gib or (GPUS[args.gpu].memory_gib if args.gpu else 141.0)
    try:
        with raised_as(ConfigError, "this config.json cannot be planned, it lacks or has a wrong", KeyError, TypeError):
            if args.gpus or args.layouts:
                text, fits = layouts_table(args)
                print(text)
                if not fits:
                    raise SystemExit(1)
            else:
                print_job(args)
    except ConfigError as error:
        raise SystemExit(str(error)) from None


def machine_of(
    args: argparse.Namespace, more: Sequence[str] = (), *, is_trial: bool = False
) -> tuple[PPOConfig, Machine]:
    """The configuration of a job without its files, its notes printed unless it `is_trial`, and a device of it."""
    files = ["data.train_files=null", "data.val_files=null"]
    files += ["actor_rollout_ref.model.path=null"] if args.model else []
    argv = ["--config-name", args.job, *args.settings, *files, *more]
    loaded = load(replace(parse_arguments(argv), gpu=args.gpu or ""), PPOConfig)  # packages here do not matter
    cfg, notes = loaded.config, list(loaded.notes)
    path, critic, grader = cfg.actor_rollout_ref.model.path, cfg.critic.model.path, cfg.reward.reward_model
    if not args.model and path is None:
        notes.append("no model is set, so this is the plan of the start model; write --model, or its path")
    for note in () if is_trial else notes:
        print(f"note: {note}", file=sys.stderr)
    facts = hf_config_of(args.model or path or str(START_MODEL)) | cfg.actor_rollout_ref.model.override_config
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(facts | {"max_position_embeddings": None}))
        if problems := check(replaced(cfg, {"actor_rollout_ref.model.path": folder}))[0]:
            raise ConfigError("\n".join(problems))
    machine = Machine(
        "cuda",
        int(args.device_gib * GIB),
        plan_facts(facts, freeze_vision_tower=cfg.actor_rollout_ref.actor.freeze_vision_tower),
        critic=hf_config_of(critic) if critic is not None and critic != path else None,
        reward_model=hf_config_of(grader.model_path) if grader.enable and grader.model_path else None,
    )
    works = compiled_roles(cfg, machine)
    chosen: dict[str, Any] = {key: works[key] for key in works if key not in loaded.settings}
    with suppress(ConfigError):  # the table shows what does not fit; layouts have sizes of their own
        if not (args.gpus or args.layouts):
            chosen, words = choose_sizes(cfg, loaded.settings, machine, engines=SERVING)
            if words and not is_trial:
                print(f"chosen: {words}")
    return replaced(cfg, chosen), machine


def table(stages: Sequence[Stage], *, room_bytes: int) -> str:
    """A line for each stage, a column for each owner that has anything, in GiB; `left` of `room_bytes` at the end."""
    owners = [owner for owner, size in together([stage.bytes for stage in stages]).items() if size]
    lines = [["stage", *owners, "total", "left"]]
    for stage in stages:
        sizes, left = [*(stage.bytes.get(owner, 0) for owner in owners), stage.total], room_bytes - stage.total
        cells = [f"{size / GIB:.2f}" if size else "" for size in sizes]
        lines.append([stage.name, *cells, f"{left / GIB:.2f}{' !' if left < 0 else ''}"])
    return aligned(lines)


def step_table(phases: Sequence[Phase]) -> str:
    """A line for each phase, a column for each cause, in seconds."""
    causes = sorted({cause for phase in phases for cause, seconds in phase.seconds.items() if seconds >= HARDLY_ANY_S})
    lines = [["seconds", *causes, "total"]]
    for phase in phases:
        seconds = [*(phase.seconds.get(cause, 0.0) for cause in causes), phase.total]
        lines.append([phase.name, *(f"{one:.2f}" if one >= HARDLY_ANY_S else "" for one in seconds)])
    return aligned(lines)


def too_large(plan: MemoryPlan, *, room_bytes: int) -> list[Stage]:
    """The stages that do not fit, the largest first."""
    stages = [stage for stage in (*plan.train, *plan.rollout) if stage.total > room_bytes]
    return sorted(stages, key=lambda stage: -stage.total)


def remedies(cfg: PPOConfig, replan: Callable[[Sequence[str]], MemoryPlan], *, room_bytes: int) -> Iterator[str]:
    """What makes the stage that needs most need less, each change on its own, and whether everything then fits.

    `replan` plans again with further overrides; what it refuses with a ConfigError is left out.
    """
    before = _highest(replan(()))
    for change in _changes(cfg):
        try:
            plan = replan(change)
        except ConfigError:
            continue
        after = _highest(plan, before.name)
        if after.total <= WORTH * before.total:
            fits = f"now {_highest(plan).name} most" if too_large(plan, room_bytes=room_bytes) else "everything fits"
            yield f"{' '.join(change)}: {before.name} {before.total / GIB:.1f} -> {after.total / GIB:.1f} GiB, {fits}"


def _highest(plan: MemoryPlan, name: str = "") -> Stage:
    """The stage, of this name if there is one, that needs most."""
    stages = (stage for stage in (*plan.train, *plan.rollout) if name in ("", stage.name))
    return max(stages, key=lambda stage: stage.total)


def _changes(cfg: PPOConfig) -> list[tuple[str, ...]]:
    """Those first that leave the result alone and cost little speed; what a run has already changes nothing."""
    policy, longest = cfg.actor_rollout_ref, cfg.data.max_prompt_length + cfg.data.max_response_length
    actor, rollout = policy.actor, policy.rollout
    megatron = actor.strategy == "megatron"
    shard, critic = ("megatron", "critic.megatron") if megatron else ("fsdp_config", "critic.fsdp")
    trained = (f"{ACTOR}.{shard}", critic)
    parts = ("optimizer_offload", "param_offload", *["grad_offload"] * megatron)
    sharing = f"{ACTOR}.ulysses_sequence_parallel_size={2 * actor.ulysses_sequence_parallel_size}"
    if megatron:
        sharing = f"{ACTOR}.megatron.context_parallel_size={2 * actor.megatron.context_parallel_size}"
    more = "n_gpus_per_node" if cfg.trainer.n_gpus_per_node < NODE else "nnodes"
    return [
        (f"{MODEL}.enable_gradient_checkpointing=true",),
        *((f"{key}.use_dynamic_bsz=true", f"{key}.ppo_max_token_len_per_gpu={longest}") for key in (ACTOR, "critic")),
        (f"{ROLLOUT}.max_num_seqs={max(1, rollout.max_num_seqs // 2)}",),
        (f"{ROLLOUT}.gpu_memory_utilization={max(0.1, round(rollout.gpu_memory_utilization / 2, 2))}",),
        (f"{ROLLOUT}.tensor_model_parallel_size={2 * rollout.tensor_model_parallel_size}",),
        tuple(f"{key}.optimizer_offload=true" for key in trained),
        tuple(f"{key}.{part}=true" for key in trained for part in parts),
        (f"actor_rollout_ref.ref.{shard}.param_offload=true",),
        (f"{ACTOR}.megatron.tensor_model_parallel_size={2 * actor.megatron.tensor_model_parallel_size}",),
        (sharing,),
        (f"trainer.{more}={2 * getattr(cfg.trainer, more)}",),
        (f"{MODEL}.lora_rank=16",),
    ]


def lengths_of(args: argparse.Namespace, cfg: PPOConfig) -> tuple[Lengths, float]:
    """Tokens of rows, and the sigma of their lengths."""
    most = Lengths.longest(cfg)
    for name, mean, limit in (
        ("prompt", args.mean_prompt, most.prompt),
        ("response", args.mean_response, most.response),
    ):
        if mean is not None and mean > limit:
            raise ConfigError(f"--mean-{name} {mean} is more than data.max_{name}_length={limit}; write less")
    mean_response = args.mean_response or most.response
    lengths = replace(most, mean_prompt=args.mean_prompt or most.prompt, mean_response=mean_response)
    return lengths, args.sigma if args.mean_response else 0.0


def print_job(args: argparse.Namespace) -> None:
    """Memory and seconds of a job as it stands."""
    room = int((args.device_gib - args.reserve_gib) * GIB)
    cfg, machine = machine_of(args)
    plan = plan_memory(cfg, machine)
    if args.gpu:
        lengths, sigma = lengths_of(args, cfg)
        cluster = GpuCluster(GPUS[args.gpu], cfg.trainer.n_gpus_per_node)
        phases = plan_step(cfg, machine, cluster, lengths=lengths, sigma=sigma)
        print(f"{step_table(phases)}\na step: {step_seconds(cfg, phases):.1f} s\n")
        if cfg.trainer.rollout_workers:
            run = planned_run(cfg, machine, cluster, lengths, sigma, phases)
            print(f"{staleness_advice(run, cfg.trainer.max_staleness)}\n")
    print(f"GiB on a device of {args.device_gib:g}, {args.reserve_gib:g} of them reserved")
    print(table(plan.train, room_bytes=room))
    if plan.rollout:
        print(f"\non a device that only generates\n{table(plan.rollout, room_bytes=room)}")
    if wrong := too_large(plan, room_bytes=room):
        print(f"\ndoes not fit: {', '.join(stage.name for stage in wrong)}; any one of these changes helps:")
        for line in remedies(cfg, lambda more: plan_memory(*machine_of(args, more, is_trial=True)), room_bytes=room):
            print(f"  {line}")
        raise SystemExit(1)


def planned_run(
    cfg: PPOConfig, machine: Machine, cluster: GpuCluster, lengths: Lengths, sigma: float, phases: Sequence[Phase]
) -> MeasuredRun:
    """What a run with rollout devices of its own would measure in its first steps, from planned speeds."""
    rollout, plan, loads = cfg.actor_rollout_ref.rollout, plan_batches(cfg), []
    copies = plan.pools.rollout_ranks // rollout.replica_size
    rows, ends = plan.samples / copies, response_quantiles(lengths, sigma)
    for seqs in (rollout.max_num_seqs, max(1, rollout.max_num_seqs // 4)):
        changed = replaced(cfg, {"actor_rollout_ref.rollout.max_num_seqs": seqs})
        inputs = PlanInputs(changed, machine, replace(lengths, response=lengths.mean_response))
        seconds, running = rollout_phase(inputs, cluster, 0.0).total, min(rows, seqs * rollout.data_parallel_size)
        loads.append((seconds, rows / running * lengths.mean_response, rows * lengths.mean_response))
    decode_s, answer_s = fitted_pace(loads)
    draw = random.Random(0)
    groups = [[max(1, round(draw.choice(ends))) for _ in range(rollout.n)] for _ in range(64)]
    train_s = sum(phase.total for phase in phases if phase.name != "rollout") / plan.samples / lengths.mean_response
    return MeasuredRun(groups, plan.samples // rollout.n, copies, rollout.max_replica_seqs, decode_s, answer_s, train_s)


def layouts_table(args: argparse.Namespace) -> tuple[str, bool]:
    """A line for each of the fastest layouts, on the job's own number of GPUs or on those of `--gpus`; and whether any
    fits."""
    lines = [["GPUs", "layout", "step s", "rollout", "log-probs", "update", "GiB", "tokens/s a GPU"]]
    notes = list[str]()
    for number in args.gpus or [None]:
        size = (
            []
            if number is None
            else [f"trainer.nnodes={-(-number // NODE)}", f"trainer.n_gpus_per_node={min(NODE, number)}"]
        )
        cfg, machine = machine_of(args, size)
        cluster, (lengths, sigma) = GpuCluster(GPUS[args.gpu], cfg.trainer.n_gpus_per_node), lengths_of(args, cfg)
        most = args.layouts or 1
        proposals = propose_layouts(cfg, machine, cluster, lengths=lengths, sigma=sigma, most=most)
        batches = plan_batches(cfg)
        gpus = batches.pools.total_ranks
        tokens = batches.samples * (lengths.mean_prompt + lengths.mean_response) / gpus
        for one in proposals:
            seconds = {phase.name: phase.total for phase in one.phases}
            scored = sum(seconds.get(name, 0.0) for name in ("old_log_prob", "ref", "values"))
            updated = sum(seconds.get(name, 0.0) for name in ("update_actor", "update_critic"))
            times = [f"{time:.1f}" for time in (one.seconds, seconds.get("rollout", 0.0), scored, updated)]
            rest = [f"{one.peak_bytes / GIB:.0f}", f"{tokens / one.seconds:,.0f}"]
            lines.append([str(gpus), one.name, *times, *rest])
        if not proposals:
            lines.append([str(gpus), "none fits", *[""] * 6])
        if proposals and args.layouts:
            notes.append(f"{gpus} GPUs, the first: {proposals[0].words(cfg)}")
    fits_none = all(line[1] == "none fits" for line in lines[1:])
    notes += ["use more GPUs, or rollout processes of their own (trainer.rollout_workers)"] if fits_none else []
    return "\n".join([aligned(lines), *notes]), not fits_none


if __name__ == "__main__":
    plan_job() if any(text.startswith(("--memory", "--job")) for text in sys.argv[1:]) else plan_transfer()
