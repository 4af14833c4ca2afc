"""``prsgd doctor`` and ``prsgd.doctor``: real ranks, set up rightly and not."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import prsgd
from prsgd.cli import main
from prsgd.comm.job import Job
from prsgd.comm.joining import store_of
from prsgd.preflight.finding import WIDTH, table
from prsgd.preflight.job import Meeting
from prsgd.preflight.machine import Network
from tests import ranks as programs
from tests.kept import Kept
from tests.ranks import Program, command, free_port

pytestmark = pytest.mark.xdist_group("doctor")  # whose ranks are started once
RUNS = "tests.doctor_runs"
NUMBERS: Any = torch.arange(40.0)
FINE = [("ok", "model"), ("ok", "versions")]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Kept]:
    with Kept(2) as kept:
        yield kept


@pytest.mark.parametrize("kind", ["sampler", "generator", "stream", "list", "single"])
def test_looking_changes_nothing_and_a_right_setup_is_fine(ranks: Kept, kind: str) -> None:
    (same, said), (other_same, silence) = ranks.run(f"{RUNS}:untouched", kind)
    assert same
    assert other_same
    assert [line.split()[:2] for line in said.splitlines()] == [
        ["ok", about] for about in ("model", "batches", "versions")
    ]
    assert silence == ""  # worker 0 speaks


@pytest.mark.parametrize(
    ("kind", "found", "said"),
    [
        ("ddp", [("warning", "model"), FINE[1]], "is in a DistributedDataParallel too"),
        ("ddp, quiet", FINE, "no DistributedDataParallel"),
        ("ddp, dropped", FINE, "no DistributedDataParallel"),
        ("sync", [("warning", "model"), FINE[1]], "SyncBatchNorm '1' waits for the other workers"),
        ("same", [FINE[0], ("warning", "batches"), FINE[1]], "all workers begin with the same ones"),
        ("scheduler", [FINE[0], ("ok", "batches"), ("note", "epochs"), FINE[1]], "with local.epoch():"),
    ],
)
def test_what_is_wrong_is_found(ranks: Kept, kind: str, found: list[tuple[str, str]], said: str) -> None:
    (first, text), (second, _) = ranks.run(f"{RUNS}:wrong", kind)
    assert first == second == found
    assert said in " ".join(text.split())
    assert all(len(line) <= WIDTH for line in text.splitlines())


def test_batchnorm_in_a_sharded_model(ranks: Kept) -> None:
    for found, text in ranks.run(f"{RUNS}:sharded"):
        assert found == [("warning", "model")]
        assert text == "" or "BatchNorm '1' goes by each process's own batch" in " ".join(text.split())


def test_other_versions_are_told_and_refused(ranks: Kept) -> None:
    (found, text, refusal), _ = ranks.run(f"{RUNS}:of_other_versions")
    own = prsgd.__version__
    assert found == [("ok", "model"), ("error", "versions")]
    assert f"prsgd is {own}.0 in rank 0; {own}.1 in rank 1" in text
    assert refusal.endswith(f"worker 1 has prsgd {own}.1, worker 0 has prsgd {own}.0")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("iterator", "ValueError: loader must be what a loop goes through, not an iterator"),
        ("empty", "ValueError: loader must have a batch, it is empty"),
        ("path", "ValueError: loader must be what a loop goes through, such as a DataLoader, got str"),
        ("number", "ValueError: loader must be what a loop goes through, such as a DataLoader, got int"),
    ],
)
def test_a_loader_that_cannot_be_read_ends_all(ranks: Kept, kind: str, said: str) -> None:
    first, second = ranks.run(f"{RUNS}:refused", kind)
    assert first.startswith(said)
    assert second == "PeerError: worker 0 could not read its loader, and says there why"


def test_looking_starts_no_processes_of_a_loader() -> None:
    """Which would keep their place, with persistent_workers."""
    loader: Any = DataLoader(NUMBERS, batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
    model = torch.nn.Linear(1, 1)
    local = prsgd.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule=prsgd.every(4))
    torch.manual_seed(1)
    assert [found.level for found in prsgd.doctor(local, loader)] == ["ok", "ok"]
    assert loader._iterator is None
    order = [batch.tolist() for batch in loader]
    torch.manual_seed(1)
    assert [batch.tolist() for batch in DataLoader(NUMBERS, batch_size=4, shuffle=True)] == order


def test_a_fleet_is_refused() -> None:
    fleet = prsgd.Fleet(torch.nn.Linear(1, 1), 2)
    local = prsgd.LocalSGD(fleet, torch.optim.SGD(fleet.parameters(), lr=0.1), schedule=prsgd.every(4))
    with pytest.raises(ValueError, match="local must be of a model of your own"):
        prsgd.doctor(local)
    with pytest.raises(ValueError, match=r"local must be a prsgd\.LocalSGD, got Fleet"):
        prsgd.doctor(fleet)  # type: ignore[arg-type]  # which is wrong


BOX = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "docker0": "172.17.0.1"}


@pytest.mark.parametrize(
    ("seen", "several", "level", "remedy"),
    [
        (Network("box", BOX, (), "10.0.0.5", "10.0.0.5"), True, "ok", ""),
        (Network("box", BOX, ("lo",), "10.0.0.5", "127.0.0.1"), False, "ok", ""),
        (Network("box", BOX, ("docker0",), "10.0.0.5", "10.0.0.5"), True, "ok", ""),  # as one who knows has asked
        (Network("box", BOX, (), "127.0.1.1", "10.0.0.5"), True, "error", "export GLOO_SOCKET_IFNAME=eth0"),
        (Network("box", BOX, (), None, "10.0.0.5"), True, "error", "export GLOO_SOCKET_IFNAME=eth0"),
        (Network("box", BOX, ("lo",), "10.0.0.5", "10.0.0.5"), True, "error", "export GLOO_SOCKET_IFNAME=eth0"),
        (Network("box", BOX, (), "127.0.1.1", None), True, "error", "export GLOO_SOCKET_IFNAME=NAME"),
        (Network("box", BOX, (), "172.17.0.1", "10.0.0.5"), True, "warning", "export GLOO_SOCKET_IFNAME=eth0"),
        (Network("box", BOX, (), "127.0.1.1", "10.0.0.5"), None, "note", "with several machines: export"),
        (Network("box", BOX, ("eth1",), "10.0.0.5", "10.0.0.5"), None, "error", "set it to one of: lo (127.0.0.1)"),
    ],
)  # fmt: skip
def test_networks(seen: Network, several: bool | None, level: str, remedy: str) -> None:
    found = seen.look(several_machines=several)
    assert found.level == level
    assert found.remedy.startswith(remedy)
    assert bool(found.remedy) == bool(remedy)
    assert all(len(line) <= WIDTH for line in table([found]).splitlines())


def job(tmp_path: Path, *, first: Callable[[], None] | None = None) -> list[tuple[int | None, str, str]]:
    """``prsgd doctor`` on two ranks, the second one after ``first``: exit codes and what they said."""
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                Program(command, "doctor", cwd=tmp_path, first=first if rank else None, env={**env, "RANK": str(rank)})
            )
            for rank in range(2)
        ]
        said = [program.communicate(120) for program in started]
        return [(program.process.exitcode, *texts) for program, texts in zip(started, said)]


def test_a_job_is_looked_at(tmp_path: Path) -> None:
    (code, out, err), (other_code, other_out, _) = job(tmp_path)
    assert (code, other_code, other_out) == (0, 0, ""), err
    assert [line.split()[:2] for line in out.splitlines() if line[0] != " "] == [
        ["ok", about] for about in ("job", "versions", "network", "link", "listening")
    ]
    assert "2 ranks on 1 machine" in out
    assert "gloo listens on lo (127.0.0.1)" in out
    places = re.findall(r"(\S+) port \d+", out)
    assert set(places) == {"127.0.0.1"}
    assert all(len(line) <= WIDTH for line in out.splitlines())


def be_older() -> None:
    prsgd.__version__ = "0.0.1"


def be_another_machine() -> None:
    import platform

    platform.node = lambda: "another"


def have_no_interface() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "eth99"


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (be_older, "prsgd is {own} in rank 0; 0.0.1 in rank 1 -> install one version everywhere"),
        (be_another_machine, "rank 1 on another: gloo listens on lo (127.0.0.1), as GLOO_SOCKET_IFNAME says:"),
        (have_no_interface, "GLOO_SOCKET_IFNAME names 'eth99', which is no interface with an address here"),
    ],
)
def test_what_is_wrong_with_a_job(first: Callable[[], None], said: str, tmp_path: Path) -> None:
    (code, out, _), (other_code, *_) = job(tmp_path, first=first)
    assert (code, other_code) == (1, 1)
    assert said.format(own=prsgd.__version__) in " ".join(out.split())


def hurry() -> None:
    from prsgd.preflight import job

    job.LIMIT_SECONDS = 2.0


def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with Program(command, "doctor", cwd=tmp_path, first=hurry, env=env) as program:
        _, err = program.communicate(60)
    assert program.process.exitcode == 1
    assert err.splitlines()[-1] == "prsgd doctor: error: rank 1, 2 did not come within 2 s", err


JOB = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("env", "code", "said"),
    [
        ({"RANK": "x"}, 2, "RANK must be a whole number >= 0, as torchrun sets it, got 'x'"),
        ({"WORLD_SIZE": "0"}, 2, "WORLD_SIZE must be a whole number >= 1, as torchrun sets it, got '0'"),
        ({"RANK": "-1"}, 2, "RANK must be a whole number >= 0, as torchrun sets it, got '-1'"),
        ({"MASTER_PORT": "http"}, 2, "MASTER_PORT must be a whole number >= 0, as torchrun sets it, got 'http'"),
        (
            {},
            1,
            "rank 0 cannot listen at port {port} (MASTER_PORT), where the others look for it: Address already in use",
        ),
    ],
)
def test_a_job_that_cannot_be_is_one_line(
    env: dict[str, str], code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in {**JOB, "MASTER_PORT": str(port), **env}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as stopped:
            main(["doctor"])
    assert stopped.value.code == code
    assert capsys.readouterr().err == f"prsgd doctor: error: {said.format(port=port)}\n"


def test_a_job_that_is_not_there_is_waited_for_as_long_as_is_said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("prsgd.preflight.job.LIMIT_SECONDS", 0.5)
    two = Job(1, 2, 1, "127.0.0.1", free_port(), on_one_machine=True, has_store=False)
    with pytest.raises(prsgd.PeerError, match=r"rank 1 of 2 found nobody at 127\.0\.0\.1"):
        Meeting(two)
    assert capfd.readouterr().err == ""  # torch's own words would be a hundred lines
    with pytest.raises(ValueError, match="RANK must be below WORLD_SIZE 2, got 2"):
        store_of(replace(two, rank=2), timeout=timedelta(seconds=1))


def test_alone(tmp_path: Path) -> None:
    done = programs.run_command("doctor", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"prsgd {prsgd.__version__}, torch {torch.__version__}, Python" in done.stdout
    assert "torchrun --nproc-per-node 2 -m prsgd doctor" in done.stdout
