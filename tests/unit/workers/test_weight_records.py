"""What the controller sends a receiver in SGLang's scheduler process arrives as it was sent."""

from typing import Any

import numpy as np
import pytest
import torch
from msgspec import Struct

from rlsys.ipc.codec import decode, encode
from rlsys.ipc.process_group import Rendezvous
from rlsys.types import Box, Shard, WeightLayout
from rlsys.weights.executors.cuda_ipc import IpcHandle, IpcImportSpec, StorageHandle
from rlsys.weights.executors.disk import DiskSpec
from rlsys.weights.executors.gather import Bucket, GatherSpec
from rlsys.weights.executors.nccl import NcclSendSpec, NcclSpec
from rlsys.weights.plan import make_plan
from rlsys.weights.rank_plan import split_plan
from rlsys.weights.shared_memory import TensorHandle
from rlsys.weights.verify import layout_checksums
from workers import sglang  # noqa: F401  # pyrefly: ignore

SHARD = Shard(Box("w", (0, 0), (4, 3)), "w", (0, 0))
LAYOUT = WeightLayout(0, "here", (SHARD,), {"w": (4, 3)}, {"w": "float32"})
PLAN = split_plan(make_plan([LAYOUT], [LAYOUT]), [LAYOUT]).destination(0)
CUDA = StorageHandle(512, cuda_handle=(0, b"\0h", 512, 0, b"r", 0, b"e", True), exporter="x", address=7)
HANDLE = IpcHandle((CUDA, StorageHandle(48, path="/proc/1/fd/2")), {"w": TensorHandle(1, "int8", (4,), (1,), 0)})
PACKED = {"w": TensorHandle(0, "float32", (4, 3), (3, 1), 16)}
RENDEZVOUS = Rendezvous("127.0.0.1:1", "token", 1, 2, 5.0, "")
RECORDS = [
    LAYOUT,
    IpcImportSpec(PLAN, {0: HANDLE}),
    IpcImportSpec(PLAN, {}, ((), PLAN.copies)),
    NcclSpec(PLAN, (((0, PLAN.copies),),)),
    NcclSendSpec(PLAN, (((1, PLAN.copies),),)),
    RENDEZVOUS,
    DiskSpec("/tmp", b"{}", 112, PACKED, {"w": "w"}, writes=PLAN.copies),
    GatherSpec({"w": "float32"}, {"w": "w"}, 1 << 20),
    Bucket("/proc/1/fd/2", 112, PACKED, (1 << 63,)),
    layout_checksums(LAYOUT, {"w": torch.zeros(4, 3)}),
    {0: HANDLE},
]


class Sent(Struct, tag="sent"):
    value: Any


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_arrives_as_it_was_sent(record: Any) -> None:
    body, buffers = encode(Sent(record))
    assert decode(body, buffers, Sent).value == record


def test_checksums_arrive_as_they_were_sent() -> None:
    body, buffers = encode(Sent(np.array([1, (1 << 64) - 1], np.uint64)))
    assert decode(body, buffers, Sent).value.tolist() == [1, (1 << 64) - 1]
