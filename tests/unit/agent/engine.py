"""An engine that draws seeded random tokens and records what each draw was given."""

from collections.abc import Callable
from random import Random

from transformers import PreTrainedTokenizerBase

from rlsys.agent.session import SessionSettings
from rlsys.agent.template import ChatTemplate
from rlsys.agent.tool_pool import ToolPool
from rlsys.config.schema.rollout import AgentConfig, MultiTurnConfig
from rlsys.protocol import ImageInputs
from rlsys.types import Finish, ModelRequest, ModelResponse, SamplingParams


class RandomEngine:
    """`sample` answers with random tokens of a vocabulary, or with `write(ids)` where it is given."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], str] | None = None) -> None:
        self.tokenizer, self.write = tokenizer, write
        self.draws: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.params: list[SamplingParams] = []
        self.images: list[tuple[ImageInputs, ...]] = []

    async def sample(self, request: ModelRequest) -> ModelResponse:
        ids, params = request.input_ids, request.gconfig
        self.params.append(params)
        self.images.append(request.images)
        random = Random(params.seed)
        eos = int(self.tokenizer.eos_token_id)
        if self.write is not None:
            text = self.write(str(self.tokenizer.decode(list(ids))))
            tokens = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], eos]
        else:
            tokens = [random.randrange(len(self.tokenizer)) for _ in range(random.randint(1, 12))]
            tokens = [token for token in tokens if token != eos] + [eos] * (random.random() < 0.8)
        tokens = tokens[: params.max_new_tokens] or [eos]
        finish = Finish.STOP if tokens[-1] == eos else Finish.LENGTH
        logs = tuple(-random.random() for _ in tokens)
        self.draws.append((tuple(ids), tuple(tokens)))
        return ModelResponse("r", tuple(ids), tuple(tokens), logs, logs, (3,) * len(tokens), finish)


def settings_for(engine: RandomEngine, template: ChatTemplate, **changes) -> SessionSettings:
    """Settings with wide budgets and temperature 1."""
    limits = changes.pop("limits", (100_000, 100_000))
    return SessionSettings(engine.sample, template, SamplingParams(512), *limits, **changes)


def tool_pool(*, num_workers: int = 8, timeout_s: float = 30.0, max_chars: int = 256) -> ToolPool:
    """A pool with these settings."""
    agent = AgentConfig(num_workers=num_workers, tool_timeout_s=timeout_s)
    return ToolPool(agent, MultiTurnConfig(max_tool_response_length=max_chars))
