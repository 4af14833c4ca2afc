"""One contract for every communicator: in process, a process per worker, and several workers in a process."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import prsgd
from prsgd.comm.joining import current
from prsgd.comm.torch_distributed import SWAPPED_BYTES
from tests.ranks import run_ranks, try_ranks


def row(worker: int, *shape: int) -> Tensor:
    return torch.arange(4.0).repeat(*shape, 1) + 10 * worker


def use(comm: prsgd.Communicator) -> dict[str, Any]:
    """Every call once, with results by hosted worker."""
    hosted, n = comm.workers, comm.num_workers
    total = torch.stack([row(w) for w in hosted]).sum(0).reshape(-1)
    reduced = comm.all_reduce(total)
    gathered = comm.all_gather(torch.stack([row(w, 2) for w in hosted]))
    flat = torch.full((3,), float(hosted.start))
    cast = comm.broadcast(flat, worker=n - 1)
    send = {(w, (w + 1) % n): row(w).reshape(-1) for w in hosted}
    receive = {((w - 1) % n, w): torch.empty(4) for w in hosted}
    exchanged = comm.exchange(send, receive)
    exchanged.wait(30)
    lines = torch.stack([row(w, 6) for w in hosted]) + torch.arange(6.0)[:, None]
    combined = torch.zeros(6, 2)

    def combine(lines: Tensor, numbers: Tensor, owners: range) -> Tensor:
        assert owners == hosted
        return (lines * numbers[:, :, None]).sum(dim=0)[:, :2] + 1000  # of each line, weighed

    weights = torch.tensor([[float(w)] for w in hosted])
    combination = comm.all_combine(lines, weights, combine, out=combined)
    result = {
        "workers": list(hosted),
        "all_reduce": reduced.wait(30),
        "all_gather": gathered.wait(30),
        "broadcast": cast.wait(30),
        "all_combine": (combination.wait(30), combined),
        "exchange": [receive[((w - 1) % n, w)] for w in hosted],
        "bytes": [
            (reduced.bytes_sent, reduced.server_bytes_sent),
            gathered.bytes_sent,
            exchanged.bytes_sent,
            (combination.bytes_sent, combination.hops),
        ],
        "in_place": reduced.wait() is total and reduced.flight_seconds() >= 0,
    }
    comm.close()
    return result


def rank_use(rank: int, num_workers: int, shape: str) -> dict[str, Any]:
    return use(prsgd.TorchDistributed(num_workers=num_workers, shape=shape))


@pytest.mark.parametrize("shape", ["all-reduce", "parameter-server"])
@pytest.mark.parametrize(("num_workers", "processes"), [(4, 1), (4, 4), (4, 2), (5, 2), (3, 2)])
def test_contract(num_workers: int, processes: int, shape: str) -> None:
    if processes == 1:
        found = [use(prsgd.InProcess(num_workers, shape=shape))]
    else:
        found = run_ranks(rank_use, processes, num_workers, shape)
    assert [w for f in found for w in f["workers"]] == list(range(num_workers))
    everyone = torch.stack([row(w, 2) for w in range(num_workers)])
    for f in found:
        assert torch.equal(f["all_reduce"], everyone[:, 0].sum(0))
        assert torch.equal(f["all_gather"], everyone)
        assert f["in_place"]
        weights, combined = f["all_combine"]
        assert weights.tolist() == [[float(w)] for w in range(num_workers)]
        lines = [[sum(w * (10.0 * w + x + k) for w in range(num_workers)) + 1000 for x in range(2)] for k in range(6)]
        assert combined.tolist() == lines
        last_host = next(g for g in found if num_workers - 1 in g["workers"])
        assert f["broadcast"].tolist() == [float(last_host["workers"][0])] * 3
        for worker, got in zip(f["workers"], f["exchange"]):
            assert torch.equal(got, row((worker - 1) % num_workers).reshape(-1))
        ring = (round(2 * (num_workers - 1) / num_workers * 16), 0)
        summed = ring if shape == "all-reduce" else (16, 16 * (num_workers - 1))
        sent = round((num_workers - 1) * ((6 * 16 + 6 * 8) / num_workers + 4))
        assert f["bytes"] == [summed, 32 * (num_workers - 1), 16, (sent, 2)]


def rank_sum(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Sums of several sizes and dtypes, all under way at once, each beside what this rank brought."""
    comm, generator = prsgd.TorchDistributed(), torch.Generator().manual_seed(rank)
    sizes = [1, 5, 5, SWAPPED_BYTES // 8, SWAPPED_BYTES // 8 + 1, 5]
    brought = [torch.randn(size, dtype=torch.float64, generator=generator) for size in sizes]
    brought += [torch.randn(7, generator=generator), torch.arange(3) + rank]
    works = [comm.all_reduce(flat.clone()) for flat in brought]
    found = [(work.wait(30), flat) for work, flat in zip(works, brought)]
    comm.close()
    return found


def test_two_processes_sum_alike_by_a_swap_and_by_a_ring() -> None:
    for (first, a), (second, b) in zip(*run_ranks(rank_sum, 2)):
        assert torch.equal(first, a + b)
        assert torch.equal(second, a + b)


def rank_sum_of_any(rank: int, shape: str) -> list[list[float]]:
    comm = prsgd.TorchDistributed(shape=shape)
    with torch.inference_mode():
        evaluated = comm.all_reduce(torch.arange(3.0) + rank).wait(30)
    turned = comm.all_reduce((torch.arange(6.0).view(3, 2) + rank).t()).wait(30) if shape == "all-reduce" else evaluated
    return [evaluated.tolist(), turned.flatten().tolist()]


@pytest.mark.parametrize("shape", ["all-reduce", "parameter-server"])
def test_a_sum_in_inference_mode_and_of_a_transposed_tensor(shape: str) -> None:
    for evaluated, turned in run_ranks(rank_sum_of_any, 2, shape):
        assert evaluated == [1, 3, 5]
        assert turned == ([1, 5, 9, 3, 7, 11] if shape == "all-reduce" else [1, 3, 5])


def test_shape() -> None:
    with pytest.raises(ValueError, match="shape must be one of 'all-reduce', 'parameter-server', got 'ring'"):
        prsgd.InProcess(2, shape="ring")


def rank_subgroup(rank: int) -> Any:
    group = dist.new_group([1, 2])
    if rank not in (1, 2):
        with pytest.raises(ValueError, match=r"group must contain this process, rank 0 is not in \[1, 2\]"):
            prsgd.TorchDistributed(group)
        dist.barrier()
        return None
    comm = prsgd.TorchDistributed(group)
    result = comm.workers, comm.all_reduce(torch.full((2,), float(rank))).wait(30).tolist()
    dist.barrier()
    return result


def test_a_subgroup() -> None:
    assert run_ranks(rank_subgroup, 3) == [None, (range(1), [3.0, 3.0]), (range(1, 2), [3.0, 3.0])]


def rank_too_many(rank: int) -> None:
    prsgd.Fleet(torch.nn.Linear(1, 1), 1)


def test_more_processes_than_workers() -> None:
    for outcome in try_ranks(rank_too_many, 2):
        assert outcome == (
            "error",
            "ValueError: num_workers must be at least the number of processes, got 1 workers for 2 processes",
        )


def rank_after_close(rank: int) -> str:
    comm = current()
    comm.all_reduce(torch.zeros(1)).wait()
    comm.close()
    with pytest.raises(prsgd.UsageError, match="the communicator was closed"):
        comm.all_reduce(torch.zeros(1))
    other = torch.ones(1)
    dist.all_reduce(other)  # the user's group is untouched
    return f"{comm}: {other.item():g}"


def test_closing_leaves_the_users_group() -> None:
    assert run_ranks(rank_after_close, 2) == ["process 0 of 2: 2", "process 1 of 2: 2"]


def listening() -> list[str]:
    """The addresses on which this process listens, from /proc."""
    sockets = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = str(fd.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            sockets.add(target[8:-1])
    found = []
    for table, unpack in (("tcp", _ipv4), ("tcp6", _ipv6)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.append(unpack(fields[1].split(":")[0]))
    return sorted(found)


def _ipv4(text: str) -> str:
    return socket.inet_ntop(socket.AF_INET, bytes.fromhex(text)[::-1])


def _ipv6(text: str) -> str:
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, 32, 8)]
    return socket.inet_ntop(socket.AF_INET6, b"".join(words))


def rank_listens(rank: int) -> list[str]:
    comm = current()
    comm.all_reduce(torch.zeros(1)).wait()
    found = listening()
    comm.all_reduce(torch.zeros(1)).wait()
    return found


def test_nothing_of_ours_listens_beyond_loopback() -> None:
    for rank, found in enumerate(run_ranks(rank_listens, 2)):
        assert all(address in ("127.0.0.1", "::1", "::ffff:127.0.0.1") for address in found), (rank, found)
        assert rank > 0 or found  # the store, at least: the test sees what listens


def test_the_listening_test_can_fail() -> None:
    with socket.socket() as everywhere:
        everywhere.bind(("0.0.0.0", 0))
        everywhere.listen()
        assert "0.0.0.0" in listening()
