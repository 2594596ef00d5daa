"""Data sheets of GPUs: what the planner and the FLOPs utilisation know of a device by its name."""

from dataclasses import dataclass

from rlsys.utils.data_files import read_table


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


_SHEETS = read_table(__file__, "gpus.toml")
GPUS = {name: Gpu(**sheet) for name, sheet in _SHEETS.items() if len(sheet) > 1}
"""GPUs of servers, for which jobs are planned."""
OTHER_GPUS = "to plan for GPUs that are not here add --dry-run --gpu=H100"


def data_sheet_flops(device_name: str) -> float | None:
    """Dense half-precision FLOP/s of the GPU whose words are all in a device's marketing name, of several the one of
    most words; None for others."""
    words = set(device_name.upper().replace("-", " ").split())
    known = [name for name in _SHEETS if set(name.split()) <= words]
    return _SHEETS[max(known, key=len)]["flops"] if known else None
