"""A process group of weights whose peer is killed in the middle of a message: the other rank continues."""

import time
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest
import torch

from rlsys.engines.mesh import ensure_process_group
from rlsys.ipc.process_group import LOOPBACK, PeerLostError, ProcessGroup, Rendezvous
from rlsys.single_controller.host import WorkerHost
from rlsys.utils.daemon_threads import in_daemon_thread
from tests.timing import scaled_s

TIMEOUT_S = 10.0
HEARTBEAT_S = 2
ON_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def member(device: str, rank: int, pipe: Connection) -> None:
    """Rank 0 sends to rank 1 once that is gone, and reports how that went and whether it computes afterwards."""
    WorkerHost().set_environment({"NCCL_HOSTID": f"host-{rank}", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": f"{HEARTBEAT_S}"})
    where = torch.device("cpu")
    if device == "cuda":
        where = torch.device(device, rank)
        torch.cuda.set_device(where)
        ensure_process_group(device)
    address = pipe.recv() if rank else ""
    group = ProcessGroup(Rendezvous(address, "token", rank, 2, scaled_s(TIMEOUT_S), LOOPBACK))
    if not rank:
        pipe.send(group.address)
    group.join(where)
    message = torch.ones(4, device=where)
    group.exchange(where, **{"receives" if rank else "sends": [(1 - rank, message)]})
    pipe.send(float(message.sum()))
    pipe.recv()
    error_text = ""
    try:
        with group.guarded("a message"):
            group.exchange(where, sends=[(1, torch.zeros(1 << 26, device=where))])
    except PeerLostError as error:
        error_text = str(error)
    computed = float(torch.ones(4, device=where).sum())
    if device == "cuda":
        time.sleep(3 * HEARTBEAT_S)  # a group that was asked for a dump would end the process
    group.close()
    pipe.send((error_text, computed))


@pytest.mark.parametrize("master", ["127.0.0.1", "::1"])
def test_ranks_meet_where_the_name_of_their_host_is_not_known(monkeypatch: pytest.MonkeyPatch, master: str) -> None:
    """As among pods of Kubernetes, or hosts whose own name is 127.0.1.1 to them."""
    monkeypatch.setenv("MASTER_ADDR", master)
    monkeypatch.setattr("socket.gethostname", lambda: "no-such-host.invalid")
    first = ProcessGroup(Rendezvous("", "token", 0, 2, scaled_s(TIMEOUT_S), ""))
    assert first.address.rpartition(":")[0] == master
    second = ProcessGroup(Rendezvous(first.address, "token", 1, 2, scaled_s(TIMEOUT_S), ""))
    wait(joins := [in_daemon_thread(partial(one.join, torch.device("cpu")), name="join") for one in (first, second)])
    assert [join.result() for join in joins] == [None, None]
    first.close()
    second.close()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, ON_GPUS])])
def test_a_rank_outlives_a_peer_that_is_killed_in_a_message(device: str) -> None:
    context, pipes, ranks = get_context("spawn"), [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        pipes.append(ours)
        ranks.append(context.Process(target=member, args=(device, rank, theirs), daemon=True))
        ranks[-1].start()
        theirs.close()
    try:
        pipes[1].send(pipes[0].recv())
        assert [pipe.recv() for pipe in pipes] == [4.0, 4.0]
        ranks[1].kill()
        ranks[1].join()
        pipes[0].send("the peer is gone")
        started_s = time.monotonic()
        assert pipes[0].poll(scaled_s(6 * TIMEOUT_S)), "the rank still waits for its peer"
        error_text, computed = pipes[0].recv()
        print(f"{device}: {time.monotonic() - started_s:.1f} s, {error_text or 'no error'}")
        assert computed == 4.0
        assert device == "cuda" or error_text.startswith("weight transfer lost a peer (a message)")
        ranks[0].join(scaled_s(6 * TIMEOUT_S))
        assert ranks[0].exitcode == 0
    finally:
        for process in ranks:
            process.kill()


def test_a_rank_that_has_lost_a_peer_leaves_the_others_while_its_error_is_kept() -> None:
    cpu, message = torch.device("cpu"), torch.zeros(1 << 22)
    met = Rendezvous("", "token", 0, 3, scaled_s(TIMEOUT_S), LOOPBACK)
    groups = [ProcessGroup(met)]
    groups += [ProcessGroup(replace(met, address=groups[0].address, rank=rank)) for rank in (1, 2)]
    for joining in [in_daemon_thread(partial(group.join, cpu), name="join") for group in groups]:
        joining.result(scaled_s(TIMEOUT_S))
    sender, lost, receiver = groups
    lost.close()
    with pytest.raises(PeerLostError, match="closed by peer") as kept, sender.guarded("a message"):
        sender.exchange(cpu, sends=[(1, message), (2, message)])
    with pytest.raises(PeerLostError, match="closed by peer"), receiver.guarded("a message"):
        receiver.exchange(cpu, receives=[(0, message)])
    assert kept.tb is not None
