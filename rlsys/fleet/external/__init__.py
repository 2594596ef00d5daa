"""External SGLang and vLLM servers as rollout engines."""

from rlsys.fleet.external.backends import WeightGroupSpec
from rlsys.fleet.external.engine import RemoteEngine, SGLangRemoteEngine, VLLMRemoteEngine
from rlsys.fleet.external.settings import RemoteSettings, server_urls

__all__ = [
    "RemoteEngine",
    "RemoteSettings",
    "SGLangRemoteEngine",
    "VLLMRemoteEngine",
    "WeightGroupSpec",
    "server_urls",
]
