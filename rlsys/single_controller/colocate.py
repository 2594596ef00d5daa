"""Several roles in one process: one worker that holds a worker of each role."""

from collections.abc import Mapping
from typing import ClassVar

from rlsys.single_controller.worker import Worker
from rlsys.single_controller.worker_group import ClassWithInitArgs


class ColocatedWorker(Worker):
    """Builds a worker of each of its `roles`, in their order; they share the rank and its process."""

    roles: ClassVar[Mapping[str, type]] = {}

    def __init__(self, class_dict: Mapping[str, ClassWithInitArgs]) -> None:
        self.workers = {name: entry.cls(*entry.args, **entry.kwargs) for name, entry in class_dict.items()}

    def close(self) -> None:
        for worker in reversed(self.workers.values()):
            if isinstance(worker, Worker):
                worker.close()


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> ClassWithInitArgs:
    """One class with init args for several roles; `group.spawn(class_dict)` gives a group for each."""
    if not class_dict:
        raise ValueError("create_colocated_worker_cls needs at least one role")
    roles = {name: entry.cls for name, entry in class_dict.items()}
    cls = type("Colocated_" + "_".join(class_dict), (ColocatedWorker,), {"roles": roles, "__module__": __name__})
    return type(next(iter(class_dict.values())))(cls, dict(class_dict))
