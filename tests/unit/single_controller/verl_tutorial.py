"""The workers of verl's tutorial, of whose file the processes import nothing heavy."""

from typing import Any

from rlsys.single_controller.base.decorator import Dispatch, Execute, collect_all_to_all, register

from rlsys.single_controller import Worker, WorkerGroup


class Counter(Worker):
    """Starts at its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.value = float(self.rank)

    def add(self, x: float) -> float:
        self.value += x
        return self.value

    @register(Dispatch.ONE_TO_ALL)
    def add_everywhere(self, x: float) -> float:
        return self.add(x)


def spread_two_values(worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """A custom dispatch function: of two values each second rank gets the same."""
    for values in (*args, *kwargs.values()):
        assert len(values) == 2
        values.extend(values[i % 2] for i in range(worker_group.world_size - 2))
    return args, kwargs


class Adder(Worker):
    def __init__(self, x: int) -> None:
        super().__init__()
        self._x = x

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def on_rank_zero(self, x: int, y: int) -> int:
        return self._x + y + x

    @register(dispatch_mode={"dispatch_fn": spread_two_values, "collect_fn": collect_all_to_all})
    def in_turns(self, x: int, y: int) -> int:
        return self._x + y + x
