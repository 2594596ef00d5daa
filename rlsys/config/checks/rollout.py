"""Whether the settings of the rollout engine suit it, the model and the processes."""

from collections.abc import Iterator
from math import gcd

from rlsys.config import engines
from rlsys.config.checks.files import model_facts
from rlsys.config.checks.findings import note, wrong
from rlsys.config.introspect import leaves
from rlsys.config.schema.jobs import EvalConfig, GradedJob, PPOConfig
from rlsys.config.vocabulary import EXPERTS
from rlsys.utils.errors import ConfigError

KEY = "actor_rollout_ref.rollout"
DP_ATTENTION = ("deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "kimi_k2", "qwen2_moe", "qwen3_moe")
"""Models (model_type) with experts whose attention and head SGLang has in several copies."""


def check_rollout(cfg: GradedJob, ranks: int) -> Iterator[str]:
    """Whether the engine on `ranks` processes supports its settings, and notes on settings that it ignores."""
    name, limit = cfg.actor_rollout_ref.rollout.name, cfg.actor_rollout_ref.rollout.max_model_len
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    facts = model_facts(cfg.actor_rollout_ref.model.path)
    if limit is not None and limit < longest:
        yield wrong(cfg, f"{KEY}.max_model_len", f"prompt and response have up to {longest} tokens", longest)
    yield from [*_parallel_sizes(cfg, name)] or _replicas(cfg, name, ranks)
    if (backend := engines.rollout_backend(name)).worker and "t" in backend.dims:
        yield from _model_sizes(cfg, name)
    elif name == "hf" and "linear_num_value_heads" in engines.decoder_sizes(facts):
        yield wrong(cfg, f"{KEY}.name", "it has no cache for gated delta layers", "vllm")
    yield from _quantised(cfg, name)
    yield from _idle(cfg, name)


def _idle(cfg: GradedJob, name: str) -> Iterator[str]:
    rollout, backend, fields = cfg.actor_rollout_ref.rollout, engines.rollout_backend(name), leaves(type(cfg))
    names = [key for key in engines.VLLM_SETTINGS if key not in backend.settings and f"{KEY}.{key}" in fields]
    if changed := [key for key in names if getattr(rollout, key) != fields[f"{KEY}.{key}"].default]:
        readers = " and ".join(sorted(one.name for one in engines.rollout_backends() if changed[0] in one.settings))
        why = f"{', '.join(changed)} only apply to {KEY}.name={readers}; ignored for {name}"
        if backend.is_external:
            why = f"{', '.join(changed)} cannot be changed on external servers; set them when starting the server"
        yield note(cfg, f"{KEY}.{changed[0]}", why)


def _parallel_sizes(cfg: GradedJob, name: str) -> Iterator[str]:
    """Whether the engine has the parallel sizes that are above 1."""
    rollout, backend = cfg.actor_rollout_ref.rollout, engines.rollout_backend(name)
    model_type = model_facts(cfg.actor_rollout_ref.model.path).get("model_type", DP_ATTENTION[0])
    for cut in ("tensor_model", "expert", "data", "pipeline_model"):
        key = f"{KEY}.{cut}_parallel_size"
        if getattr(rollout, f"{cut}_parallel_size") == 1:
            continue
        if backend.is_external:
            yield note(cfg, key, "external servers keep the parallel sizes they were started with")
        elif "t" not in backend.dims:
            yield wrong(cfg, key, f"the {name} engine runs a model in one process", "1, or use vllm")
        elif name == "sglang" and cut == "pipeline_model" and rollout.data_parallel_size > 1:
            yield wrong(cfg, key, f"with SGLang only where {KEY}.data_parallel_size=1", "1, or use vllm")
        elif name == "sglang" and cut == "data" and model_type not in DP_ATTENTION:
            why = f"with SGLang only for {', '.join(DP_ATTENTION)}; the model's attention ({model_type}) has one copy"
            yield wrong(cfg, key, why, "1, or use vllm")
        elif cut == "data" and rollout.expert_parallel_size == 1:
            why = f"without experts to share each is a whole copy of the model: set 1, or {KEY}.expert_parallel_size"
            yield wrong(cfg, key, f"{why}={rollout.replica_size}")


def _model_sizes(cfg: GradedJob, name: str) -> Iterator[str]:
    """Whether the engine can cut the model of this config.json: heads and MLPs into equal parts, whole experts.

    Key-value heads may also be repeated. Source: `verify_with_parallel_config` and the layers of vLLM's models.
    """
    rollout, sizes = cfg.actor_rollout_ref.rollout, engines.decoder_sizes(model_facts(cfg.actor_rollout_ref.model.path))
    size = sizes.get
    heads, layers = size("num_attention_heads", 0), size("num_hidden_layers", 0)
    experts = next(filter(None, map(size, EXPERTS)), 0)
    channels = 0 if experts else size("intermediate_size", 0)
    groups = (not size("kv_lora_rank") and size("num_key_value_heads")) or heads
    tp, stages, ep = (getattr(rollout, f"{cut}_parallel_size") for cut in ("tensor_model", "pipeline_model", "expert"))
    if heads and str(tp) not in (fitting := _cuts(heads, channels, groups=groups)):
        mlps = f", {channels} MLP channels" if channels else ""
        why = f"{heads} attention heads, {groups} key-value heads{mlps}: these cannot be cut into {tp} equal parts"
        yield wrong(cfg, f"{KEY}.tensor_model_parallel_size", f"{why}; set one of {', '.join(fitting)}")
    if stages > layers > 0:
        why = f"the model has {layers} layers, and each stage needs one"
        yield wrong(cfg, f"{KEY}.pipeline_model_parallel_size", f"{why}; set at most {layers}")
    if ep > 1 and engines.is_dense(sizes):
        yield wrong(cfg, f"{KEY}.expert_parallel_size", "the model has no experts", 1)
    elif name == "sglang" and experts % ep:
        why = f"{experts} experts cannot be divided evenly among {ep} processes; set one of {', '.join(_cuts(experts))}"
        yield wrong(cfg, f"{KEY}.expert_parallel_size", why)


def _cuts(*counts: int, groups: int = 1) -> list[str]:
    """The numbers of equal parts of all counts at once, those that divide `groups` or are multiples of it."""
    whole = gcd(*counts)
    return [str(n) for n in range(1, whole + 1) if not (whole % n or (groups % n and n % groups))]


def _replicas(cfg: GradedJob, name: str, ranks: int) -> Iterator[str]:
    """Whether the rollout processes hold whole copies of the model."""
    rollout, whole = cfg.actor_rollout_ref.rollout, f"{KEY}.expert_parallel_size"
    size, tp = rollout.replica_size, rollout.tensor_model_parallel_size
    sharing = size // rollout.pipeline_model_parallel_size
    why = f"{name} divides whole experts among the {sharing} processes of a copy"
    if rollout.expert_parallel_size > 1 and cfg.trainer.device == "cpu":
        yield wrong(cfg, whole, f"the kernels of {name} for CPUs have no experts in other processes", 1)
    elif rollout.expert_parallel_size > 1 and name == "vllm" and sharing != rollout.expert_parallel_size:
        yield note(cfg, whole, f"{why}, whatever the number")
    elif sharing % rollout.expert_parallel_size:
        yield wrong(cfg, whole, f"{why}; set a divisor of {sharing}, or a larger {KEY}.tensor_model_parallel_size")
    if ranks % size:
        cuts = {"tensor_model": ranks, "pipeline_model": ranks // tp, "data": ranks // rollout.attention_size}
        cut, divided = next(one for one in cuts.items() if one[1] % getattr(rollout, f"{one[0]}_parallel_size"))
        why = f"the {ranks} rollout processes cannot hold copies of the model on {size} each"
        yield wrong(cfg, f"{KEY}.{cut}_parallel_size", f"{why}; set a divisor of {divided}")
    elif isinstance(cfg, EvalConfig) or cfg.trainer.rollout_workers == 0:
        node = cfg.trainer.n_gpus_per_node
        if cfg.trainer.nnodes > 1 and node % size and size % node:
            why = f"copies of the model would straddle nodes of {node} processes; set a divisor of {node}"
            yield wrong(cfg, f"{KEY}.tensor_model_parallel_size", why)


def check_ppo_rollout(cfg: PPOConfig) -> Iterator[str]:
    """Whether enough processes only generate for the replicas at the start, and weights are pushed when compared."""
    rollout, workers, sync_freq = cfg.actor_rollout_ref.rollout, cfg.trainer.rollout_workers, cfg.trainer.sync_freq
    if rollout.min_replicas is not None and workers < rollout.min_replicas:
        why = f"there are {workers} processes that only generate; set trainer.rollout_workers to more"
        yield wrong(cfg, f"{KEY}.min_replicas", why)
    if rollout.parity.freq > 0 and rollout.parity.freq % sync_freq:
        why = f"weights can only be compared after a push, and they are pushed every {sync_freq} steps"
        yield note(cfg, f"{KEY}.parity.freq", why)
    if cfg.actor_rollout_ref.model.override_config:
        yield note(cfg, "actor_rollout_ref.model.override_config", "the rollout reads config.json alone; edit a copy")


def _quantised(cfg: GradedJob, name: str) -> Iterator[str]:
    """Whether the engine serves FP8 weights."""
    policy = cfg.actor_rollout_ref
    if not policy.rollout.quantization:
        return
    is_pushed = not isinstance(cfg, EvalConfig)
    if cfg.trainer.device == "cpu" or name not in ("vllm", "sglang" if is_pushed else "vllm"):
        why = "only vllm serves it, and sglang beside a trainer, on GPUs of the job"
        yield wrong(cfg, engines.QUANTIZATION, why, None)
        return
    try:
        engines.float8_block(model_facts(policy.model.path), policy.rollout, is_pushed=is_pushed)
    except ConfigError as error:
        yield str(error)
