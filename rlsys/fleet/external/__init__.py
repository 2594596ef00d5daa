"""External SGLang and vLLM servers as rollout engines."""

from rlsys.fleet.external.engine import RemoteEngine, SGLangRemoteEngine, VLLMRemoteEngine
from rlsys.fleet.external.settings import RemoteSettings, server_urls

__all__ = [
    "RemoteEngine",
    "RemoteSettings",
    "SGLangRemoteEngine",
    "VLLMRemoteEngine",
    "server_urls",
]
