"""Generation: the engine, sampling, external servers, agents, weight pushes and the parity probe."""

import math
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Strict

from rlsys.config.engines import rollout_backend, rollout_backends
from rlsys.config.schema import types as t
from rlsys.config.schema.base import Registered, Section, linked, open_dict, section
from rlsys.config.schema.model import AnyDType, LogProbConfig

ToolFormat = Literal["hermes", "llama3", "mistral", "deepseek", "json", "gpt-oss", "python"]

Temperature = Annotated[float, Strict(), Field(ge=0, le=100)]
TopP = Annotated[float, Strict(), Field(gt=0, le=1)]
TopK = Annotated[t.CountOrAll, BeforeValidator(lambda v: -1 if v == 0 else v)]
Executor = Annotated[
    Literal["auto", "local", "shm", "ipc", "nccl", "disk", "gather"],
    BeforeValidator(lambda v: "auto" if v == "naive" else v),
]


class AgentConfig(Section):
    """How episodes run, with rollout.workflow or multi_turn.enable."""

    workflow_kwargs: t.OpenDict = open_dict()
    """Arguments of the workflow's class."""
    command: t.Text | None = None
    """Program that answers a prompt: it gets OPENAI_BASE_URL, OPENAI_API_KEY and RLSYS_ROW (JSON)."""
    path: t.Text | None = None
    """Function that answers a prompt (file.py:name or module:name): it gets what it names of row, prompt, base_url and
    api_key."""
    default_agent_loop: t.Text = "single_turn_agent"
    """Agent of rows without agent_name: single_turn_agent, tool_agent, or one of agent_loop_config_path."""
    agent_loop_config_path: t.LocalPath | None = None
    """YAML list of {name, _target_, ...arguments}: workflows that rows choose by agent_name."""
    history: Literal["as_drawn", "as_rendered"] = "as_drawn"
    """Keep the tokens of earlier turns as they were drawn, or as the chat template renders them (a new branch where it
    differs)."""
    num_workers: t.Count = 8
    """Processes that run tools; as many again for async functions, and for environments and tools with state."""
    max_concurrent: t.Count = 256
    """Largest number of episodes at once."""
    max_tokens_per_turn: t.Count | None = None
    """Longest turn, in tokens; null leaves it to data.max_response_length."""
    max_tool_seconds: t.Seconds | None = None
    """Seconds of tool calls after which an episode ends; null has no limit."""
    tool_timeout_s: t.Seconds = 30.0
    """Seconds after which a tool call is killed."""
    episode_timeout_s: t.Seconds = 600.0
    """Seconds after which an episode is given up."""
    max_rows: t.Count = 8
    """Rows to train on of an episode with branches (rewritten histories, parallel conversations), the longest first."""
    max_failed_share: t.Fraction = 0.5
    """Share of a batch's episodes that may fail with an error or their timeout before the run stops; asynchronous runs
    also stop by trainer.max_failed_share of prompts whose episodes all failed."""


class MultiTurnConfig(Section):
    """verl's settings of tools."""

    enable: t.Flag = False
    """Answer with tools where neither rollout.workflow nor another agent is set."""
    format: ToolFormat = "hermes"
    """How the model writes tool calls; hermes is Qwen's too."""
    tool_config_path: t.LocalPath | None = None
    """YAML of tool classes: tools, a list of {class_name, config, tool_schema}."""
    function_tool_path: t.LocalPath | None = None
    """Python file whose functions marked with @function_tool are tools."""
    interaction_config_path: t.LocalPath | None = None
    """YAML of verl's interactions, which answer the model as its user: interaction, a list of {name, class_name,
    config}; a row chooses one by extra_info.interaction_kwargs.name."""
    max_assistant_turns: t.Count | None = None
    """Largest number of turns of the model; null has no limit."""
    max_user_turns: t.Count | None = None
    """Largest number of turns with tool results; null has no limit."""
    max_parallel_calls: t.Count = 1
    """Tool calls of one answer that run at once."""
    max_tool_response_length: t.Count = 256
    """Longest tool result, in characters."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """Part of a longer result that is left out: its end (left), middle or start (right)."""

    @property
    def max_turns(self) -> float:
        """Largest number of turns of the model."""
        user_turns = math.inf if self.max_user_turns is None else self.max_user_turns + 1
        return min(self.max_assistant_turns or math.inf, user_turns)


class ValKwargsConfig(Section):
    """Sampling for validation."""

    temperature: Temperature = 0.0
    """Temperature; 0 is greedy."""
    top_k: TopK = -1
    """Sample from the k most likely tokens; -1 or 0 is all."""
    top_p: TopP = 1.0
    """Sample from the most likely tokens with this total probability."""
    n: t.Count = 1
    """Answers per prompt."""
    do_sample: t.Flag = False
    """Sample; false is greedy."""


class CheckpointEngineConfig(Section):
    """How weights are pushed to the rollout."""

    backend: Executor = "auto"
    """auto (or naive) chooses: local within a process, ipc between GPUs of a host, else shm on one host, nccl across
    hosts, disk for external servers, which also take nccl. disk writes files; gather is slow but always works."""
    update_weights_bucket_megabytes: t.Count = 2048
    """Largest bucket of gather."""


class EngineKwargsConfig(Section):
    """More arguments of an engine, under its own names."""

    vllm: t.OpenDict = open_dict()
    """vLLM's EngineArgs."""
    sglang: t.OpenDict = open_dict()
    """SGLang's ServerArgs."""


class ServingConfig(Section):
    """An engine that answers prompts."""

    tensor_model_parallel_size: t.Count = 1
    """Processes that share one copy of the model, or with the rollout's data_parallel_size one of its attention."""
    gpu_memory_utilization: TopP = 0.5
    """Fraction of GPU memory for the weights and KV cache of vLLM or SGLang; not set, or auto, a job chooses the
    rollout's by its memory plan."""
    enforce_eager: t.Flag = False
    """Run vLLM and SGLang without compilation and CUDA graphs: faster to start, slower to generate."""
    dtype: AnyDType = "auto"
    """dtype of the engine; auto is bfloat16 on CUDA and float32 on CPU."""
    max_num_seqs: t.Count = 256
    """Largest number of sequences decoded together; not set, or auto, a job chooses the rollout's by its memory."""
    max_model_len: t.Count | None = None
    """Longest prompt and response together; null is as many as the model has positions."""


class GenerationConfig(ServingConfig):
    """The engine that generates responses."""

    data_parallel_size: t.Count = 1
    """Copies of the attention within a copy of the model, each for requests of its own; all share the experts
    (expert_parallel_size). vllm, and for some models sglang."""
    expert_parallel_size: t.Count = 1
    """Processes of a copy among which its experts are divided whole: all of them, or for sglang a divisor; 1 divides
    each expert among all."""
    pipeline_model_parallel_size: t.Count = 1
    """Stages of a copy of the model, each with its own layers on tensor_model_parallel_size processes. They take turns:
    for models that do not fit otherwise. vllm, and sglang without data_parallel_size."""
    kv_cache_gib: t.Count = 1
    """Size of vLLM's or SGLang's KV cache on CPU, in GiB."""
    cuda_graph_max_bs: t.Count | None = None
    """Largest batch that vLLM and SGLang decode with a CUDA graph; null is max_num_seqs, at most 512."""
    cudagraph_capture_sizes: t.Counts | None = None
    """Batch sizes that get a CUDA graph; null lets the engine choose up to cuda_graph_max_bs."""
    num_scheduler_steps: t.Count = 8
    """Most decoding steps for each step of vLLM's scheduler, for which an answer's end and new requests wait. It makes
    several for dense models of text on GPUs, and one for others."""
    disable_log_stats: t.Flag = True
    """Do not log vLLM's and SGLang's own statistics."""
    enable_chunked_prefill: t.Flag = True
    """Let vLLM and SGLang prefill long prompts in chunks alongside decoding."""
    enable_prefix_caching: t.Flag = True
    """Let vLLM and SGLang prefill a prompt shared by several answers once."""
    engine_kwargs: EngineKwargsConfig = section(EngineKwargsConfig)
    full_determinism: t.Flag = False
    """Aligned mode: logits in float32 and, if the engine has them, batch-invariant kernels; training is deterministic
    too."""
    seed: t.Seed = 42
    """Seed of sampling."""
    ignore_eos: t.Flag = False
    """Continue after the end token, up to the full length (for benchmarks)."""
    max_num_batched_tokens: t.Count = 8192
    """Largest number of prompt tokens prefilled together."""
    quantization: Literal["fp8"] | None = None
    """Serve the linear layers in FP8, with a scale for each block of 128 x 128 weights (64 x 64 where layers are no
    multiples of 128 wide), in vLLM and SGLang on GPUs; training and checkpoints stay as they are."""
    on_update: Literal["keep", "recompute"] = "keep"
    """What happens to the KV cache of unfinished answers when new weights arrive; external servers compute it again in
    any case."""
    eos: t.TokenIds | None = None
    """Ids of the tokens that end a response; null takes the tokenizer's and those of the generation config."""
    padding: t.CountOrZero | None = None
    """Id of the padding token; null takes the tokenizer's."""
    enable_rollout_routing_replay: t.Flag = False
    """Return the experts that each token took, for actor.router_replay.mode=R3."""
    limit_images: t.Count | None = None
    """Most images of a prompt; a row with more cannot be used. null is any number."""
    print_outputs: t.Flag = False
    """Print the text and token ids of each answer."""
    workflow: t.Text | None = None
    """How a prompt is answered: a name of rlsys.agent.presets, module.Class, module:function or file.py:name; null
    draws one answer."""
    agent: AgentConfig = section(AgentConfig)
    multi_turn: MultiTurnConfig = section(MultiTurnConfig)

    @property
    def attention_size(self) -> int:
        """Processes that hold one copy of the attention."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def replica_size(self) -> int:
        """Processes that hold one copy of the model."""
        return self.attention_size * self.data_parallel_size

    @property
    def max_replica_seqs(self) -> int:
        """Largest number of sequences that a copy of the model decodes together."""
        return self.max_num_seqs * self.data_parallel_size

    @property
    def has_workflow(self) -> bool:
        """Whether prompts are answered by episodes instead of single draws."""
        agent = self.agent
        chosen = (self.workflow, agent.command, agent.path, agent.agent_loop_config_path, self.multi_turn.enable)
        return any(chosen) or agent.default_agent_loop != "single_turn_agent"

    @property
    def may_score(self) -> bool:
        """Whether episodes run code of your own, which may score them without the reward function."""
        own = (self.agent.command, self.agent.path, self.agent.agent_loop_config_path)
        return any(own) or any(mark in (self.workflow or "") for mark in ".:")


class ServersConfig(Section):
    """External servers, for rollout.name=sglang_remote and vllm_remote."""

    urls: t.Texts | None = None
    """Addresses; null takes VLLM_API_BASE (vLLM) or AREAL_LLM_SERVER_ADDRS (either) from the environment."""
    model: t.Text | None = None
    """Name of the served model; null takes the server's."""
    lora_name: t.Text | None = None
    """Push only LoRA adapters, served under this name and their version; null pushes merged weights."""
    policy: Literal["least_loaded", "affinity"] = "least_loaded"
    """How a server is chosen; affinity sends equal prompts to one server, for its prefix cache."""
    max_concurrent: t.Count = 256
    """Largest number of concurrent requests."""
    timeout_s: t.Seconds = 120.0
    """Seconds without a token after which the rest of an answer is requested from another server."""
    max_retries: t.CountOrZero = 3
    """Retries of a failed request."""
    token_env: t.Text = "RLSYS_SERVER_TOKEN"
    """Environment variable with the servers' bearer token; if it is not set none is sent."""
    weights_dir: t.LocalPath = "${trainer.default_local_dir}/served_weights"
    """Folder through which weights are pushed, unless by nccl; servers must see it under the same path."""


class ParityConfig(Section):
    """The parity probe: a few answers scored by both actor and rollout, which must agree."""

    freq: t.CountOrOff = 0
    """Probe after the first push and every N steps; 0: first push only; -1: off."""
    rows: t.Count = 4
    """Number of training prompts that are answered for it."""
    max_tokens: t.Count = 32
    """Longest of these answers, in tokens."""
    mean_limit: t.Positive = 0.05
    """Limit of the mean absolute difference of log-probs, in nats."""
    max_limit: t.Positive = 1.0
    """Limit of a single difference."""
    policy: Literal["warn", "stop"] = "warn"
    """Warn, or stop the run, above a limit."""

    @property
    def is_enabled(self) -> bool:
        """Whether the probe ever runs."""
        return self.freq >= 0


class RolloutConfig(GenerationConfig, LogProbConfig):
    """Generation for training, and the log-probs of what was generated."""

    free_cache_engine: t.Flag = True
    """Release the rollout's weights and KV cache on the GPU while other roles run. If the GPU has room for all of
    them, false saves the time of the moves."""
    name: Annotated[t.Text, Registered(tuple(backend.name for backend in rollout_backends()))] = "hf"
    """Engine: hf (transformers), sglang, vllm, external servers (sglang_remote, vllm_remote), or one you registered."""
    min_replicas: t.Count | None = None
    """Elastic rollout: the run starts, and continues, with this many of trainer.rollout_workers. The others join where
    the cluster has room, and one that is lost or drained is started on another node. null needs all of them."""
    n_gpus_per_node: t.Count = linked("trainer.n_gpus_per_node")
    """With verl's rollout.nnodes, processes on each of these nodes; together they are trainer.rollout_workers."""
    temperature: Annotated[float, Strict(), Field(gt=0, le=100)] = 1.0
    """Sampling temperature; log-probs are taken at it too."""
    top_k: TopK = -1
    """Sample from the k most likely tokens; -1 or 0 is all."""
    top_p: TopP = 1.0
    """Sample from the most likely tokens with this total probability."""
    do_sample: t.Flag = True
    """Sample; false is greedy."""
    n: t.Count = 1
    """Responses per prompt."""
    over_sample_rate: t.Fraction = 0.0
    """Share of a step's episodes that are not waited for: the last ones are ended and not trained on."""
    val_kwargs: ValKwargsConfig = section(ValKwargsConfig)
    checkpoint_engine: CheckpointEngineConfig = section(CheckpointEngineConfig)
    validate_weight: t.Flag = False
    """Compare every tensor of every engine with the actor's after each push; stop if one differs."""
    validate_save_dir: t.LocalPath | None = None
    """Folder for reports of these comparisons, weights_v{version}.json."""
    parity: ParityConfig = section(ParityConfig)
    servers: ServersConfig = section(ServersConfig)

    @property
    def is_external(self) -> bool:
        """Whether servers outside of the job generate."""
        return rollout_backend(self.name).is_external
