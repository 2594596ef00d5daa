"""How one call on a group becomes one call on each rank, and how the answers become one again.

A mode is a pair of functions: `dispatch_fn(group, *args, **kwargs)` gives positional and keyword arguments in which
every value is a list with one entry per rank; `collect_fn(group, results)` takes one result per rank. Built-in modes
that return rows also say which ranks hold them, so that only those are fetched.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict, TypeVar

from rlsys.single_controller.rows import is_future, is_rows, join_rows, split_rows

if TYPE_CHECKING:
    from rlsys.single_controller.worker_group import WorkerGroup

MAGIC_ATTR = "__rlsys_registered__"
"""The attribute in which `register` leaves a method's `Registration`."""


@dataclass(frozen=True)
class MeshRank:
    """A rank's place on a mesh: whose rows it gets, and whether its results are the ones to collect."""

    dp_rank: int
    is_collect: bool


DispatchFn = Callable[..., Any]
CollectFn = Callable[["WorkerGroup", list[Any]], object]
PartsFn = Callable[["WorkerGroup"], Sequence[int]]
F = TypeVar("F", bound=Callable[..., object])


@dataclass
class DispatchMode:
    """How to spread a call and gather its results; `parts_fn` names the ranks whose rows, in order, are the result."""

    dispatch_fn: DispatchFn
    collect_fn: CollectFn
    parts_fn: PartsFn | None = None


class Execute(Enum):
    """Which ranks run a method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


class Registration(TypedDict):
    """What `register` says about a method."""

    dispatch_mode: DispatchMode
    execute_mode: Execute
    blocking: bool


@dataclass(frozen=True)
class SplitArguments:
    """Arguments for every rank. The last `num_padding[rank]` rows of a rank are repeated ones, cut off again later."""

    args: tuple[list[object], ...] = ()
    kwargs: dict[str, list[object]] = field(default_factory=dict)
    num_padding: tuple[int, ...] = ()


def register(
    dispatch_mode: DispatchMode | Mapping[str, Callable[..., Any]] | None = None,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[F], F]:
    """Make a worker's method callable on its whole group.

    With `blocking=False` the call returns a future (a `DataProtoFuture` where the mode returns rows). Futures among the
    arguments are resolved by the controller before the call; ValueError for `materialize_futures=False`.
    """
    if not materialize_futures:
        raise ValueError("materialize_futures=False: futures among the arguments are always resolved; leave it True")
    mode = Dispatch.ALL_TO_ALL if dispatch_mode is None else dispatch_mode
    if isinstance(mode, Mapping):
        if missing := {"dispatch_fn", "collect_fn"} - set(mode):
            raise ValueError(f"a dispatch mode given as a dict needs {' and '.join(sorted(missing))}")
        mode = DispatchMode(mode["dispatch_fn"], mode["collect_fn"], mode.get("parts_fn"))
    if not isinstance(mode, DispatchMode):
        raise ValueError(f"dispatch_mode is {mode!r}; it must be a member of Dispatch or a dict of two functions")
    if not isinstance(execute_mode, Execute):
        raise ValueError(f"execute_mode is {execute_mode!r}; it must be Execute.ALL or Execute.RANK_ZERO")

    def mark(method: F) -> F:
        setattr(method, MAGIC_ATTR, Registration(dispatch_mode=mode, execute_mode=execute_mode, blocking=blocking))
        return method

    return mark


def registered_methods(cls: type) -> dict[str, Registration]:
    """The methods of `cls` that carry @register, by name, in alphabetical order."""
    marks = {name: getattr(getattr(cls, name, None), MAGIC_ATTR, None) for name in dir(cls)}
    return {name: registration for name, registration in marks.items() if registration is not None}


def register_dispatch_mode(dispatch_mode_name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> DispatchMode:
    """Add a custom mode, afterwards available as `Dispatch.<NAME>`; ValueError if the name is taken."""
    if hasattr(Dispatch, dispatch_mode_name):
        raise ValueError(f"dispatch mode {dispatch_mode_name} already exists; use update_dispatch_mode to change it")
    mode = DispatchMode(dispatch_fn, collect_fn)
    setattr(Dispatch, dispatch_mode_name, mode)
    return mode


def update_dispatch_mode(dispatch_mode: DispatchMode, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> None:
    """Give an existing mode other functions."""
    dispatch_mode.dispatch_fn, dispatch_mode.collect_fn, dispatch_mode.parts_fn = dispatch_fn, collect_fn, None


def split_call(
    mode: DispatchMode, group: "WorkerGroup", args: Sequence[object], kwargs: Mapping[str, object]
) -> SplitArguments:
    """Run a mode's dispatch function and check that it gave one value per rank."""
    answer = mode.dispatch_fn(group, *args, **kwargs)
    split = answer if isinstance(answer, SplitArguments) else SplitArguments(tuple(answer[0]), dict(answer[1]))
    for values in (*split.args, *split.kwargs.values()):
        if len(values) != group.world_size:
            raise ValueError(f"the dispatch function gave {len(values)} values for {group.world_size} ranks")
    return split


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str, auto_padding: bool = False) -> dict[str, DispatchFn]:
    """A mode for ranks on a device mesh: rows are split by data-parallel rank and copied to its other ranks.

    The workers are asked once for what they registered with `_register_dispatch_collect_info(mesh_name, ...)`. Results
    come from the collecting ranks only, in data-parallel order. Rows that do not divide evenly are a ValueError unless
    `auto_padding` or the batch's own padding flag is set: a repeated row would count twice in a loss.
    """
    return {
        "dispatch_fn": partial(_dispatch_nd, mesh_name, auto_padding),
        "collect_fn": partial(_collect_nd, mesh_name),
        "parts_fn": partial(_nd_parts, mesh_name),
    }


def _dispatch_nd(mesh: str, pads: bool, group: "WorkerGroup", /, *args: object, **kwargs: object) -> SplitArguments:
    return _split_by_rows(group, [rank.dp_rank for rank in group.dispatch_info(mesh)], pads, args, kwargs)


def _nd_parts(mesh: str, group: "WorkerGroup", /) -> list[int]:
    ranks = group.dispatch_info(mesh)
    by_dp_rank = {info.dp_rank: rank for rank, info in enumerate(ranks) if info.is_collect}
    dp_size = max(info.dp_rank for info in ranks) + 1
    num_collecting = sum(info.is_collect for info in ranks)
    if sorted(by_dp_rank) != list(range(dp_size)) or num_collecting != dp_size:
        there = f"{num_collecting} collecting ranks cover the data-parallel ranks {sorted(by_dp_rank)}"
        wanted = f"exactly one rank of each of 0..{dp_size - 1} must have is_collect=True"
        raise ValueError(f"mesh '{mesh}' of {group.role}: {there}; {wanted}")
    return [by_dp_rank[dp_rank] for dp_rank in range(dp_size)]


def _collect_nd(mesh: str, group: "WorkerGroup", results: list[object], /) -> object:
    return join([results[rank] for rank in _nd_parts(mesh, group)])


def join(results: Sequence[object]) -> object:
    """Rows are concatenated (empty parts are left out), anything else stays a list."""
    parts = [result for result in results if is_rows(result)]
    return join_rows(parts) if parts and len(parts) == len(results) else list(results)


def dispatch_one_to_all(
    worker_group: "WorkerGroup", /, *args: object, **kwargs: object
) -> tuple[tuple[list[object], ...], dict[str, list[object]]]:
    """The same arguments for every rank."""
    n = worker_group.world_size
    return tuple([value] * n for value in args), {name: [value] * n for name, value in kwargs.items()}


def dispatch_all_to_all(group: "WorkerGroup", /, *args: object, **kwargs: object) -> SplitArguments:
    """Lists with an entry per rank are handed out, plain values go to all; ValueError for a mixture of the two."""
    values = [*args, *kwargs.values()]
    if not (lists := [value for value in values if isinstance(value, list)]):
        return SplitArguments(*dispatch_one_to_all(group, *args, **kwargs))
    if len(lists) < len(values) or any(len(value) != group.world_size for value in lists):
        why = f"arguments must be all lists of {group.world_size} (one entry per rank) or none a list"
        raise ValueError(f"{why}; register the method with Dispatch.ONE_TO_ALL to send a list to every rank")
    return SplitArguments(tuple(lists[: len(args)]), dict(zip(kwargs, lists[len(args) :])))


def dispatch_dp_compute(group: "WorkerGroup", /, *args: Any, **kwargs: Any) -> SplitArguments:
    """Arguments that are lists with one entry per rank; ValueError for others."""
    values = (*args, *kwargs.values())
    if not all(isinstance(value, (list, tuple)) and len(value) == group.world_size for value in values):
        raise ValueError(f"DP_COMPUTE needs every argument as a list of {group.world_size}, one entry per rank")
    return dispatch_all_to_all(group, *map(list, args), **{name: list(value) for name, value in kwargs.items()})


def _dp_compute_proto(pads: bool, group: "WorkerGroup", /, *args: object, **kwargs: object) -> SplitArguments:
    return _split_by_rows(group, range(group.world_size), pads, args, kwargs)


dispatch_dp_compute_data_proto = partial(_dp_compute_proto, True)
"""The rows in equal shares, the first ones repeated where they do not divide; other values go to all."""


def _proto_with_func(group: "WorkerGroup", func: object, /, *args: object, **kwargs: object) -> SplitArguments:
    if not callable(func):
        raise ValueError(f"DP_COMPUTE_PROTO_WITH_FUNC needs a function as first argument, got {type(func).__name__}")
    split = dispatch_dp_compute_data_proto(group, *args, **kwargs)
    return SplitArguments(([func] * group.world_size, *split.args), split.kwargs, split.num_padding)


def _split_by_rows(
    group: "WorkerGroup", dp_ranks: Sequence[int], pads: bool, args: Sequence[object], kwargs: Mapping[str, object]
) -> SplitArguments:
    """Give rank r the rows of dp_ranks[r]; values without rows go to all."""
    chunks = max(dp_ranks) + 1
    spread: dict[int | str, list[object]] = {}
    lengths: dict[int | str, int] = {}
    padding: tuple[int, ...] = ()
    for name, whole in {**dict(enumerate(args)), **kwargs}.items():
        if is_rows(value := whole.get() if is_future(whole) else whole):
            lengths[name] = len(value)
            wants_padding = hasattr(value, "is_padding_enabled") and value.is_padding_enabled()
            parts, num_padding = split_rows(value, chunks, pads=pads or wants_padding)
            padding = tuple(num_padding[dp_rank] for dp_rank in dp_ranks)
        else:
            parts = [value] * chunks
        spread[name] = [parts[dp_rank] for dp_rank in dp_ranks]
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{group.role}: the batches of one call have different numbers of rows: {lengths}")
    if not lengths:
        raise ValueError(f"{group.role}: a method that splits rows was called without a DataProto")
    return SplitArguments(tuple(spread[at] for at in range(len(args))), {key: spread[key] for key in kwargs}, padding)


def _forbidden(*_: object, **__: object) -> NoReturn:
    raise NotImplementedError("a DIRECT_ROLLOUT_METHOD is for the engine in its worker; the group cannot call it")


def _first(_: "WorkerGroup", results: list[object]) -> object:
    return results[0]


def collect_all_to_all(worker_group: "WorkerGroup", output: list[object]) -> list[object]:
    """The results of all ranks."""
    return list(output)


def collect_dp_compute_data_proto(worker_group: "WorkerGroup", output: list[object]) -> object:
    """The rows of all ranks as one batch; results that are not rows stay a list."""
    return join(output)


def _all_ranks(group: "WorkerGroup") -> Sequence[int]:
    return range(group.world_size)


class Dispatch:
    """The modes, to which `register_dispatch_mode` adds."""

    RANK_ZERO = DispatchMode(dispatch_one_to_all, _first)
    ONE_TO_ALL = DispatchMode(dispatch_one_to_all, collect_all_to_all)
    ALL_TO_ALL = DispatchMode(dispatch_all_to_all, collect_all_to_all)
    DP_COMPUTE = DispatchMode(dispatch_dp_compute, collect_all_to_all)
    DP_COMPUTE_PROTO = DispatchMode(dispatch_dp_compute_data_proto, collect_dp_compute_data_proto, _all_ranks)
    DP_COMPUTE_PROTO_WITH_FUNC = DispatchMode(_proto_with_func, collect_dp_compute_data_proto, _all_ranks)
    DP_COMPUTE_METRIC = DispatchMode(partial(_dp_compute_proto, False), collect_all_to_all)
    DIRECT_ROLLOUT_METHOD = DispatchMode(_forbidden, _forbidden)
