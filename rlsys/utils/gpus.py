"""Data sheets of GPUs: what the planner and the FLOPs utilisation know of a device by its name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Gpu:
    """Dense FLOP/s in bfloat16 and FP8, GiB, and bytes per second: of its memory, and per direction of the links to
    GPUs of its node and of its share of the network (one 400 Gbit/s adapter for each GPU, 200 for an A100)."""

    flops: float
    fp8_flops: float
    memory_gib: float
    memory_rate: float
    peer_rate: float
    network_rate: float = 50e9

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * (1 << 30))


GPUS = {
    "GB200": Gpu(2500e12, 5000e12, 185.0, 8.0e12, 900e9),
    "B200": Gpu(2250e12, 4500e12, 179.0, 7.7e12, 900e9),
    "H200": Gpu(989e12, 1979e12, 140.4, 4.8e12, 450e9),
    "H100": Gpu(989e12, 1979e12, 79.6, 3.35e12, 450e9),
    "H800": Gpu(989e12, 1979e12, 79.6, 3.35e12, 200e9),
    "H20": Gpu(148e12, 296e12, 95.6, 4.0e12, 450e9),
    "A100": Gpu(312e12, 312e12, 80.0, 2.04e12, 300e9, 25e9),
    "MI300X": Gpu(1307e12, 2615e12, 192.0, 5.3e12, 448e9),
}
"""GPUs of servers, by the makers' data sheets."""
OTHER_GPUS = "to plan for GPUs that are not here add --dry-run --gpu=H100"


def find_by_name(table: Mapping[str, T], device_name: str) -> T | None:
    """The entry whose words are all in a device's marketing name; the one of most words wins."""
    words = set(device_name.upper().replace("-", " ").split())
    known = [name for name in table if set(name.split()) <= words]
    return table[max(known, key=len)] if known else None
