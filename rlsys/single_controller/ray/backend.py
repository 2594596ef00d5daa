"""The actors behind a group: their start, their calls, their end."""

import faulthandler
import gc
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import ray
from ray import exceptions as ray_exceptions
from ray._private.state import state as ray_state
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlsys.single_controller import diagnosis
from rlsys.single_controller.calls import Backend, Deadlines, Failure, Header, Pending, RankCall, deadline_for, finish
from rlsys.single_controller.diagnosis import ProcessInfo
from rlsys.single_controller.host import WorkerHost
from rlsys.single_controller.ray.cluster import NAMESPACE, import_options, on_its_node
from rlsys.single_controller.ray.pool import RayResourcePool
from rlsys.single_controller.worker import RANK_VARIABLES, free_port, rank_environment
from rlsys.single_controller.worker_group import ClassWithInitArgs
from rlsys.telemetry.log import setup_logging
from rlsys.utils.errors import FailedWorker, WorkerError
from rlsys.utils.hosts import interface_of
from rlsys.utils.plugins import search_last_beside_namesakes
from rlsys.utils.polling import poll_until

START = "start"
NODE_S = 20.0
"""Ray's time to notice that a node is gone."""
MAX_LOGGED = 16
"""Workers of a group whose processes and logs are named at the start."""
_log = logging.getLogger(__name__)


class RayBackend(Backend):
    """The actors of a group: their start in parallel, their calls, their end."""

    def __init__(
        self, cls_with_init: ClassWithInitArgs, role: str, deadlines: Deadlines, worker_env: Mapping[str, str]
    ) -> None:
        super().__init__(0, deadlines)
        if taken := sorted({*RANK_VARIABLES} & {*worker_env}):
            raise ValueError(f"worker_env sets {', '.join(taken)}, which every rank gets from its group; remove them")
        self._cls_with_init, self._role = cls_with_init, role
        threads = {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
        self._worker_env = {**threads, **worker_env}
        self.names: list[str] = []
        self._actors: list[Any] = []
        self._places: dict[int, ProcessInfo] = {}
        """Where each rank runs, as its process has reported."""
        self._environments: list[dict[str, str]] = []
        self._options: list[dict[str, Any]] = []
        self._pool: RayResourcePool | None = None

    @property
    def workers(self) -> list[object]:
        return list(self._actors)

    @property
    def present(self) -> list[int]:
        return [rank for rank, actor in enumerate(self._actors) if actor is not None]

    def start(self, pool: RayResourcePool, bin_pack: bool, name_prefix: str, detached: bool) -> None:
        """Make an actor on every slot, set its rank, build the workers; all ranks at once."""
        self.world_size = pool.world_size
        bundles = pool.acquire(bin_pack, deadline_for(self.deadlines, START))
        self._pool = pool
        try:
            common = {
                **pool.share(),
                "namespace": NAMESPACE,
                "lifetime": "detached" if detached else None,
                **import_options(),
                **getattr(self._cls_with_init, "options", {}),
            }
            self._options = [{**common, "scheduling_strategy": _in_bundle(bundle)} for bundle in bundles]
            self.names = [f"{name_prefix}{rank}" for rank in range(self.world_size)]
            self._actors = [None if bundle is None else self._actor(rank) for rank, bundle in enumerate(bundles)]
            _log.info("starting workers of %s: %d processes", self._role, len(self.present))
            self._locate(self.present)
            for rank, info in sorted(self._places.items())[:MAX_LOGGED]:
                _log.info("%s %d: pid %d on %s, log %s", self._role, rank, info.pid, info.host, " ".join(info.logs))
            self._environments = self._rank_environments()
            self._build(self.present)
        except BaseException:
            self.close()
            raise

    def attach(self, handles: Sequence[object], names: Sequence[str]) -> None:
        """Speak to actors that run already."""
        self.world_size, self._actors, self.names = len(handles), list(handles), list(names)
        self._locate(range(self.world_size))

    def submit(self, calls: Sequence[RankCall]) -> list[Pending]:
        pending = []
        for (rank, spec, _), values in zip(calls, _values_once([values for _, _, values in calls])):
            refs = self._actors[rank].call.options(num_returns=2).remote(spec, *values)
            pending.append(Pending(self, spec.role, rank, spec.method, refs))
        return pending

    def header(self, call: Pending) -> Header:
        try:
            return ray.get(call.references[0])
        except ray_exceptions.RayActorError as error:
            wait_s = NODE_S if isinstance(error, ray_exceptions.ActorUnavailableError) else 0.0
            return Header(Failure(self._lost_node(call.rank, wait_s) or death_of(error), died=True))
        except ray_exceptions.RayError as error:
            return Header(Failure(str(error)))

    def value(self, call: Pending) -> Any:
        """The result; WorkerError when it was lost after the worker had answered, with its node."""
        try:
            return ray.get(call.references[1])
        except ray_exceptions.RayError as error:
            lost = f"its answer was lost: {error}"
            raise WorkerError(FailedWorker(call.role, call.rank, self.host(call.rank), call.stage, lost)) from error

    def wait_done(self, pending: Sequence[Pending], timeout_s: float) -> list[Pending]:
        by_ref = {call.references[0]: call for call in pending}
        refs = list(by_ref)
        first, _ = ray.wait(refs, num_returns=1, timeout=max(0.0, timeout_s))
        done = ray.wait(refs, num_returns=len(refs), timeout=0)[0] if first and len(refs) > 1 else first
        return [by_ref[ref] for ref in done]

    def probe(self, rank: int) -> Pending:
        return self._ask(rank, "probe", "describe")

    def host(self, rank: int) -> str:
        return self._places[rank].host if rank in self._places else "a host not known yet"

    def log_tail(self, rank: int) -> str:
        return self._ask_node(rank, diagnosis.log_tail)

    def diagnose(self, rank: int) -> str:
        return self._ask_node(rank, diagnosis.diagnose) or "it never reported where it runs"

    def vacate(self, rank: int) -> ray.ObjectRef[object]:
        """End a rank and ask for another place, where `restart` starts it; returns what `is_placed` waits for."""
        assert self._pool is not None
        self._end([rank])
        self._actors[rank] = None
        placed = self._pool.place_again(rank)
        self._options[rank]["scheduling_strategy"] = _in_bundle((placed, 0))
        return placed.ready()

    def is_placed(self, place: ray.ObjectRef[object], wait_s: float) -> bool:
        """Whether the cluster finds the place that `vacate` asked for within some seconds."""
        return bool(ray.wait([place], timeout=wait_s)[0])

    def kill(self, rank: int) -> None:
        """Kill the actor of a rank, if it has one, from any thread: a `restart` that waits for it fails."""
        if (actor := self._actors[rank]) is not None:
            ray.kill(actor, no_restart=True)

    def is_draining(self, rank: int) -> bool:
        """Whether the node of a rank is about to leave the cluster."""
        return self._places[rank].node_id in ray_state.get_draining_nodes()

    def restart(self, rank: int, deadline_s: float | None) -> None:
        self._end([rank])
        self.names[rank] = f"{self.names[rank].split('~')[0]}~{uuid4().hex[:4]}"
        self._actors[rank] = self._actor(rank)
        self._locate([rank], deadline_s)
        self._build([rank], deadline_s)

    def close(self) -> None:
        """Kill the actors with their children, then give the slots back; harmless when done twice."""
        if not ray.is_initialized():
            return
        self._end(range(len(self._actors)))
        self._actors = []
        if self._pool is not None:
            self._pool.release()
        self._pool = None

    def _actor(self, rank: int) -> Any:
        return host_class(self._cls_with_init.cls).options(name=self.names[rank], **self._options[rank]).remote()

    def _ask(self, rank: int, stage: str, method: str, *args: object) -> Pending:
        refs = getattr(self._actors[rank], method).options(num_returns=2).remote(*args)
        return Pending(self, self._role, rank, stage, refs)

    def _locate(self, ranks: Sequence[int], deadline_s: float | None = None) -> None:
        asked = [self._ask(rank, START, "describe") for rank in ranks]
        finish(asked, deadline_s=deadline_s)
        self._places |= {call.rank: self.value(call) for call in asked}

    def _rank_environments(self) -> list[dict[str, str]]:
        """The variables of every rank; local ranks count along the ranks of one node."""
        nodes = [self._places[rank].node_id if rank in self._places else "" for rank in range(self.world_size)]
        first = self._places[self.present[0]]
        return [
            rank_environment(
                rank=rank,
                world_size=self.world_size,
                local_rank=nodes[:rank].count(node),
                local_world_size=nodes.count(node),
                master=(first.address, first.port),
            )
            | self._worker_env
            for rank, node in enumerate(nodes)
        ]

    def _build(self, ranks: Sequence[int], deadline_s: float | None = None) -> None:
        cls_with_init = ray.put(self._cls_with_init)
        for rank in ranks:
            self._actors[rank].set_environment.remote(self._environments[rank])
        finish([self._ask(rank, START, "build", cls_with_init) for rank in ranks], deadline_s=deadline_s)

    def _lost_node(self, rank: int, wait_s: float) -> str:
        """What to report if the node of a rank is gone, which Ray may notice seconds after its processes are."""
        node = self._places[rank].node_id if rank in self._places else ""

        def is_lost() -> bool:
            return node not in {known["NodeID"] for known in ray.nodes() if known["Alive"]}

        if not node or not poll_until(is_lost, wait_s, every_s=0.5):
            return ""
        return f"the node {self.host(rank)} died or left the Ray cluster (node {node})"

    def _ask_node(self, rank: int, question: Callable[[ProcessInfo], str]) -> str:
        """Look at a worker from its own node; an empty answer if that fails."""
        place = self._places.get(rank)
        return on_its_node(question, place) or "" if place else ""

    def _end(self, ranks: Sequence[int]) -> None:
        """Kill actors and wait until their processes are gone."""
        actors = {rank: actor for rank in ranks if (actor := self._actors[rank]) is not None}
        for actor in actors.values():
            ray.kill(actor, no_restart=True)
        for rank in actors:
            if rank in self._places:
                on_its_node(_make_sure_gone, self._places[rank])


def _in_bundle(bundle: tuple[PlacementGroup, int] | None) -> PlacementGroupSchedulingStrategy | None:
    return None if bundle is None else PlacementGroupSchedulingStrategy(*bundle)


def _make_sure_gone(info: ProcessInfo) -> None:
    diagnosis.wait_gone(info, 0.2)
    diagnosis.kill_with_children(info)
    diagnosis.wait_gone(info, 5.0)


def _values_once(values: Sequence[tuple[object, ...]]) -> list[tuple[object, ...]]:
    """Values that several ranks get are put into the object store once and sent as references."""
    small = (str, bytes, int, float, bool, type(None))
    times = Counter(id(value) for of_rank in values for value in of_rank if not isinstance(value, small))
    shared = {id(value): value for of_rank in values for value in of_rank if times[id(value)] > 1}
    stored = {key: ray.put(value) for key, value in shared.items()}
    return [tuple(stored.get(id(value), value) for value in of_rank) for of_rank in values]


class RayHost(WorkerHost):
    """The actor around a worker."""

    def __init__(self) -> None:
        super().__init__()
        gc.disable()  # until the class of the worker and torch with it are imported, a fifth faster
        search_last_beside_namesakes()
        if name := interface_of(ray.util.get_node_ip_address()):  # gloo would take the address that the host's name has
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        faulthandler.register(diagnosis.STACK_SIGNAL, file=2, all_threads=True)  # writes the Python stacks to stderr

    def build(self, cls_with_init: ClassWithInitArgs) -> tuple[Header, None]:
        gc.freeze()  # else the first collections would run over all that was imported
        gc.enable()
        setup_logging(role=cls_with_init.cls.__name__, rank=int(os.environ.get("RANK", 0)))
        return super().build(cls_with_init)

    def describe(self) -> tuple[Header, ProcessInfo]:
        """Where this process runs."""
        address, node_id = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        return Header(), diagnosis.here(node_id, address, free_port(address))


def host_class(cls: type) -> Any:
    """An actor class named after the worker's, whose handles also have the worker's public methods."""

    def forward(name: str) -> Callable[..., object]:
        def call(host: RayHost, *args: object, **kwargs: object) -> object:
            return getattr(host.worker, name)(*args, **kwargs)

        return call

    public = [name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name))]
    methods = {name: forward(name) for name in public if not hasattr(RayHost, name)}
    return ray.remote(type(cls.__name__, (RayHost,), {**methods, "__module__": __name__}))


def death_of(error: ray_exceptions.RayActorError) -> str:
    """Ray's message of an actor's death without the advice that it always appends."""
    text = str(error)
    start = max(text.find("The actor is dead because"), 0)
    return "the worker process died: " + text[start:].split(" Some common causes")[0]
