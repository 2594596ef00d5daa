"""Where the ranks of an SGLang replica meet."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from workers.sglang import replica_of


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("master", "ranks_per_host", "host"), [("127.0.0.1", 1, "127.0.0.1"), ("::1", 1, "[::1]"), ("::1", 2, "127.0.0.1")]
)
def test_ranks_on_several_hosts_meet_at_an_address_not_a_name(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, master: str, ranks_per_host: int, host: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", master)
    monkeypatch.setattr("socket.gethostname", lambda: "no-such-host.invalid")
    replica = replica_of(0, 2, ranks_per_host=ranks_per_host)
    assert replica.address.rpartition(":")[0] == host
