"""External SGLang and vLLM servers as rollout engines."""

from rlsys.rollout.remote.backends import WeightGroupSpec
from rlsys.rollout.remote.engine import RemoteEngine, RemoteSGLangEngine, SGLangRemoteEngine, VLLMRemoteEngine
from rlsys.rollout.remote.settings import RemoteSettings, server_urls

__all__ = [
    "RemoteEngine",
    "RemoteSGLangEngine",
    "RemoteSettings",
    "SGLangRemoteEngine",
    "VLLMRemoteEngine",
    "WeightGroupSpec",
    "server_urls",
]
