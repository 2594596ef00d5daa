"""Base class of workers with a training engine: checkpoints, exports, moves between devices, profiles."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from rlsys.config.schema.trainer import ProfilerConfig
from rlsys.interfaces import Part, TrainEngine
from rlsys.single_controller.base import Worker
from rlsys.single_controller.dispatch import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from rlsys.telemetry.profiler import start_profile, stop_profile
from rlsys.utils.run_folders import HUGGINGFACE

MESH = "engine"
BY_MESH = make_nd_compute_dataproto_dispatch_fn(MESH)
"""Each data-parallel rank of the engine gets its rows."""


class ProfiledWorker(Worker):
    """One rank of a role that is profiled."""

    def on_profile(self, method: Callable[..., None], *args: str) -> None:
        """Call a method of rlsys.telemetry.profiler in the process that starts this role's kernels."""
        method(*args)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, config: ProfilerConfig, name: str) -> None:
        """Profile this process, if it is one of the ranks, until `stop_profile`."""
        if config.ranks is None or self.rank in config.ranks:
            self.on_profile(start_profile, config.tool, f"{config.save_path}/{name}_rank{self.rank}")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> None:
        """Write the profile."""
        self.on_profile(stop_profile)


class EngineWorker(ProfiledWorker):
    """One rank of a role that holds a training engine."""

    engine: TrainEngine
    saves_hf_model = False
    """Whether a Hugging Face folder is written beside each checkpoint."""

    def use_engine(self, engine: TrainEngine) -> None:
        """Keep the engine and register with the group which rows this rank gets."""
        self.engine = engine
        self._register_dispatch_collect_info(MESH, engine.dp_rank, engine.is_collect)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, background: bool = False) -> None:
        """Save what a resumed run needs, or begin to in the `background`, and the Hugging Face folder if configured."""
        if background:
            self._saving = self.engine.begin_save(Path(path))
        else:
            self.engine.save(Path(path), "resume")
        if self.saves_hf_model:
            self.engine.save(Path(path) / HUGGINGFACE, "export")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def is_saved(self) -> bool:
        """Whether this rank has written its files in the background, or failed to."""
        return self._saving.is_written

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_save(self) -> None:
        """Wait for what is written in the background and commit it."""
        self._saving.finish()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Load what `save_checkpoint` wrote."""
        self.engine.load(Path(path))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export(self, path: str, what: Literal["export", "adapter"] = "export") -> None:
        """Write the model as a Hugging Face folder, or its LoRA adapter alone."""
        self.engine.save(Path(path), what)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def move(self, parts: tuple[Part, ...], device: str) -> None:
        """Move parameters, gradients or optimizer state to another device."""
        self.engine.move(parts, device)
