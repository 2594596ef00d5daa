"""A group of workers that is called like one object: the registered methods of its class are bound to the group."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, partialmethod
from typing import Any, Self

from rlsys.single_controller import dispatch
from rlsys.single_controller.calls import Backend, CallSpec, Future, Pending, finish, of_rank
from rlsys.single_controller.rows import is_future
from rlsys.telemetry.recorder import StageReport


class ClassWithInitArgs:
    """A worker class and the arguments with which every rank builds its worker."""

    def __init__(self, cls: type, *args: object, **kwargs: object) -> None:
        self.cls, self.args, self.kwargs = cls, args, kwargs


class WorkerGroup:
    """Workers of one class (or one role of a colocated class), driven together.

    Every method the class registered is a method of the group. Blocking calls return the collected results; a failure
    of any rank raises one `WorkerError` (or the worker's own `ConfigError`, `DataError`, ...), silence past the
    deadline of the stage (the method's name) a `DeadlineError`.
    """

    def __init__(self, backend: Backend, cls: type, *, role: str, target: str | None = None) -> None:
        self.backend, self._cls, self._target, self.role = backend, cls, target, role
        self.world_size = backend.world_size
        self._meshes: dict[str, list[dispatch.MeshRank]] = {}
        self._views: dict[str, WorkerGroup] = {}
        self._close: Callable[[], None] = backend.close
        for name, registration in dispatch.registered_methods(cls).items():
            if hasattr(self, name):
                raise ValueError(f"{cls.__name__}.{name} cannot be registered: the group has a '{name}' of its own")
            setattr(self, name, partial(self._call, name, registration))

    def __getattr__(self, name: str) -> Any:
        """AttributeError: registered methods are attributes of the instance, so `name` is not one of them."""
        methods = dispatch.registered_methods(self.__dict__["_cls"]) if "_cls" in self.__dict__ else ()
        raise AttributeError(f"{type(self).__name__} has no '{name}'; its workers register: {', '.join(methods)}")

    @property
    def workers(self) -> list[Any]:
        """One handle per rank: Ray actors, or the worker objects themselves on the local backend."""
        return self.backend.workers

    def execute_all_async(self, method: str, *args: object, **kwargs: object) -> list[Future]:
        """Start a method on every rank; lists with one entry per rank are handed out, other values go to all."""
        pending = self._start(method, dispatch.dispatch_all_to_all(self, *args, **kwargs))
        return [of_rank(call, pending) for call in pending]

    def execute_all_sync(self, method: str, *args: object, **kwargs: object) -> list[Any]:
        return self._results(self._start(method, dispatch.dispatch_all_to_all(self, *args, **kwargs)))

    execute_all = execute_all_async

    def execute_rank_async(self, rank: int, method: str, *args: object, **kwargs: Any) -> Future:
        """Start a method on one rank, registered or not; failures of other ranks do not end it."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"{self.role} has ranks 0..{self.world_size - 1}, not {rank}")
        spec = CallSpec(method, self.role, self._target, tuple(kwargs))
        return of_rank(self.backend.submit([(rank, spec, _resolved((*args, *kwargs.values())))])[0])

    def execute_rank(self, rank: int, method: str, *args: Any, deadline_s: float | None = None, **kwargs: Any) -> Any:
        """Run a method on one rank and return its result."""
        return self.execute_rank_async(rank, method, *args, **kwargs).get(deadline_s)

    execute_rank_zero_sync = partialmethod(execute_rank, 0)
    execute_rank_zero = execute_rank_zero_async = partialmethod(execute_rank_async, 0)

    def dispatch_info(self, mesh_name: str) -> list[dispatch.MeshRank]:
        """Where every rank stands on a mesh; asked once."""
        if mesh_name not in self._meshes:
            self._meshes[mesh_name] = self.execute_all_sync("_query_dispatch_collect_info", mesh_name)
        return self._meshes[mesh_name]

    def spawn(self, prefix_set: Sequence[str] | set[str]) -> dict[str, Self]:
        """One group per role of a colocated class, on the same processes."""
        roles: Mapping[str, type] = getattr(self._cls, "roles", {})
        if unknown := sorted(set(prefix_set) - set(roles)):
            known = sorted(roles) or "none: use create_colocated_worker_cls"
            raise ValueError(f"{self.role} has no roles {unknown}; it has {known}")
        for prefix in sorted(set(prefix_set) - set(self._views)):
            self._views[prefix] = self._view(prefix, roles[prefix])
        return {prefix: self._views[prefix] for prefix in prefix_set}  # pyrefly: ignore

    def fuse(self, prefix_set: Sequence[str] | set[str]) -> None:
        """Make the roles of a colocated class attributes of this group."""
        for prefix, view in self.spawn(prefix_set).items():
            setattr(self, prefix, view)

    def restart_rank(self, rank: int, deadline_s: float | None = None) -> None:
        """Replace one rank by a new process in the same place, built from the same arguments and environment."""
        self.backend.restart(rank, deadline_s)

    def drain_stages(self) -> StageReport:
        """Spans and memory of the calls waited for since the last time, of all roles that share the processes."""
        return self.backend.drain_stages()

    def close(self) -> None:
        """End the workers and give their resources back; a role's view ends them when the last view is closed."""
        self._close()

    kill = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _view(self, prefix: str, cls: type) -> "WorkerGroup":
        view = WorkerGroup(self.backend, cls, role=prefix, target=prefix)

        def close() -> None:
            self._views.pop(prefix, None)
            if not self._views:
                self.close()

        view._close = close
        return view

    def _call(self, name: str, registration: dispatch.Registration, /, *args: object, **kwargs: Any) -> object:
        mode = registration["dispatch_mode"]
        if registration["execute_mode"] is dispatch.Execute.RANK_ZERO or mode == dispatch.Dispatch.RANK_ZERO:
            future = self.execute_rank_async(0, name, *args, **kwargs)
            return self._results(future.pending)[0] if registration["blocking"] else future
        pending = self._start(name, dispatch.split_call(mode, self, args, kwargs))
        if not registration["blocking"]:
            return self._future(mode, pending)
        return self._results(pending, partial(self._collected, mode))

    def _future(self, mode: dispatch.DispatchMode, pending: Sequence[Pending]) -> object:
        """A `DataProtoFuture` over the ranks that hold the rows, or a plain future for other results."""
        if mode.parts_fn is None:
            return Future(pending, partial(self._collected, mode))
        from rlsys.protocol import DataProto, DataProtoFuture

        return DataProtoFuture(DataProto.concat, [of_rank(pending[rank], pending) for rank in mode.parts_fn(self)])

    def _collected(self, mode: dispatch.DispatchMode, pending: Sequence[Pending]) -> object:
        """The call's result; of ranks that only repeat another's rows, nothing is fetched."""
        if mode.parts_fn is None:
            return mode.collect_fn(self, [self.backend.value(call) for call in pending])
        return dispatch.join([self.backend.value(pending[rank]) for rank in mode.parts_fn(self)])

    def _start(self, method: str, split: dispatch.SplitArguments) -> list[Pending]:
        names = tuple(split.kwargs)
        calls = []
        for rank in self.backend.present:
            num_padding = split.num_padding[rank] if split.num_padding else 0
            values = tuple(value[rank] for value in (*split.args, *split.kwargs.values()))
            calls.append((rank, CallSpec(method, self.role, self._target, names, num_padding), _resolved(values)))
        return self.backend.submit(calls)

    def _results(self, pending: Sequence[Pending], collect: Callable[[Sequence[Pending]], object] | None = None) -> Any:
        busy = {call.rank for call in pending}
        finish(pending, idle=[rank for rank in self.backend.present if rank not in busy])
        return [self.backend.value(call) for call in pending] if collect is None else collect(pending)


def _resolved(values: Sequence[object]) -> tuple[object, ...]:
    return tuple(value.get() if is_future(value) else value for value in values)
