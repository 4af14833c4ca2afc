"""How a run's connections end: by an error while an average travels, by garbage collection, with the interpreter."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import prsgd
from prsgd.comm import connection, sockets
from tests.problems import batch, model, train_fleet, train_model
from tests.ranks import Program, free_port, run_ranks, script

SCRIPT = """
import sys
import time
from pathlib import Path

import torch
from torch import nn

import prsgd
from prsgd.comm import connection, sockets
from tests.problems import batch, model

shape, kind, folder = sys.argv[1:]
torch.set_num_threads(1)
rank = prsgd.init().workers.start
net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
averaging = prsgd.quantized(4, bucket=8, way="scatter") if shape == "scattered" else prsgd.mean()
comm = prsgd.TorchDistributed(shape="all-reduce" if shape == "scattered" else shape)
local = prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(4), averaging=averaging, overlap=1, comm=comm)


def train():
    for t in range(100):
        if t == 7 and rank == 0:  # the second average travels
            Path(folder, "raises").touch()
            raise KeyError("mine")
        if t == 6 and rank != 0:  # the others have not come to it
            while not Path(folder, "go" if kind == "late" else "raises").exists():
                time.sleep(0.01)
        x, y = batch(rank, t)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()


if kind == "started" and rank == 0:
    local.start()
    train()
else:
    with local:
        train()
"""


def environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """As torchrun would make it."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
    }


def interpreters(path: Path, num_ranks: int, *args: str, **more: str) -> list[subprocess.Popen[str]]:
    """A script of the user's own, as torchrun would start it."""
    port = free_port()
    root = Path(__file__).parent.parent
    common = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", **more}
    return [
        subprocess.Popen(
            [sys.executable, str(path), *args],
            env={**common, **environment(rank, num_ranks, port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]


def forked(path: Path, num_ranks: int, *args: str) -> list[Program]:
    """The same without new imports, which take more than all the rest."""
    port = free_port()
    return [
        Program(script, str(path), *args, cwd=path.parent, env=environment(rank, num_ranks, port), to_the_end=True)
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize(
    ("shape", "num_ranks", "kind", "start"),
    [
        ("all-reduce", 2, "late", interpreters),  # one of them all the way from a command line
        ("all-reduce", 3, "meanwhile", forked),
        ("all-reduce", 2, "started", forked),
        ("parameter-server", 3, "late", forked),
        ("parameter-server", 2, "meanwhile", forked),
        ("scattered", 3, "late", forked),
        ("scattered", 2, "meanwhile", forked),
        ("scattered", 3, "started", forked),
    ],
)
def test_a_rank_that_raises_with_an_average_in_flight(
    shape: str, num_ranks: int, kind: str, start: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """It ends with its own traceback, and does not wait for the others; they fail when they come to the average."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    ranks = start(path, num_ranks, shape, kind, str(tmp_path))
    with ExitStack() as ending:
        for rank in ranks:
            ending.enter_context(rank)
            ending.callback(rank.kill)
        _, said = ranks[0].communicate(timeout=120)
        assert said.splitlines()[-1].endswith("KeyError: 'mine'"), said
        assert ranks[0].poll() == 1
        (tmp_path / "go").touch()
        for rank in ranks[1:]:
            _, said = rank.communicate(timeout=120)
            assert "prsgd.errors.PeerError: round " in said.splitlines()[-1], said
            assert rank.poll() == 1


COMBINES = """
import time

import torch

import prsgd
from prsgd.comm import connection

torch.set_num_threads(1)
connection.ENDING_SECONDS = 0.05  # of what takes longer than that to add up
comm = prsgd.init()
began = []


def combine(lines, numbers, owners):
    began.append(time.monotonic())
    square = torch.rand(1200, 1200)
    while time.monotonic() < began[0] + 2:
        square = square @ square / 1200
    return lines.sum(dim=0)


work = comm.all_combine(torch.ones(1, 6, 4), torch.zeros(1, 1), combine, out=torch.zeros(6, 4))
while not began:
    time.sleep(0.001)
print("leaves")
"""


def test_the_interpreter_ends_while_something_is_added_up(tmp_path: Path) -> None:
    """A thread that comes back from torch into an interpreter that is gone aborts the process."""
    path = tmp_path / "script.py"
    path.write_text(COMBINES)
    with ExitStack() as ending:
        for rank in [ending.enter_context(program) for program in forked(path, 2)]:
            said, errors = rank.communicate(timeout=120)
            assert (said, rank.poll()) == ("leaves\n", 0), errors


ASKS = """
import fcntl
import os
import sys
import time

import torch.distributed as dist

from prsgd.comm.absence import Absence


class Lingers:
    def __del__(self):
        time.sleep(2)


store = dist.FileStore("store", 2)
held = open("store")
fcntl.flock(held, fcntl.LOCK_EX)
if os.fork() == 0:  # it holds the lock, without which the store does not answer
    time.sleep(0.5)
    os._exit(0)
held.close()
Absence(store, 0, 2).tell(1)
sys.lingers = Lingers()  # the interpreter takes longer than the store to end
print("leaves", flush=True)
"""


def test_the_interpreter_ends_while_the_store_is_told_of_a_wait(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(ASKS)
    with Program(script, str(path), cwd=tmp_path, to_the_end=True) as program:
        said, errors = program.communicate(timeout=60)
        assert (said, program.poll()) == ("leaves\n", 0), errors


TRAINS = """
import torch

import prsgd
from tests.problems import train_model

torch.set_num_threads(1)
comm = prsgd.init()
rank = comm.workers.start
row, local, _ = train_model(rank, 6, schedule=prsgd.every(4), overlap=1)
print(row.tolist())
if rank == 0:
    raise KeyError("mine")
"""


def test_torchs_debug_mode(tmp_path: Path) -> None:
    """It puts a wrapper around every group that torch makes."""
    path = tmp_path / "script.py"
    path.write_text(TRAINS)
    ranks = interpreters(path, 2, TORCH_DISTRIBUTED_DEBUG="DETAIL")  # torch looks for it when it is imported
    rows, _, _ = train_fleet([6, 6], schedule=prsgd.every(4), overlap=1)
    try:
        for rank, process in enumerate(ranks):
            said, errors = process.communicate(timeout=120)
            assert process.returncode == 1 - rank, errors
            found = torch.tensor(json.loads(said), dtype=torch.float64)
            torch.testing.assert_close(found, rows[rank], rtol=1e-12, atol=1e-14)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def rank_survives(rank: int, given: bool, shape: str, awaited: str) -> str:
    """Rank 0 fails while an average travels, and lives on; rank 1 comes to it when another one's failure is known."""
    group = dist.new_group([0, 1, 2]) if given else None
    comm = prsgd.TorchDistributed(group, shape=shape)
    store = dist.distributed_c10d._get_default_store()
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    said = "none"
    try:
        with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(4), overlap=1, comm=comm):
            for t in range(100):
                if t == 7 and rank == 0:
                    raise KeyError("mine")
                if t == 6 and rank == 1:
                    store.wait([awaited])
                x, y = batch(rank, t)
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
    except (KeyError, prsgd.PeerError) as error:
        said = f"{type(error).__name__}: {error}"
    store.set(f"rank {rank} failed", "")
    dist.barrier(group)  # the user's groups are as they were, and nobody has left
    return said


@pytest.mark.parametrize(
    ("given", "shape", "awaited"),
    [
        (False, "all-reduce", "rank 0 failed"),
        (False, "parameter-server", "rank 2 failed"),
        (True, "all-reduce", "rank 0 failed"),
        # In a ring rank 2 waits for what comes from rank 1, and only sees that its connection with rank 0 is gone.
        (False, "all-reduce", "rank 2 failed"),
    ],
)
def test_peers_fail_though_the_process_that_failed_lives_on(given: bool, shape: str, awaited: str) -> None:
    first, *others = run_ranks(rank_survives, 3, given, shape, awaited)
    assert first == "KeyError: 'mine'"
    for worker, said in enumerate(others, 1):
        assert said.startswith(f"PeerError: round 2, worker {worker}: a peer failed or left"), said


def held() -> tuple[int, int, int]:
    """Python's threads, all threads and open files of this process."""
    gc.collect()
    tasks, files = (len(list(Path("/proc/self", name).iterdir())) for name in ("task", "fd"))
    return threading.active_count(), tasks, files


def rank_again(rank: int, kind: str) -> list[tuple[int, int, int]]:
    counted = []
    for _ in range(10):
        if kind == "fleet":
            train_fleet([5, 5, 5, 5], schedule=prsgd.every(4), overlap=1)
        elif kind == "server":
            comm = prsgd.TorchDistributed(shape="parameter-server")
            train_model(rank, 5, schedule=prsgd.every(4), overlap=1, comm=comm)
            del comm
        elif kind == "scattered":
            averaging = prsgd.quantized(4, bucket=8, way="scatter")
            train_model(rank, 5, schedule=prsgd.every(4), overlap=1, averaging=averaging)
        elif kind == "never run":
            prsgd.TorchDistributed().all_reduce(torch.zeros(1)).wait()
        elif kind == "in flight":  # nobody waits for it, and rank 1 comes when rank 0 has left
            comm = prsgd.TorchDistributed()
            comm.all_reduce(torch.zeros(1)).wait()
            if rank == 0:
                comm.all_reduce(torch.zeros(1))
            del comm
        else:
            assert kind == "own"
            train_model(rank, 5, schedule=prsgd.every(4), overlap=1)
        dist.barrier()
        counted.append(held())
    dist.barrier()  # what rank 1 takes with it is not to be counted
    return counted


@pytest.mark.parametrize("kind", ["fleet", "server", "scattered", "never run", "in flight", "own"])
def test_a_communicator_that_nobody_has_gives_back_what_it_held(kind: str) -> None:
    for counted in run_ranks(rank_again, 2, kind):
        # The first one may have made what stays, and a thread may be about to end when it is counted.
        assert all(last <= second for last, second in zip(counted[-1], counted[1])), counted


def rank_shares(rank: int) -> list[float]:
    """A communicator that the user holds serves several runs, one after the other."""
    comm = prsgd.TorchDistributed(num_workers=4)
    found = []
    for _ in range(3):
        fleet = prsgd.Fleet(model(), 4, comm=comm)
        optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
        with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2)):
            optimizer.step()
        del fleet, optimizer
        gc.collect()
        found.append(comm.all_reduce(torch.full((1,), rank + 1.0)).wait().item())
    return found


def test_a_communicator_that_the_user_holds_stays_open() -> None:
    assert run_ranks(rank_shares, 2) == [[3.0] * 3] * 2


def rank_forks(rank: int) -> tuple[int, float]:
    """A data loader's process, say: it has a copy of the communicator, and lets go of it in every way there is."""
    comm = prsgd.TorchDistributed()
    comm.all_reduce(torch.zeros(1)).wait()
    under_way = comm.all_reduce(torch.full((1,), rank + 1.0)) if rank == 0 else None
    child = os.fork()
    if child == 0:
        del under_way, comm
        gc.collect()
        connection._end_all()
        os._exit(5)
    _, status = os.waitpid(child, 0)
    if under_way is None:
        under_way = comm.all_reduce(torch.full((1,), rank + 1.0))
    return os.waitstatus_to_exitcode(status), under_way.wait().item()


def test_a_fork_leaves_its_parents_connections_alone() -> None:
    assert run_ranks(rank_forks, 2) == [(5, 3.0), (5, 3.0)]


def rank_collected_elsewhere(rank: int) -> list[tuple[int, int, int]]:
    counted = []
    for number in (0, 3):
        for _ in range(number):
            comms = [prsgd.TorchDistributed()]
            comms[0].all_reduce(torch.zeros(1)).wait()
            thread = threading.Thread(target=comms.clear)
            thread.start()
            thread.join()
        last = prsgd.TorchDistributed()
        last.all_reduce(torch.zeros(1)).wait()
        last.close()
        dist.barrier()
        counted.append(held())
        dist.barrier()
    return counted


def test_what_another_thread_lets_go_of_is_closed_at_the_next_occasion() -> None:
    for before, after in run_ranks(rank_collected_elsewhere, 2):
        assert before == after


def pair() -> tuple[socket.socket, socket.socket, socket.socket]:
    """A listener, and the two ends of a connection to it."""
    listener = socket.create_server(("127.0.0.1", 0))
    there = socket.create_connection(listener.getsockname())
    here, _ = listener.accept()
    for end in (here, there):
        end.settimeout(20)
    return listener, here, there


def test_only_the_given_endpoints_connections_are_shut() -> None:
    before = sockets.listening()
    listener, here, there = pair()
    endpoints = sockets.listening() - before
    assert len(endpoints) == 1
    other = pair()
    try:
        sockets.shut(endpoints)
        assert (here.recv(1), there.recv(1)) == (b"", b"")
        other[1].sendall(b"a")
        other[2].sendall(b"b")
        assert (other[2].recv(1), other[1].recv(1)) == (b"a", b"b")
        with socket.create_connection(listener.getsockname(), 20) as again:  # it still listens
            again.sendall(b"c")
    finally:
        for end in (listener, here, there, *other):
            end.close()


def rank_given_stays(rank: int) -> float:
    group = dist.new_group([0, 1])
    prsgd.TorchDistributed(group).all_reduce(torch.zeros(1)).wait()
    gc.collect()
    number = torch.full((1,), rank + 1.0)
    dist.all_reduce(number, group=group)
    return number.item()


def test_a_group_of_the_users_own_outlives_the_communicator() -> None:
    assert run_ranks(rank_given_stays, 2) == [3.0, 3.0]
