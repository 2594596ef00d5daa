"""Workers for the tests that pass real batches."""

import socket
import time
from typing import Any

from rlsys.protocol import DataProto
from rlsys.single_controller.base import Worker
from rlsys.single_controller.dispatch import Dispatch, register


class DataWorker(Worker):
    """Adds to the column x."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, data: DataProto, amount: int) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"] + amount}, data.non_tensor_batch, data.meta_info)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def add_later(self, data: DataProto, amount: int) -> DataProto:
        return self.add(data, amount)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def keep_later(self, data: DataProto, num_rows: list[int]) -> DataProto:
        return data[: num_rows[self.rank]]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def count(self, data: DataProto) -> dict[str, Any]:
        return {"uids": list(data.non_tensor_batch["uid"])}

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def break_later(self, data: DataProto) -> DataProto:
        raise OSError("spilled")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def nap_later(self, data: DataProto, seconds: float) -> DataProto:
        time.sleep(seconds)
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def kind_of(self, value: Any) -> str:
        return type(value).__name__


class Joiner(Worker):
    """Joins the process group of its ranks."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def join_where_the_port_is_taken(self) -> None:
        address, port = self.get_master_addr_port()
        if self.rank == 0:
            self.taken = socket.create_server((address, int(port)))
        from rlsys.engines.mesh import ensure_process_group

        ensure_process_group("cpu")
