"""Models, rows, splits and a float64 reference for the contract of TrainEngine, and one factory per engine.

The reference is one process, one unpadded row at a time, through transformers' plain attention.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from rlsys.config.schema.megatron import MegatronConfig
from rlsys.config.schema.model import ModelConfig, OptimConfig, OverrideOptimizerConfig, ShardConfig
from rlsys.engines.base import TrainEngineOptions
from rlsys.engines.fsdp.engine import FSDPEngine
from rlsys.engines.micro_batches import MicroBatches
from rlsys.interfaces import LossSum, TrainEngine
from rlsys.models.hf import saved_names
from rlsys.models.megatron.parallel import ParallelSizes
from rlsys.protocol import DataProto
from rlsys.roles.lm import lm_loss
from tests.engine_gradients import gradients
from tests.host_waits import host_waits
from tests.ranks import run_ranks

VOCAB, PROMPT, RESPONSE, ROWS = 96, 5, 7, 8
TEMPERATURE, SEED = 0.7, 3
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": VOCAB}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
GATED_DELTA = {
    "head_dim": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True, **SHAPE, **HEADS},
    "llama-untied": {"model_type": "llama", "tie_word_embeddings": False, **SHAPE, **HEADS},
    "llama-6-heads-3-kv": {
        "model_type": "llama",
        **SHAPE,
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
    },
    "llama-1-kv": {"model_type": "llama", **SHAPE, "num_attention_heads": 4, "num_key_value_heads": 1},
    "qwen3-window": {
        "model_type": "qwen3",
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
        **SHAPE,
        **HEADS,
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "experts_implementation": "eager",
        **SHAPE,
        **HEADS,
    },
    "mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "experts_implementation": "eager",
        **SHAPE,
        **HEADS,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "experts_implementation": "eager",
        **SHAPE,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        **SHAPE,
        **HEADS,
    },
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 8,
        "sliding_window": 4,
        "attn_logit_softcapping": 0.002,
        "final_logit_softcapping": 0.02,
        **SHAPE,
        **HEADS,
    },
    "gemma4": {
        "model_type": "gemma4_text",
        "head_dim": 8,
        "global_head_dim": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "final_logit_softcapping": 0.02,
        "hidden_size_per_layer_input": 0,
        **SHAPE,
        **HEADS,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "experts_implementation": "eager",
        **SHAPE,
        **HEADS,
    },
    "glm4-moe": {
        "model_type": "glm4_moe",
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
        "experts_implementation": "eager",
        **SHAPE,
        **HEADS,
    },
    "llama-biases": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "pad_token_id": 7,
        **SHAPE,
        **HEADS,
    },
    "qwen3-next": {
        "model_type": "qwen3_next",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "experts_implementation": "eager",
        **GATED_DELTA,
        **SHAPE,
        **HEADS,
    },
    "qwen3.5": {"model_type": "qwen3_5_text", **GATED_DELTA, **SHAPE, **HEADS},
    "mistral": {"model_type": "mistral", "sliding_window": 4, **SHAPE, **HEADS},
    "phi3": {"model_type": "phi3", "pad_token_id": 0, "sliding_window": 4, **SHAPE, **HEADS},
    "olmo2": {"model_type": "olmo2", **SHAPE, **HEADS},
    "granite": {"model_type": "granite", "embedding_multiplier": 3.0, "residual_multiplier": 0.5, **SHAPE, **HEADS},
    "qwen3-4-layers": {"model_type": "qwen3", "head_dim": 8, **SHAPE, **HEADS, "num_hidden_layers": 4},
}
MODELS["deepseek-v3-full-q"] = MODELS["deepseek-v3"] | {"q_lora_rank": None}  # as Moonlight


@dataclass(frozen=True)
class Lora:
    """The adapters of a case."""

    rank: int
    alpha: int = 16
    targets: tuple[str, ...] = ("all-linear",)
    path: str | None = None


@dataclass(frozen=True)
class Case:
    """How an engine splits its work; every field that a split has, and nothing about the result."""

    rows: int | None = None
    max_tokens: int | None = None
    packed: bool = True
    gradient_checkpointing: bool = False
    fsdp_size: int = -1
    sp_size: int = 1
    tp_size: int = 1
    megatron: ParallelSizes = ParallelSizes()  # noqa: RUF009
    overrides: tuple[tuple[str, Any], ...] = ()
    lr: float = 1e-3
    eps: float = 1e-8
    moments_on_host: bool = False
    chunk_elements: int | None = 3 * VOCAB
    lora: Lora | None = None

    def __str__(self) -> str:
        parts = [f"rows{self.rows}" if self.rows else f"tokens{self.max_tokens}", "packed" if self.packed else "padded"]
        return "-".join(
            parts
            + (["recompute"] if self.gradient_checkpointing else [])
            + ([f"hsdp{self.fsdp_size}"] if self.fsdp_size > 0 else [])
            + ([f"sp{self.sp_size}"] if self.sp_size > 1 else [])
            + ([f"tp{self.tp_size}"] if self.tp_size > 1 else [])
            + [f"{name}{value:d}" for name, value in vars(self.megatron).items() if value not in (1, None, False)]
            + [str(value) for _, value in self.overrides]
            + (["host"] if self.moments_on_host else [])
            + (["lora"] if self.lora else [])
        )


def model_config(model: Mapping[str, Any], case: Case) -> ModelConfig:
    """A random model with the settings of a case."""
    lora = case.lora or Lora(rank=0)
    return ModelConfig(
        override_config=dict(model),
        enable_gradient_checkpointing=case.gradient_checkpointing,
        use_remove_padding=case.packed,
        lora_rank=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=lora.targets,
        lora_adapter_path=lora.path,
    )


def optim_config(case: Case) -> OptimConfig:
    override = OverrideOptimizerConfig(optimizer_cpu_offload=case.moments_on_host)
    return OptimConfig(lr=case.lr, eps=case.eps, override_optimizer_config=override)


def megatron_section(sizes: ParallelSizes, **settings: Any) -> MegatronConfig:
    """The configuration section of these sizes."""
    return MegatronConfig(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vp,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        sequence_parallel=sizes.sequence_parallel,
        **settings,
    )


def fsdp_engine(model: Mapping[str, Any], head: str, case: Case) -> FSDPEngine:
    engine = FSDPEngine(
        model_config(model, case),
        TrainEngineOptions(
            head=head,  # type: ignore[arg-type]
            optim=optim_config(case),
            training=MicroBatches(rows=case.rows, max_tokens=case.max_tokens),
        ),
        shard=ShardConfig(fsdp_size=case.fsdp_size, tensor_parallel_size=case.tp_size, seed=SEED),
        sp_size=case.sp_size,
    )
    engine.model.chunk_elements = case.chunk_elements
    return engine


def megatron_engine(model: Mapping[str, Any], head: str, case: Case) -> Any:
    from rlsys.engines.megatron.engine import MegatronEngine

    section = {"seed": SEED, "override_transformer_config": dict(case.overrides)}
    engine = MegatronEngine(
        model_config(model, case),
        TrainEngineOptions(
            head=head,  # type: ignore[arg-type]
            optim=optim_config(case),
            training=MicroBatches(rows=case.rows, max_tokens=case.max_tokens),
        ),
        megatron=megatron_section(case.megatron, **section),
    )
    for chunk in engine.chunks:
        chunk.chunk_elements = case.chunk_elements
    return engine


Factory = Callable[[Mapping[str, Any], str, Case], Any]
ENGINES: dict[str, Factory] = {"fsdp": fsdp_engine, "megatron": megatron_engine}
SIZES, YES_NO = [(1, None), (3, None), (None, 15), (None, 1000)], (True, False)
SPLITS = {
    Case(rows=rows, max_tokens=tokens, packed=packed, gradient_checkpointing=recompute): (number, packed, recompute)
    for number, (rows, tokens) in enumerate(SIZES)
    for packed in YES_NO
    for recompute in YES_NO
}
MESHES = {
    1: [],
    2: [
        Case(rows=2, sp_size=2),
        Case(rows=2, fsdp_size=1),
        Case(max_tokens=30, sp_size=2, gradient_checkpointing=True),
        Case(rows=2, tp_size=2),
    ],
    4: [
        *(Case(rows=2, fsdp_size=2), Case(rows=2, sp_size=2), Case(max_tokens=20, fsdp_size=2, sp_size=2)),
        Case(max_tokens=15, tp_size=2, gradient_checkpointing=True),
    ],
}
FSDP_CASES = [
    (world, case)
    for world in (1, 2, 4)
    for case in [*SPLITS, *MESHES[world]]
    if world < 4 or case.packed or not case.gradient_checkpointing
]
TP2_SP = ParallelSizes(tp=2, sequence_parallel=True)
MEGATRON_CASES = [
    (1, Case(rows=3)),
    (1, Case(max_tokens=15, gradient_checkpointing=True)),
    (2, Case(rows=3)),
    (2, Case(max_tokens=15)),
    (2, Case(rows=3, megatron=ParallelSizes(tp=2))),
    (2, Case(max_tokens=15, megatron=TP2_SP, gradient_checkpointing=True)),
    (2, Case(rows=1, megatron=ParallelSizes(pp=2))),
    (2, Case(max_tokens=15, megatron=ParallelSizes(pp=2), gradient_checkpointing=True)),
    (2, Case(rows=3, megatron=ParallelSizes(cp=2))),
    (2, Case(max_tokens=15, megatron=ParallelSizes(cp=2), gradient_checkpointing=True)),
    (4, Case(rows=3, megatron=ParallelSizes(tp=2, pp=2))),
    (4, Case(rows=1, megatron=ParallelSizes(tp=2, pp=2, sequence_parallel=True))),
    (4, Case(rows=1, megatron=TP2_SP)),
    (4, Case(max_tokens=15, megatron=ParallelSizes(pp=2))),
    (4, Case(rows=3, megatron=ParallelSizes(tp=4, sequence_parallel=True))),
    (4, Case(max_tokens=15, megatron=ParallelSizes(cp=2))),
    (4, Case(rows=3, megatron=ParallelSizes(cp=4))),
    (4, Case(rows=1, megatron=ParallelSizes(cp=2, tp=2))),
    (4, Case(max_tokens=15, megatron=ParallelSizes(cp=2, tp=2, sequence_parallel=True), gradient_checkpointing=True)),
    (4, Case(rows=1, megatron=ParallelSizes(cp=2, pp=2))),
]
CASES = {"fsdp": FSDP_CASES, "megatron": MEGATRON_CASES}


def is_slow(engine: str, world: int, case: Case) -> bool:
    """On several ranks half of the splits of FSDP, without which each two of their settings still meet."""
    return world == 4 if engine == "megatron" else world > 1 and sum(SPLITS.get(case, ())) % 2 == 1


EP2, BY_GATHERING = ParallelSizes(ep=2), (("moe_token_dispatcher_type", "allgather"),)
CP2_EP2 = ParallelSizes(cp=2, ep=2)
TP2_EP2 = ParallelSizes(tp=2, ep=2, etp=1, sequence_parallel=True)
TP2_WHOLE_EXPERTS = ParallelSizes(tp=2, etp=1, sequence_parallel=True)
EXPERT_CASES = [
    ("qwen3-moe", 2, Case(rows=3, megatron=EP2)),
    ("qwen3-moe", 2, Case(rows=3, megatron=EP2, overrides=BY_GATHERING)),
    ("deepseek-v3", 2, Case(rows=3, megatron=TP2_EP2)),
    ("gpt-oss", 2, Case(rows=3, megatron=TP2_EP2)),
    ("gpt-oss", 2, Case(max_tokens=15, megatron=CP2_EP2, gradient_checkpointing=True)),
    ("deepseek-v3", 2, Case(rows=3, megatron=CP2_EP2)),
    ("qwen3-moe", 2, Case(max_tokens=15, megatron=CP2_EP2, overrides=BY_GATHERING)),
    ("mixtral", 2, Case(max_tokens=15, megatron=EP2, gradient_checkpointing=True)),
    ("qwen3-moe", 2, Case(rows=3, megatron=TP2_EP2)),
    ("qwen3-moe", 2, Case(rows=3, megatron=TP2_SP)),
    ("gpt-oss", 2, Case(rows=3, megatron=TP2_WHOLE_EXPERTS)),
    ("qwen3-moe", 4, Case(rows=3, megatron=ParallelSizes(pp=2, ep=2))),
    ("gpt-oss", 4, Case(rows=3, megatron=ParallelSizes(pp=2, ep=2))),
    ("qwen3-moe", 4, Case(rows=3, megatron=ParallelSizes(tp=2, ep=2, sequence_parallel=True))),
    ("qwen3-moe", 4, Case(rows=1, megatron=TP2_EP2, overrides=BY_GATHERING)),
    ("deepseek-v3", 2, Case(rows=1, megatron=ParallelSizes(pp=2))),
    ("deepseek-v3", 2, Case(max_tokens=15, megatron=TP2_SP, gradient_checkpointing=True)),
    ("deepseek-v3", 4, Case(rows=3, megatron=ParallelSizes(tp=2, pp=2, sequence_parallel=True))),
    ("qwen3-moe", 2, Case(rows=3, megatron=ParallelSizes(cp=2))),
    ("deepseek-v3", 4, Case(rows=3, megatron=ParallelSizes(tp=2, cp=2, ep=2, etp=1, sequence_parallel=True))),
]


def make_batch() -> dict[str, Tensor]:
    """Rows of every kind of length: prompts 1..P, responses 0..R, one with a tool span that does not count."""
    draw = torch.Generator().manual_seed(0)
    prompts = torch.tensor([5, 1, 3, 4, 2, 5, 1, 4])
    responses = torch.tensor([7, 4, 0, 6, 1, 7, 3, 5])
    columns = torch.arange(PROMPT + RESPONSE)
    mask = (columns >= PROMPT - prompts[:, None]) & (columns < PROMPT + responses[:, None])
    ids = torch.randint(1, VOCAB, mask.shape, generator=draw) * mask
    response_mask = mask[:, PROMPT:].long()
    response_mask[5, 2:4] = 0
    return {
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "input_ids": ids,
        "attention_mask": mask.long(),
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0) * mask,
        "response_mask": response_mask,
        "weights": torch.randn(mask.shape[0], RESPONSE, generator=draw),
    }


def share_of(rank: int, size: int) -> slice:
    """Uneven shares, so that some ranks have fewer micro-batches than others."""
    bounds = {1: [0, 8], 2: [0, 5, 8], 3: [0, 3, 5, 8], 4: [0, 3, 5, 8, 8]}[size]
    return slice(bounds[rank], bounds[rank + 1])


def loss_of(outputs: Mapping[str, Tensor], rows: Any) -> LossSum:
    """A loss that uses every output with a weight of its own per token."""
    mask = rows["response_mask"]
    weighted = sum((0.5 + number) * values * rows["weights"] for number, values in enumerate(outputs.values()))
    total = (weighted * mask).sum()
    return LossSum(total, mask.sum(), {"row_length": (float(rows["attention_mask"].sum()), float(len(mask)))})


OUTPUTS = {"lm": ("log_probs", "entropy", "sum_pi_squared"), "scalar": ("values", "scores")}


@cache
def reference_model(name: str, head: str) -> Any:
    config = AutoConfig.for_model(**MODELS[name])
    config.num_labels, config.classifier_dropout = 1, 0.0
    auto = AutoModelForCausalLM if head == "lm" else AutoModelForTokenClassification
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return auto.from_config(config, dtype=torch.float32, attn_implementation="eager").double()


def reference_outputs(model: Any, head: str, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {name: [] for name in OUTPUTS[head]}
    for row in range(ROWS):
        real = batch["attention_mask"][row].bool()
        ids = batch["input_ids"][row][real]
        start = int(real[:PROMPT].sum())
        logits = model(ids[None]).logits[0]
        if head == "lm":
            scores = torch.log_softmax(logits[start - 1 : -1] / TEMPERATURE, dim=-1)
            probs = scores.exp()
            values = (scores.gather(1, ids[start:, None])[:, 0], -(probs * scores).sum(-1), (probs**2).sum(-1))
        else:
            values = (logits[start - 1 : -1, 0], logits[start:, 0])
        for name, value in zip(OUTPUTS[head], values, strict=True):
            parts[name].append(torch.cat([value, value.new_zeros(RESPONSE - len(value))]))
    return {name: torch.stack(rows) for name, rows in parts.items()}


@cache
def reference(name: str, head: str) -> tuple[dict[str, Tensor], float, dict[str, Tensor]]:
    """Outputs (B, R), the mean loss and its gradients by name."""
    model, batch = reference_model(name, head), make_batch()
    model.zero_grad()
    outputs = reference_outputs(model, head, batch)
    loss = loss_of(outputs, batch)
    mean = loss.total / loss.count
    mean.backward()
    gradients = saved_names(model, {n: p.grad.clone() for n, p in model.named_parameters()})
    return {n: v.detach() for n, v in outputs.items()}, float(mean.detach()), gradients


def one_step(factory: Factory, name: str, head: str, case: Case) -> dict[str, Any]:
    """Outputs, loss and gradients of this rank's share, and the weights after an optimizer step."""
    engine = factory(MODELS[name], head, case)
    assert isinstance(engine, TrainEngine)
    batch = DataProto.from_dict(make_batch())[share_of(engine.dp_rank, engine.dp_size)]
    outputs = engine.forward(batch, OUTPUTS[head], temperature=TEMPERATURE)
    metrics = engine.forward_backward(batch, loss_of, outputs=OUTPUTS[head], temperature=TEMPERATURE)
    whole_gradients = {n: g.cpu() for n, g in gradients(engine).items()}
    report = engine.optim_step()
    weights = {n: t.cpu().clone() for bucket in engine.weights(1 << 14) for n, t in bucket}
    return {
        "outputs": outputs,
        "metrics": metrics,
        "gradients": whole_gradients,
        "report": report,
        "weights": weights,
        "collect": engine.is_collect,
    }


def all_steps(factory: Factory, name: str, head: str, cases: list[Case]) -> dict[Case, dict[str, Any]]:
    return {case: one_step(factory, name, head, case) for case in cases}


def collected(ranks: Sequence[Mapping[str, Any]], name: str) -> torch.Tensor:
    """An output for all rows, from the ranks of `one_step` that hand theirs over."""
    return torch.cat([rank["outputs"][name] for rank in ranks if rank["collect"]])


@cache
def results(engine: str, world: int, name: str, head: str, *, slow: bool = False) -> dict[Case, list[dict[str, Any]]]:
    """Each case's result per rank; the cases of one world, slow or not, run in one group of forked ranks."""
    cases = [case for size, case in CASES[engine] if size == world and is_slow(engine, world, case) == slow]
    ranks = run_ranks(world, all_steps, ENGINES[engine], name, head, cases)
    return {case: [rank[case] for rank in ranks] for case in cases}


def waits_of(engine: Any, rows: DataProto) -> list[list[str]]:
    """Where the host waits for the GPU, or on a CPU would wait for one, in log-probs and in an update."""
    places = []
    for work in (partial(engine.forward, rows, ("log_probs",)), partial(engine.forward_backward, rows, lm_loss)):
        work()
        if engine.ranks.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                work()
            torch.cuda.set_sync_debug_mode("default")
            places.append([f"{one.filename}:{one.lineno}" for one in caught if "synchronizing" in str(one.message)])
        else:
            with host_waits(engine, rows) as seen:
                work()
            places.append(seen)
    return places
