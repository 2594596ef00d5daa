"""Generation: the engine, sampling, external servers, weight pushes and the parity probe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Strict

from rlsys.config.schema.base import (
    Count,
    CountOrOff,
    CountOrZero,
    Counts,
    Flag,
    LocalPath,
    OpenDict,
    Positive,
    Seconds,
    Section,
    Seed,
    Text,
    Texts,
    TokenIds,
    linked,
    open_dict,
)
from rlsys.config.schema.model import AnyDType

Temperature = Annotated[float, Strict(), Field(ge=0, le=100)]
TopP = Annotated[float, Strict(), Field(gt=0, le=1)]
Share = TopP
Engine = Annotated[Text, BeforeValidator(lambda v: "sglang" if v == "sglang_async" else v)]
Executor = Annotated[
    Literal["auto", "local", "shm", "ipc", "nccl", "disk", "gather"],
    BeforeValidator(lambda v: "auto" if v == "naive" else v),
]


class ValKwargsConfig(Section):
    """Sampling for validation."""

    temperature: Temperature = 0.0
    """Temperature; 0 is greedy."""
    top_k: CountOrOff = -1
    """Draw from the k likeliest tokens; -1 from all."""
    top_p: TopP = 1.0
    """Draw from the likeliest tokens that make up this probability."""
    n: Count = 1
    """Answers to each prompt."""
    do_sample: Flag = False
    """Draw tokens; false takes the likeliest."""


class CheckpointEngineConfig(Section):
    """How weights reach the rollout."""

    backend: Executor = "auto"
    """auto (also: naive) chooses: local in one process, ipc between GPUs of a host, else shm on one host, nccl over
    hosts; disk writes files; gather is the slow way that always works."""
    update_weights_bucket_megabytes: Count = 2048
    """Largest bucket of the slow way."""


class EngineKwargsConfig(Section):
    """Further arguments of an engine, under its own names."""

    vllm: OpenDict = open_dict()
    """Of vLLM's EngineArgs."""
    sglang: OpenDict = open_dict()
    """Of SGLang's ServerArgs."""


class GenerationConfig(Section):
    """The engine that writes responses."""

    tensor_model_parallel_size: Count = 1
    """Processes that serve one copy of the model together; the others are further copies."""
    gpu_memory_utilization: Share = 0.5
    """Share of a GPU's memory for the weights and cache of vLLM or SGLang."""
    free_cache_engine: Flag = True
    """Whether weights and cache of the rollout leave the GPU while other roles run on it. Where there is room for all
    of them, false saves the time of the moves."""
    kv_cache_gib: Count = 1
    """GiB of vLLM's or SGLang's cache on CPU."""
    enforce_eager: Flag = False
    """vLLM and SGLang run without compiling and without CUDA graphs: they start sooner, generate slower."""
    cuda_graph_max_bs: Count | None = None
    """Most sequences that vLLM and SGLang decode by a CUDA graph; null takes max_num_seqs, 512 at most."""
    cudagraph_capture_sizes: Counts | None = None
    """Numbers of sequences they have a CUDA graph for; null lets them choose up to cuda_graph_max_bs."""
    disable_log_stats: Flag = True
    """Keep vLLM's and SGLang's own statistics out of the log."""
    enable_chunked_prefill: Flag = True
    """vLLM and SGLang read long prompts in parts beside running answers."""
    enable_prefix_caching: Flag = True
    """vLLM and SGLang read a prompt that several answers share once."""
    engine_kwargs: EngineKwargsConfig = Field(default_factory=EngineKwargsConfig)
    full_determinism: Flag = False
    """Aligned mode: logits in float32 and, where the engine has them, kernels that give a token the same digits in any
    batch; training computes deterministically too."""
    seed: Seed = 42
    """Seed of all draws."""
    ignore_eos: Flag = False
    """Go on after the end token, up to the full length (for measuring)."""
    dtype: AnyDType = "auto"
    """Type the engine computes in; auto is bfloat16 on CUDA and float32 on CPU."""
    max_num_seqs: Count = 256
    """Sequences generated together."""
    max_num_batched_tokens: Count = 8192
    """Prompt tokens read in together."""
    max_model_len: Count | None = None
    """Longest prompt and response together; null takes what the model's positions allow."""
    eos: TokenIds | None = None
    """Ids of the tokens that end a response; null takes those of the model's generation config."""
    padding: CountOrZero | None = None
    """Id of the token that fills rows up; null takes the tokenizer's."""
    print_outputs: Flag = False
    """Print each answer, its text and its token ids."""


class ServersConfig(Section):
    """External servers, for rollout.name=sglang_remote and vllm_remote."""

    urls: Texts | None = None
    """Addresses; null takes VLLM_API_BASE (vLLM) or AREAL_LLM_SERVER_ADDRS (either) from the environment."""
    model: Text | None = None
    """Name the model is served under; null takes the server's own."""
    lora_name: Text | None = None
    """Push LoRA adapters only, served under this name and their version; null pushes merged weights."""
    policy: Literal["least_loaded", "round_robin", "affinity"] = "least_loaded"
    """Who gets a request; affinity: equal prompts meet at one server, for its prefix cache."""
    max_concurrent: Count = 256
    """Requests that are out at once."""
    timeout_s: Seconds = 120.0
    """Longest silence within an answer before another server is asked for the rest."""
    max_retries: CountOrZero = 3
    """Further attempts of a failed request."""
    token_env: Text = "RLSYS_SERVER_TOKEN"
    """Environment variable that holds the servers' bearer token; unset sends none."""
    weights_dir: LocalPath = "${trainer.default_local_dir}/served_weights"
    """Folder through which weights are pushed; the servers must see it under the same path."""


class ParityConfig(Section):
    """The parity probe: a few answers scored by actor and rollout, which must agree."""

    freq: CountOrOff = 0
    """Probe after the first push and each so many steps; 0: after the first push only; -1: never."""
    rows: Count = 4
    """Training prompts that are answered for it, from the first on."""
    max_tokens: Count = 32
    """Longest of these answers."""
    mean_limit: Positive = 0.05
    """Largest mean of the log-probs' absolute differences, in nats."""
    max_limit: Positive = 1.0
    """Largest single difference."""
    policy: Literal["warn", "stop"] = "warn"
    """What happens above a limit: a warning, or the end of the run."""


class RolloutConfig(GenerationConfig):
    """Generation for training, and the log-probs of what was generated."""

    name: Engine = "hf"
    """Engine: hf (transformers), sglang, vllm, external servers (sglang_remote, vllm_remote), or one you registered."""
    temperature: Temperature = 1.0
    """Sampling temperature; log-probs are taken at it too."""
    top_k: CountOrOff = -1
    """Draw from the k likeliest tokens; -1 from all."""
    top_p: TopP = 1.0
    """Draw from the likeliest tokens that make up this probability."""
    do_sample: Flag = True
    """Draw tokens; false takes the likeliest."""
    n: Count = 1
    """Responses to each prompt."""
    log_prob_micro_batch_size_per_gpu: Count | None = linked("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu")
    """Samples of one forward pass when the actor recomputes log-probs."""
    log_prob_use_dynamic_bsz: Flag = linked("actor_rollout_ref.actor.use_dynamic_bsz")
    """Fill these passes by tokens instead of by samples."""
    log_prob_max_token_len_per_gpu: Count = linked("actor_rollout_ref.actor.ppo_max_token_len_per_gpu")
    """Tokens of one of these passes on a rank."""
    val_kwargs: ValKwargsConfig = Field(default_factory=ValKwargsConfig)
    checkpoint_engine: CheckpointEngineConfig = Field(default_factory=CheckpointEngineConfig)
    validate_weight: Flag = False
    """Compare every tensor of every engine with the actor's after each push; one that differs ends the run."""
    validate_save_dir: LocalPath | None = None
    """Folder for the reports of these comparisons, weights_v{version}.json."""
    parity: ParityConfig = Field(default_factory=ParityConfig)
    servers: ServersConfig = Field(default_factory=ServersConfig)
