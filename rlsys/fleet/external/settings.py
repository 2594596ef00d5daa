"""The addresses of external servers, retries and time limits."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from yarl import URL

from rlsys.config.schema.rollout import RolloutConfig, ServersConfig
from rlsys.config.schema.trainer import GradingDeadlinesConfig
from rlsys.utils.errors import ConfigError, raised_as

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ADDRESS_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "sglang": ("AREAL_LLM_SERVER_ADDRS", "SGLANG_API_BASE"),
    "vllm": ("VLLM_API_BASE", "AREAL_LLM_SERVER_ADDRS"),
}
KEY, TOKEN_VARIABLE = "actor_rollout_ref.rollout.servers", "RLSYS_SERVER_TOKEN"
MAX_TOKEN_ID = 2**31


@dataclass(frozen=True)
class RemoteSettings:
    """How to talk to servers at `urls`: the section `rollout.servers`, and what is not a setting.

    `token` is sent as a bearer token. A request is tried again after up to `max_backoff_s`. `breaker_failures` failures
    in a row take a server out for `cooldown_s`, doubled each time up to `max_cooldown_s`, until its health check
    succeeds. `request_s` bounds a request with all retries, `update_s` a weight update.
    `hf_config` is the configuration of the model, for prompts with images and the range of token ids.
    `send_seeds` passes on each request's seed, which costs speed and which few servers honour exactly.
    """

    urls: tuple[str, ...]
    servers: ServersConfig = field(default_factory=ServersConfig)
    token: str = field(default="", repr=False)
    max_backoff_s: float = 10.0
    breaker_failures: int = 3
    cooldown_s: float = 2.0
    max_cooldown_s: float = 60.0
    health_s: float = 5.0
    health_deadline_s: float = 30.0
    start_s: float = 300.0
    request_s: float = 3600.0
    update_s: float = 600.0
    stop_grace_s: float = 5.0
    send_seeds: bool = False
    keep_adapters: int = 2
    hf_config: "PretrainedConfig | None" = None

    @property
    def vocab_size(self) -> int:
        """Token ids of answers are below it."""
        return self.hf_config.get_text_config().vocab_size if self.hf_config else MAX_TOKEN_ID


def settings_of(rollout: RolloutConfig, deadlines: GradingDeadlinesConfig, *, max_staleness: int) -> RemoteSettings:
    """The settings of a run, with addresses and token from the environment; ConfigError if no address is set."""
    servers = rollout.servers
    return RemoteSettings(
        server_urls(rollout.name.removesuffix("_remote"), servers.urls or ()),
        servers,
        token=os.environ.get(servers.token_env, ""),
        start_s=deadlines.start_s,
        request_s=deadlines.generate_s,
        update_s=deadlines.weights_s,
        keep_adapters=max_staleness + 2,
    )


def server_urls(kind: str, given: Sequence[str] = (), environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Addresses without path, from `given` or else from the environment variables of `kind` (sglang or vllm).

    Takes `http://host:port`, `http://host:port/v1` and `host:port`, several separated by commas. ConfigError where
    there is none, or one has another scheme, a password or a path of its own.
    """
    names = ADDRESS_VARIABLES.get(kind, ())
    texts = list(given) or next(([environment[name]] for name in names if environment.get(name)), [])
    if not (parts := [part.strip() for text in texts for part in text.split(",") if part.strip()]):
        raise ConfigError(f"{KEY}.urls: no address of a {kind} server; set {' or '.join(('the URLs', *names))}")
    return tuple(dict.fromkeys(_url(part) for part in parts))


def _url(text: str) -> str:
    shown = text.rpartition("@")[2]
    with raised_as(ConfigError, f"{KEY}.urls: server address '{shown}'", ValueError):
        url = URL(text if "://" in text else f"http://{text}")
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"{KEY}.urls: server address '{shown}' is written http://host:port")
    if "@" in text:
        raise ConfigError(f"{KEY}.urls: server address '...@{shown}' holds a password; set {TOKEN_VARIABLE} instead")
    if url.path.rstrip("/") not in ("", "/v1") or url.query_string or url.fragment:
        raise ConfigError(f"{KEY}.urls: server address '{shown}': only the path /v1 is understood")
    return str(url.origin())
