"""Episodes of many turns: workflows, tools and their limits."""

import math
from typing import Annotated, Literal

from rlsys.config.schema import types as t
from rlsys.config.schema.base import Requires, Section, open_dict

ToolFormat = Literal["hermes", "llama3", "mistral", "deepseek", "json", "gpt-oss", "python"]
KWARGS_NEED_CLASS = Requires("actor_rollout_ref.rollout.workflow", why="no class takes them", to="module.Class")


class AgentConfig(Section):
    """How episodes run, with rollout.workflow or multi_turn.enable."""

    workflow_kwargs: Annotated[t.OpenDict, KWARGS_NEED_CLASS] = open_dict()
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
    """Share of a batch's episodes that may fail with an error or their timeout before the run stops."""


class MultiTurnConfig(Section):
    """verl's settings of tools."""

    enable: t.Flag = False
    """Answer with tools where rollout.workflow is not set."""
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
