"""A generative reward model: engines of the job that answer what the reward function asks, over HTTP on loopback."""

from contextlib import ExitStack
from functools import partial

from rlsys.agent.endpoint import Endpoint
from rlsys.agent.session import Session, SessionSettings
from rlsys.agent.template import ChatTemplate
from rlsys.config import PPOConfig
from rlsys.config.schema.rollout import AgentConfig, MultiTurnConfig
from rlsys.fleet.group import group_fleet
from rlsys.types import SamplingParams
from rlsys.utils.daemon_threads import LoopThread
from trainer.backend import load_tokenizer
from trainer.groups import RolloutGroup

START_S = 30.0


def serve_judge(cfg: PPOConfig, group: RolloutGroup, stack: ExitStack) -> str:
    """HOST:PORT of a chat completions server over the reward model's engines; `stack` ends it."""
    grader, rollout = cfg.reward.reward_model, cfg.reward.reward_model.rollout
    restartable = grader.enable_resource_pool
    num_rows = cfg.data.train_batch_size * cfg.actor_rollout_ref.rollout.n
    fleet = group_fleet(group, rollout.generation, cfg.trainer.deadlines, num_rows=num_rows, restartable=restartable)
    stack.callback(fleet.close)
    settings = SessionSettings(
        fleet.sample,
        ChatTemplate(load_tokenizer(grader.model)),
        SamplingParams(max_new_tokens=rollout.response_length),
        rollout.prompt_length,
        rollout.response_length,
        AgentConfig(),
        MultiTurnConfig(),
    )
    thread, endpoint = LoopThread("judge"), Endpoint(partial(Session, settings))
    stack.callback(lambda: thread.close(endpoint.close(), wait_s=START_S))
    return thread.start(endpoint.start()).result(START_S)
