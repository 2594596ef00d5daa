"""verl's interactions: where the model calls no tool, a user-defined object answers it as its user.

A row chooses its interaction by `extra_info.interaction_kwargs`, whose `name` is one of the configuration's.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rlsys.agent.session import EpisodeEnd, Row, Score, Session
from rlsys.agent.tool_config import ENTRIES, read_entries
from rlsys.agent.tool_pool import checked
from rlsys.agent.tool_process import CREATE, RESPOND
from rlsys.agent.tools import load_target
from rlsys.utils.errors import ConfigError


class BaseInteraction:
    """verl's interface: one `start_interaction` for an episode, `generate_response` for each answer, then the end."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self.config, self.name = config, config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: object) -> object:
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: object
    ) -> tuple[bool, str, float, dict[str, object]]:
        """(whether the episode ends, the user's message, the score of this turn, more)."""
        raise NotImplementedError

    async def finalize_interaction(self, *args: object, **kwargs: object) -> None:
        return None


class InteractionWorkflow:
    """Answers, tool calls and the user's messages until the interaction ends; the last answer is graded.

    Grading gets the scores of the turns as `turn_scores`; their sum is the metric `interaction_score`.
    """

    def __init__(self, path: str, *, key: str) -> None:
        self._classes: dict[str, tuple[str, dict[str, Any]]] = {}
        for entry in read_entries(path, ENTRIES, key=key).get("interaction", ()):
            target = str(entry.get("class_name", ""))
            load_target(target, key=key)
            name = entry.get("name") or target.rpartition(".")[2].removesuffix("Interaction").lower()
            if name in self._classes:
                raise ConfigError(f"{key}={path}: two interactions are named {name}")
            self._classes[name] = target, {"config": {**(entry.get("config") or {}), "name": name}}

    async def run(self, row: Row, session: Session) -> Score:
        kwargs = (row.get("extra_info") or {}).get("interaction_kwargs") or {}
        if kwargs.get("name") not in self._classes:
            known = ", ".join(self._classes)
            raise ConfigError(f"extra_info.interaction_kwargs.name={kwargs.get('name')}: choose from {known}")
        assert session.tools is not None
        user = session.tools.add_object(*self._classes[kwargs["name"]])
        checked(await user.call(CREATE, kwargs), "the interaction")
        session.add(*row["prompt"])
        scores, answer = [], None
        with suppress(EpisodeEnd):
            while True:
                answer = await session.draw()
                if answer.tool_calls:
                    await session.call_tools(answer)
                    continue
                reply = await user.call(RESPOND, {"messages": session.messages, **kwargs})
                scores.append(checked(reply, "the interaction").score)
                if reply.extra["ends"]:
                    break
                session.add(reply.extra["text"])
        graded = await session.grade(answer, turn_scores=scores)
        return Score(graded.reward, graded.turn_rewards, {**graded.extra, "interaction_score": sum(scores)})
