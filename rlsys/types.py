"""Plain records and sizes shared between packages: requests, responses, weight updates, limits of temporary memory.

Token ids are Python ints in the vocabulary of the served model; log-probabilities are natural logarithms.
"""

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any
from uuid import uuid4

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase


HFConfig = Mapping[str, Any]
"""The contents of a config.json."""
LOGITS_CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Logits that are computed at a time, by kind of device."""
LARGEST_IMAGE = 1 << 14
"""Tokens of the largest image of the known vision-language models, as their processors are published."""
EXPORT_FILE_BYTES = 5 * 10**9
"""Size of the files that a Hugging Face export is split into."""


def is_reward(number: float) -> bool:
    """Whether a reward is finite in float32, in which batches hold rewards."""
    return abs(number) < 3.4e38


PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
"""Parameters by which others draw again less of what was drawn before, each with the value that changes nothing."""


def refuse_penalties(request: Mapping[str, object]) -> None:
    """ValueError for a parameter of PENALTIES that changes what is drawn."""
    for name, neutral in PENALTIES.items():
        if request.get(name) not in (None, neutral):
            why = f"tokens are drawn from the distribution that is trained; set {neutral:g} or leave it out"
            raise ValueError(f"{name}={request[name]}: {why}")


class Finish(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled. `temperature=0` is greedy; `top_k=-1` and `top_p=1` switch truncation off.

    `seed` and the request's own position determine every sample, so equal requests give equal tokens.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True)
class GenerationHyperparameters(SamplingParams):
    """AReaL's form of SamplingParams: `greedy` is temperature 0, and `n_samples` is for workflows to read.

    ValueError for a penalty other than its neutral value.
    """

    max_new_tokens: int = 16384
    greedy: bool = False
    n_samples: int = 1
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        refuse_penalties(vars(self))
        if self.greedy:
            object.__setattr__(self, "temperature", 0.0)

    def new(self, **changes: Any) -> "GenerationHyperparameters":
        """A copy with other values."""
        return replace(self, **changes)

    def new_with_stop_and_pad_token_ids(self, tokenizer: "PreTrainedTokenizerBase") -> "GenerationHyperparameters":
        """A copy that also stops at the tokenizer's end and padding tokens."""
        ids = {tokenizer.pad_token_id, tokenizer.eos_token_id, *self.stop_token_ids} - {None}
        return self.new(stop_token_ids=tuple(sorted(ids)))


@dataclass(frozen=True)
class ModelRequest:
    """A prompt to complete: token ids in, and the ImageInputs whose placeholders are among them. `session` keeps the
    turns of one episode on one server. `num_drawn` of the tokens were drawn in its earlier turns.

    `tokenizer` and `metadata` are arguments of AReaL's and not kept: tokens are neither decoded nor encoded.
    """

    input_ids: tuple[int, ...]
    gconfig: SamplingParams
    rid: str = field(default_factory=lambda: uuid4().hex)
    session: str = ""
    images: tuple[Any, ...] = ()
    num_drawn: int = 0
    tokenizer: InitVar[object] = None
    metadata: InitVar[object] = None

    def __post_init__(self, tokenizer: object, metadata: object) -> None:
        object.__setattr__(self, "input_ids", tuple(self.input_ids))


@dataclass(frozen=True)
class ModelResponse:
    """A completion, token ids out; all tuples have one entry per output token.

    `output_logprobs` are of the full distribution at the request's temperature (what the trainer recomputes);
    `sampled_logprobs` are of the distribution that was sampled from, after top-k and top-p truncation.
    `output_versions` is the weight version that produced each token, stamped by the engine.
    """

    rid: str
    input_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    output_logprobs: tuple[float, ...]
    sampled_logprobs: tuple[float, ...]
    output_versions: tuple[int, ...]
    stop_reason: Finish
    routed_experts: "np.ndarray | None" = field(default=None, compare=False)
    """An array (tokens of prompt and completion but the last, layers, experts of a token) where they are returned."""

    @property
    def version(self) -> int:
        """The oldest weight version among the tokens, -1 for an empty completion."""
        return min(self.output_versions, default=-1)

    @property
    def logprobs(self) -> tuple[float, ...]:
        return self.output_logprobs


@dataclass(frozen=True)
class LLMRequest:
    """A prompt as text, for engines of external servers with a tokenizer; `generation_config` as SamplingParams."""

    text: str
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    request_id: str = field(default_factory=lambda: uuid4().hex)
    stream: bool = False

    @property
    def gconfig(self) -> GenerationHyperparameters:
        """How its tokens are sampled."""
        return GenerationHyperparameters(**self.generation_config)


@dataclass(frozen=True)
class LLMResponse:
    """A completion as text, one log-probability per token; `usage` counts prompt_tokens and completion_tokens."""

    text: str
    logprobs: Sequence[float]
    finish_reason: str
    usage: Mapping[str, int]


@dataclass(frozen=True)
class ResponseDelta:
    """What was sampled for a request since the last exchange with its engine; the tuples have one entry per token.

    `finish` is None while the request runs. With ABORT the engine has given the request back: continue it from its
    tokens. `error` says why this request alone failed; one that is `refused` cannot be served by any engine.
    """

    rid: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    sampled_logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    finish: Finish | None = None
    routed_experts: "np.ndarray | None" = field(default=None, compare=False)
    error: str = ""
    refused: bool = False


@dataclass(frozen=True)
class WeightUpdateMeta:
    """What an update of served weights carries: its version and, for transfers through files, their folder."""

    version: int
    model_name: str = ""
    weights_path: str = ""
    metadata: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class TransferReport:
    """What a weight push moved.

    `checksum` is over all HF tensors and does not depend on how they were sharded; "" where it is not known.
    `network_bytes` are what each host received from others, where `ipc` spans hosts; `stage_s` the seconds that the
    controller waited for each stage, as far as its executor has stages.
    """

    version: int
    num_bytes: int
    seconds: float
    checksum: str
    executor: str = ""
    network_bytes: Mapping[str, int] = field(default_factory=dict)
    stage_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepReport:
    """What an optimizer step did. `applied` is False when a non-finite gradient norm refused it."""

    grad_norm: float
    lr: float
    applied: bool


Shapes = Mapping[str, tuple[int, ...]]
"""The full shape of each tensor by its name."""


@dataclass(frozen=True)
class Box:
    """A rectangular part of an HF tensor: `shape` elements from `start` in each dimension."""

    tensor: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """A box of an HF tensor and where this rank keeps it: the same shape inside a local tensor at `local_start`."""

    box: Box
    local: str
    local_start: tuple[int, ...]


@dataclass(frozen=True)
class WeightLayout:
    """Everything one rank holds. `full_shapes` and `dtypes` (torch names, e.g. "float32") are keyed by HF tensor name.

    `aliases` maps a tied HF name to the name under which its data is held (e.g. lm_head.weight). `loader` names the
    tensors that a rollout engine takes through its own `load` only. `device` is the kind of device that holds them.
    Layouts of one side with the same `digest`, where there is one, are equal but for rank and host.
    """

    rank: int
    host: str
    shards: tuple[Shard, ...]
    full_shapes: Shapes
    dtypes: Mapping[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    loader: tuple[str, ...] = ()
    device: str = "cpu"
    digest: str = ""
