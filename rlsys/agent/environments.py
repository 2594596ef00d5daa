"""Environments of other libraries as environment classes: the model acts by calling the tool `step`.

The rows' columns say which environment an episode has. The reward is the sum of the rewards of its steps.
"""

import json
from collections.abc import Mapping
from typing import Any

OVER = "The episode is over."


class _StepEnvironment:
    reward, is_over = 0.0, False

    def get_reward(self) -> float:
        return self.reward

    def _acted(self, observation: str, reward: float | None, is_over: bool) -> str:
        """What the model sees after a step."""
        self.reward += float(reward or 0.0)
        self.is_over = bool(is_over)
        return f"{observation}\n{OVER}" if self.is_over else observation


class GymnasiumEnvironment(_StepEnvironment):
    """An environment of Gymnasium; columns `env_id`, and if given `env_kwargs` and `seed`."""

    def reset(self, env_id: str, env_kwargs: Mapping[str, Any] | None = None, seed: int | None = None) -> str:
        import gymnasium

        self.environment = gymnasium.make(env_id, **(env_kwargs or {}))
        observation, _ = self.environment.reset(seed=seed)
        return f"\n{observation}"

    def step(self, action: str) -> str:
        """Act once and see what follows.

        Args:
            action: The action as JSON: a number for discrete actions, a list for boxes, a string for texts.
        """
        if self.is_over:
            return OVER
        given = json.loads(action)
        if not self.environment.action_space.contains(given):
            raise ValueError(f"the action must be one of {self.environment.action_space}")
        observation, reward, terminated, truncated, _ = self.environment.step(given)
        return self._acted(str(observation), float(reward), terminated or truncated)

    def close(self) -> None:
        self.environment.close()


class OpenEnvEnvironment(_StepEnvironment):
    """An environment served by OpenEnv; column `base_url`, and if given `reset_kwargs`."""

    def reset(self, base_url: str, reset_kwargs: Mapping[str, object] | None = None) -> str:
        from openenv import GenericEnvClient

        self.client = GenericEnvClient(base_url=base_url).sync()
        self.client.connect()
        result = self.client.reset(**(reset_kwargs or {}))
        self.reward, self.is_over = float(result.reward or 0.0), result.done
        return f"\n{json.dumps(result.observation)}"

    def step(self, action: dict) -> str:
        """Act once and see what follows.

        Args:
            action: The fields of the environment's action.
        """
        if self.is_over:
            return OVER
        result = self.client.step(action)
        return self._acted(json.dumps(result.observation), result.reward, result.done)

    def close(self) -> None:
        self.client.close()
