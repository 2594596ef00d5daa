"""`ipc` over several hosts: every element crosses once to each host that lacks it, in bounded rounds."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlsys.models.megatron.family import family_of
from rlsys.models.megatron.parallel import ParallelSizes
from rlsys.types import WeightLayout
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.endpoints import WeightReceiver, WeightSender
from rlsys.weights.executors.relay import plan_relays
from rlsys.weights.layout import dtype_of, element_bytes, shard_view, view_of
from rlsys.weights.plan import make_plan
from rlsys.weights.sharding_manager import ShardingManager, choose
from scripts.weight_layouts import EngineSizes, engine_layouts, fsdp_layouts, local_shapes, megatron_layouts
from tests.timing import scaled_s
from tests.unit.models.megatron_families import tiny
from tests.unit.weights.test_executors import ThreadGroup

CONFIG = {**tiny.CONFIGS["qwen3-moe"], "num_hidden_layers": 2, "mlp_only_layers": [], "num_experts": 4}
SHAPES = family_of(CONFIG).hf_shapes(CONFIG)
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
UNTIED = {name: shape for name, shape in SHAPES.items() if name not in TIED}
BUCKET_BYTES = 4096


class Holder:
    """An engine of either side: a layout and its local tensors."""

    def __init__(self, layout: WeightLayout, host: str, device: str = "cpu") -> None:
        self.layout = replace(layout, host=host)
        dtypes = {shard.local: dtype_of(layout.dtypes[shard.box.tensor]) for shard in layout.shards}
        shapes = local_shapes(layout).items()
        self.tensors = {name: torch.zeros(shape, dtype=dtypes[name], device=device) for name, shape in shapes}
        self.version = -1

    def weight_layout(self) -> WeightLayout:
        return self.layout

    def local_tensors(self) -> Mapping[str, Tensor]:
        return self.tensors

    def begin_update(self) -> None:
        self.version = -1

    def finish_update(self, version: int) -> None:
        self.version = version

    def take(self, full: Mapping[str, Tensor]) -> None:
        """Hold these values, as after a step."""
        for shard in self.layout.shards:
            values = view_of(full[shard.box.tensor], shard.box.start, shard.box.shape)
            shard_view(self.tensors, shard).copy_(values)

    def holds(self, full: Mapping[str, Tensor], names: Mapping[str, str]) -> bool:
        return all(
            torch.equal(
                shard_view(self.tensors, shard).cpu(),
                view_of(full[names.get(shard.box.tensor, shard.box.tensor)], shard.box.start, shard.box.shape).to(
                    dtype_of(self.layout.dtypes[shard.box.tensor])
                ),
            )
            for shard in self.layout.shards
        )


def model(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16().float() for name, shape in SHAPES.items()}


def missing_bytes(
    trainers: Sequence[WeightLayout], engines: Sequence[WeightLayout], names: Mapping[str, str]
) -> dict[str, int]:
    """What each host must receive, counted element by element."""
    wanted, held = (defaultdict[str, dict[str, Tensor]](dict) for _ in range(2))
    for masks, layouts in ((wanted, engines), (held, trainers)):
        for layout in layouts:
            for shard in layout.shards:
                name = names.get(shard.box.tensor, shard.box.tensor)
                mask = masks[layout.host].setdefault(name, torch.zeros(SHAPES[name], dtype=torch.bool))
                view_of(mask, shard.box.start, shard.box.shape).fill_(True)
    width = element_bytes(engines[0].dtypes["model.norm.weight"])
    return {
        host: sum(
            width * int((mask & ~held[host].get(name, torch.zeros_like(mask))).sum())
            for name, mask in wanted[host].items()
        )
        for host in {layout.host for layout in trainers}
    }


def moe(tp: int, pp: int, ep: int) -> list[WeightLayout]:
    return megatron_layouts(CONFIG, ParallelSizes(tp=tp, pp=pp, ep=ep, etp=1), dtype="float32", ranks_per_host=99)


def engines_of(sizes: EngineSizes, dtype: str, *, tied: bool = False) -> list[WeightLayout]:
    return engine_layouts(SHAPES, sizes, num_kv_heads=4, dtype=dtype, tied=tied)


CASES = {
    "fsdp on 2 hosts to 2 copies of TP2": (
        (fsdp_layouts(SHAPES, 4), "aaab"),
        (engines_of(EngineSizes(tp_size=2, dp_size=2, vocab_multiple=8), "bfloat16"), "aabb"),
    ),
    "fsdp on 3 hosts to a copy for each rank": (
        (fsdp_layouts(SHAPES, 5, dtype="bfloat16"), "aabbc"),
        (engines_of(EngineSizes(dp_size=5, vocab_multiple=8), "bfloat16"), "aabbc"),
    ),
    "tied names": (
        (fsdp_layouts(UNTIED, 3, aliases=TIED), "aab"),
        (engines_of(EngineSizes(tp_size=2, vocab_multiple=8), "float32", tied=True), "ab"),
    ),
    "Megatron on 3 hosts to a TP4 over 2 of them": (
        (moe(2, 2, 2), "abcc"),
        (engines_of(EngineSizes(tp_size=4, ep_size=2, vocab_multiple=8), "bfloat16"), "aacc"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_element_crosses_once_to_each_host(case: str) -> None:
    trainers, engines = ([Holder(*pair) for pair in zip(*side, strict=True)] for side in CASES[case])
    names = TIED if case == "tied names" else {}
    sides = [end.layout for end in trainers], [end.layout for end in engines]
    assert choose(*sides) == "ipc"
    senders, receivers = ThreadGroup([*map(WeightSender, trainers)]), ThreadGroup([*map(WeightReceiver, engines)])
    manager = ShardingManager(senders, receivers, bucket_bytes=BUCKET_BYTES, deadline_s=scaled_s(30.0))
    manager.connect()
    checksums = []
    for version, seed in ((1, 0), (2, 1), (3, 0)):
        full = model(seed)
        for trainer in trainers:
            trainer.take(full)
        report = manager.push(version)
        assert all(engine.holds(full, names) and engine.version == version for engine in engines)
        assert report.network_bytes == missing_bytes(*sides, names)
        assert sum(report.network_bytes.values()) > 0
        checksums.append(report.checksum)
    assert checksums[0] == checksums[2] != checksums[1]
    assert all(check.equal for check in manager.validate())
    with pytest.raises(WeightTransferError, match="push again"):
        manager.restore(0)
    manager.close()


@pytest.mark.parametrize("case", CASES)
def test_rounds_bound_what_a_rank_stages_and_sends(case: str) -> None:
    sources, destinations = (
        [replace(layout, host=host, rank=rank) for rank, (layout, host) in enumerate(zip(*side, strict=True))]
        for side in CASES[case]
    )
    relays = plan_relays(make_plan(sources, destinations), sources, destinations, staging_bytes=BUCKET_BYTES)
    assert len(relays.rounds) > 1
    for messages in relays.rounds:
        for side in (0, 1):
            for rank in {link[side] for link in messages}:
                staged = sum(c.num_bytes for link, m in messages.items() if link[side] == rank for c in m)
                assert staged <= BUCKET_BYTES
    for source, receiver in {link for messages in relays.rounds for link in messages}:
        assert sources[source].host != sources[receiver].host


def test_a_host_without_trainer_ranks_is_served_by_nccl() -> None:
    trainers = [Holder(layout, "a") for layout in fsdp_layouts(SHAPES, 2)]
    engines = [Holder(layout, host) for layout, host in zip(engines_of(EngineSizes(dp_size=2), "float32"), "ab")]
    assert choose([end.layout for end in trainers], [end.layout for end in engines]) == "nccl"
    groups = ThreadGroup([*map(WeightSender, trainers)]), ThreadGroup([*map(WeightReceiver, engines)])
    with pytest.raises(WeightTransferError, match=r"trainer rank on every rollout host; there is none on \['b'\]"):
        ShardingManager(*groups, executor="ipc").connect()
