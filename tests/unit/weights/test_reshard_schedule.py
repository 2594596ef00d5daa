"""The simulated schedule of a push, with times worked out by hand."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from rlsys.weights.batched_copy import TILE_BYTES, tile_tables
from rlsys.weights.plan import make_plan
from scripts.bench.reshard import layouts_of
from scripts.bench.reshard_schedule import Launches, PushSimulation, fair_rates, fit, launches_of
from scripts.weight_layouts import bytes_by_link
from tests.timing import scaled_s

ROOT = Path(__file__).resolve().parents[3]
TILE = 10
HUGE = 1e9


def push_s(*launches: Launches, local: float = HUGE, peer: float = 1.0, tiles_in_flight: int = 1) -> float:
    """Seconds at so many bytes per second."""
    return PushSimulation(launches, local=local, peer=peer, tiles_in_flight=tiles_in_flight).run()


def tiles_from(*gpus: int) -> Launches:
    """One launch of tiles from these GPUs."""
    return [[(gpu, TILE) for gpu in gpus]]


def test_a_copy_inside_a_gpu_takes_its_bytes_over_the_bandwidth() -> None:
    assert push_s(tiles_from(0, 0, 0), local=5.0) == pytest.approx(6.0)


def test_a_launch_waits_for_the_last_tile_of_the_one_before() -> None:
    # the first launch ends with the 20 bytes from GPU 1, at 1 byte/s; the 10 of the second take 2 s more
    launches = [[(1, 20), (0, 10)], [(0, 10)]]
    assert push_s(launches, [], local=5.0, tiles_in_flight=2) == pytest.approx(20.0 + 2.0)


def test_tiles_in_turns_overlap_the_link_with_the_memory() -> None:
    # one after another: 20 bytes at 5 byte/s, then 20 at 1 byte/s; in turns the link is never idle
    assert push_s(tiles_from(0, 0, 1, 1), [], local=5.0, tiles_in_flight=2) == pytest.approx(4.0 + 20.0)
    assert push_s(tiles_from(0, 1, 0, 1), [], local=5.0, tiles_in_flight=2) == pytest.approx(20.0)


@pytest.mark.slow
def test_the_bench_pushes_with_and_without_checksums_on_cpu() -> None:
    bench = [sys.executable, "scripts/bench/reshard.py", "--device", "cpu", "--cases", "tiny:TP2->TP2", "--no-peers"]
    done = subprocess.run(bench, cwd=ROOT, capture_output=True, text=True, check=False, timeout=scaled_s(120))
    assert (done.returncode, "with checksums" in done.stdout) == (0, True), done.stderr


def test_gpus_that_read_from_one_share_its_link() -> None:
    assert push_s([], tiles_from(0), tiles_from(0), tiles_from(0)) == pytest.approx(30.0)
    assert push_s(tiles_from(1), tiles_from(2), tiles_from(3), tiles_from(0)) == pytest.approx(10.0)


def test_four_stages_read_in_one_order_take_twice_as_long_as_with_shifted_starts() -> None:
    # GPU 0 has its own stage and reads stages 1 to 3 by 30 s, while the others share stage 0; GPU 1 the last two
    # by 50 s, while GPUs 2 and 3 share stage 1; GPUs 2 and 3 the stages of each other by 60 s.
    assert push_s(*[tiles_from(0, 1, 2, 3)] * 4) == pytest.approx(60.0)
    shifted = [tiles_from(*((gpu + at) % 4 for at in range(1, 5))) for gpu in range(4)]
    assert push_s(*shifted) == pytest.approx(30.0)


def test_rates_are_max_min_fair_among_tiles() -> None:
    # two flows on a link of 6 byte/s, of which the first shares one of 3 byte/s with two tiles of a third
    usage = np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    rates = fair_rates(np.array([1.0, 1.0, 2.0]), usage, np.array([6.0, 3.0]))
    assert rates == pytest.approx([1.0, 5.0, 1.0])


def test_the_fit_finds_the_efficiency_and_what_is_fixed() -> None:
    assert fit([1.0, 2.0, 5.0], [1.5, 2.75, 6.5]) == pytest.approx((0.8, 0.25))


@pytest.mark.parametrize("case", ["tiny:PP2->TP2", "tiny-moe:EP2->TP2"])
def test_the_bytes_of_all_launches_are_those_of_the_plan(case: str) -> None:
    sources, destinations = layouts_of(case, 2)
    plan = make_plan(sources, destinations)
    for by_gpu in launches_of(plan, sources, destinations, parts=(1, 4)):
        moved: Counter[tuple[int, int]] = Counter()
        for gpu, launches in enumerate(by_gpu):
            for source, num_bytes in (transfer for launch in launches for transfer in launch):
                moved[source, gpu] += num_bytes
        assert moved == bytes_by_link(plan)


def test_parts_of_the_memory_take_turns() -> None:
    tile_bytes = TILE_BYTES[0]
    memory = torch.empty(12 * tile_bytes, dtype=torch.uint8, device="meta")
    pairs = [(memory[: 6 * tile_bytes], memory[6 * tile_bytes :])]
    targets = {parts: [tile[1] // tile_bytes for tile in tile_tables(pairs, parts=parts)[8, False]] for parts in (1, 2)}
    assert targets == {1: [0, 1, 2, 3, 4, 5], 2: [0, 3, 1, 4, 2, 5]}
