"""``prsgd bench``: links that are made and removed, teams that fail, ratios worked by hand."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from prsgd import Fleet, InProcess, LocalSGD, every, tasks
from prsgd.bench import climb, links, race, told
from prsgd.bench.climb import Climb, Point
from prsgd.bench.contestants import CONTESTANTS, NONE, Ground
from prsgd.bench.links import Link, NoLinkError, made
from prsgd.bench.models import MODELS, work
from prsgd.bench.race import DropOutError, Lap, Race
from prsgd.bench.rank import PARTS, drained
from prsgd.comm.base import Then, Work
from tests.ranks import run_command as prsgd
from tests.ranks import run_ranks

NETNS = Path("/run/netns")


def namespaces(pid: int) -> set[str]:
    """Made by that process; other tests make theirs meanwhile."""
    return {place.name for place in NETNS.iterdir() if f"-{pid}-" in place.name} if NETNS.is_dir() else set()


def ours_left(pid: int) -> dict[int, str]:
    """Ranks and wires of that process that still run, by their numbers: what they were started with."""
    found = {}
    for place in Path("/proc").iterdir():
        try:
            words = (place / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            parent = (place / "stat").read_text().rsplit(")", 1)[1].split()[1]
        except (OSError, IndexError):
            continue
        if "prsgd.bench." in words and parent == str(pid):
            found[int(place.name)] = words
    return found


@pytest.fixture
def can_link() -> None:
    try:
        with made(Link.parse("100Mbit"), 2):
            pass
    except NoLinkError as problem:
        pytest.skip(str(problem))


# Links


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast", "a link must be a number with a unit such as 1Gbit"),
        ("0Gbit", "a link must be above 0"),
        ("1Gbit+soon", "a link's delay must be a time with a unit"),
        ("1Gbit+1h", "a link's delay must be from 0s to 10s"),
    ],
)
def test_links_that_nobody_can_read(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Link.parse(text)


def test_loopback_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with made(Link.parse("loopback"), 3) as places:
        assert [place.address for place in places] == ["127.0.0.1"] * 3


def test_a_link_needs_root_and_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(NoLinkError, match=r"1Gbit: tc is not there \(package iproute2\)"), made(Link.parse("1Gbit"), 2):
        pass
    monkeypatch.setattr(shutil, "which", str)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoLinkError, match="only root"), made(Link.parse("1Gbit"), 2):
        pass


ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("listening", flush=True)
    peer, _ = server.accept()
    while data := peer.recv(1 << 16):
        peer.sendall(data)
"""
ASK = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000), timeout=60) as peer:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    took = []
    for _ in range(5):
        began = time.monotonic()
        peer.sendall(b"x")
        peer.recv(1)
        took.append(time.monotonic() - began)
print(min(took))
"""


@pytest.mark.usefixtures("can_link")
@pytest.mark.parametrize(("link", "ranks"), [("1Gbit", 2), ("1Gbit", 3), ("1Gbit+20ms", 2), ("1Gbit+20ms", 3)])
def test_a_link_carries_and_is_removed(link: str, ranks: int) -> None:
    with made(Link.parse(link), ranks) as places:
        last = places[-1]
        command = [*last.command, sys.executable, "-c", ECHO, last.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"listening\n"
            asked = [*places[0].command, sys.executable, "-c", ASK, last.address]
            seconds = float(subprocess.run(asked, capture_output=True, timeout=120, check=True).stdout)
        assert seconds >= 2 * Link.parse(link).delay_seconds
    assert namespaces(os.getpid()) == set()
    assert ours_left(os.getpid()) == {}


@pytest.mark.usefixtures("can_link")
def test_what_fails_leaves_no_link_behind() -> None:
    with pytest.raises(RuntimeError, match="half-way"), made(Link.parse("1Gbit+5ms"), 2):
        raise RuntimeError("half-way")
    assert namespaces(os.getpid()) == set()
    assert ours_left(os.getpid()) == {}


@pytest.mark.usefixtures("can_link")
def test_a_name_that_is_taken() -> None:
    taken = f"prsgd-bench-{os.getpid()}-1"
    subprocess.run(["ip", "netns", "add", taken], check=True)
    try:
        with pytest.raises(NoLinkError, match="File exists"), made(Link.parse("1Gbit"), 2):
            pass
    finally:
        links._remove([taken])
    assert namespaces(os.getpid()) == set()


@pytest.mark.usefixtures("can_link")
def test_what_a_killed_bench_left_is_removed_by_the_next() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = f"prsgd-bench-{gone.pid}-0"
    subprocess.run(["ip", "netns", "add", left], check=True)
    with made(Link.parse("1Gbit"), 2):
        assert left not in namespaces(gone.pid)


# Races


def by_hand() -> Race:
    """Without communication 1 s for 8 steps; "prsgd" takes 1.25 s and 1.6 s, "ddp" 0.5 s for 2 steps."""
    laps = {
        NONE: [Lap(8, 1.0, 0.8, 0.0), Lap(8, 1.2, 0.8, 0.0)],
        "prsgd": [
            Lap(8, 1.25, 0.9, 0.2, {"copy": 0.01, "wait": 0.08, "flight": 0.07}),
            Lap(8, 1.6, 1.0, 0.4, {"copy": 0.03, "wait": 0.1, "flight": 0.09}),
        ],
        "ddp": [Lap(2, 0.5, 0.3, 0.0), Lap(2, 0.6, 0.3, 0.0)],
    }
    return Race("mlp", "1Gbit", ranks=2, period=4, laps=laps, left_out={"torchft": "torchft is not installed"})


def test_shares_are_of_the_same_round() -> None:
    found = by_hand()
    assert found.shares("prsgd") == pytest.approx([0.8, 0.75])
    assert found.share("prsgd") == pytest.approx(0.775)
    assert found.shares("ddp") == pytest.approx([0.5, 0.5])
    assert found.sync_seconds("prsgd") == pytest.approx(0.15)  # 0.2 s and 0.4 s for two averages each
    assert found.processor_seconds("prsgd") == pytest.approx(4 * (0.1 / 8 + 0.2 / 8) / 2)
    assert found.ranking() == [NONE, "prsgd", "ddp"]
    assert found.parts("prsgd") == pytest.approx({"copy": 0.02, "wait": 0.09, "flight": 0.08})
    assert found.parts("ddp") == {}


def test_what_is_told(tmp_path: Path) -> None:
    found = by_hand()
    text = told.text(found)
    assert "mlp over 1Gbit, 2 ranks, period 4" in text
    assert "torchft           left out: torchft is not installed" in text
    assert (
        "of one average         copying      waiting    in flight\nprsgd                    20 ms        90 ms" in text
    )
    assert all(len(line) <= 80 for line in text.splitlines())
    paths = told.write([found], tmp_path, "prsgd bench")
    assert {path.name for path in paths} == {"bench.json", "bench.md", "bench.png", "bench.svg"}
    assert told.read(tmp_path / "bench.json") == [found]
    assert "| **0.775** |" in (tmp_path / "bench.md").read_text()
    assert "| ours, blocking | 20, 90, 80 |" in (tmp_path / "bench.md").read_text()


def test_the_models_are_of_the_sizes_they_say() -> None:
    sizes = {name: sum(p.numel() for p in work(name, 0).model.parameters()) for name in MODELS}
    assert sizes == {"mlp": 101_770, "resnet20": 269_722, "gpt": 10_795_008, "mlp-25m": 25_114_960}


def test_ranks_have_one_model_and_their_own_batches() -> None:
    first, second = work("mlp", 0), work("mlp", 1)
    assert all(a.equal(b) for a, b in zip(first.model.parameters(), second.model.parameters()))
    assert not next(first.batches)[0].equal(next(second.batches)[0])


def test_ranks_share_a_task_out() -> None:
    first, second = (work("digits/cnn", rank, ranks=2) for rank in range(2))
    assert all(a.equal(b) for a, b in zip(first.model.parameters(), second.model.parameters()))
    assert not next(first.batches)[0].equal(next(second.batches)[0])
    assert first.accuracy is not None
    assert second.accuracy is not None
    sizes = [a(first.model)[1] for a in (first.accuracy, second.accuracy)]
    assert sum(sizes) == len(tasks.load("digits").test_y)


def test_climbing() -> None:
    found = climb.climb(
        "digits/mlp", Link.parse("loopback"), ["ddp", "prsgd@4", "torchft"], target=0.8, lr=0.05, most_steps=400
    )
    assert set(found.points) | set(found.left_out) == {"ddp", "prsgd@4", "torchft"}
    for name in ("ddp", "prsgd@4"):
        [points] = found.points[name]
        assert [p.steps for p in points] == [16 * (k + 1) for k in range(len(points))]
        assert all(a.seconds < b.seconds for a, b in pairwise(points))
        assert points[-1].accuracy >= 0.8 > max((p.accuracy for p in points[:-1]), default=0.0)
        assert found.seconds(name) == [points[-1].seconds]
    said = told.text(found)
    assert "prsgd@4" in said
    assert all(len(line) <= 80 for line in said.splitlines())


def test_who_does_not_arrive_is_told(tmp_path: Path) -> None:
    points = {
        "ddp": [[Point(16, 1.0, 0.5), Point(32, 2.0, 0.9)], [Point(16, 1.5, 0.95)]],
        "prsgd@8": [[Point(16, 0.5, 0.6)], [Point(16, 0.5, 0.9)]],
    }
    found = Climb("digits/cnn", "100Mbit", 2, 0.9, points)
    assert found.seconds("ddp") == [2.0, 1.5]
    assert found.median_seconds("ddp") == 1.75
    assert found.median_seconds("prsgd@8") is None
    assert found.best("prsgd@8") == pytest.approx(0.75)
    assert "not all" in told.text(found)
    paths = told.write([found], tmp_path, "prsgd bench")
    assert {path.name for path in paths} == {"bench.json", "bench.md", "accuracy.png", "accuracy.svg"}
    assert told.read(tmp_path / "bench.json") == [found]
    assert "| prsgd@8 | never, 0.5 |" in (tmp_path / "bench.md").read_text()


def test_a_race_over_loopback() -> None:
    found = race.race("mlp", Link.parse("loopback"), ["prsgd-overlap-1", "ddp"], period=2, rounds=2)
    assert {name: len(laps) for name, laps in found.laps.items()} == {NONE: 2, "prsgd-overlap-1": 2, "ddp": 2}
    assert found.left_out == {}
    for laps in found.laps.values():
        for lap in laps:
            assert lap.seconds > 0
            assert 0 <= lap.sync_seconds <= lap.seconds
    assert all(lap.parts == {} for name in (NONE, "ddp") for lap in found.laps[name])
    for lap in found.laps["prsgd-overlap-1"]:
        assert set(lap.parts) == set(PARTS)
        assert all(0 <= seconds < lap.seconds for seconds in lap.parts.values())
    assert ours_left(os.getpid()) == {}


@pytest.mark.parametrize("name", CONTESTANTS)
def test_warm_ups(name: str) -> None:
    """Over a slow link one that speaks at every step would not be ready in time; one that settles is given averages."""
    steps = CONTESTANTS[name].warm_up(8)
    assert steps == (2 if name.startswith("ddp") else 47 if name.startswith("prsgd-auto") else 15)


def trained(rank: int, name: str, period: int) -> list[Tensor]:
    """One of two ranks' model after three periods of that contestant."""
    share = work("mlp", rank, 2)
    with CONTESTANTS[name].train(share, Ground(rank, 2, "127.0.0.1", period)) as step:
        for _ in range(3 * period):
            step()
        return [parameter.detach().clone() for parameter in share.model.parameters()]


@pytest.mark.parametrize(("bare", "ours", "period"), [("bare", "prsgd", 4), ("bare-6", "prsgd-overlap-6", 8)])
def test_what_averaging_costs_at_least_averages(bare: str, ours: str, period: int) -> None:
    """What others are measured against does the same work: its models are those of ours."""
    for least, own in zip(*(run_ranks(trained, 2, name, period) for name in (bare, ours))):
        for a, b in zip(least, own):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    alone = run_ranks(trained, 2, NONE, period)
    assert not torch.allclose(alone[0][0], least[0], rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(find_spec("torchft") is None, reason="the extra elastic is not installed")
def test_torchft_averages_too() -> None:
    """Its LocalSGD does the work of ours. Its DiLoCo goes on from the mean of the models six steps before: what a
    worker learned since then is dropped."""
    for found, own in zip(*(run_ranks(trained, 2, name, 8) for name in ("torchft", "prsgd"))):
        for a, b in zip(found, own):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    first, second = run_ranks(trained, 2, "torchft-diloco-6", 8)
    start = list(work("mlp", 0, 2).model.parameters())
    for a, b, c in zip(first, second, start):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert not torch.allclose(a, c, rtol=1e-4, atol=1e-6)


def test_who_is_not_installed_or_fails_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "find_spec", {}.get)
    found = race.race("mlp", Link.parse("loopback"), ["torchft", "ddp-bf16"], period=1, rounds=1)
    assert set(found.laps) == {NONE}
    assert found.left_out["torchft"] == "torchft is not installed (pip install 'prsgd[bench]')"
    assert "rank" in found.left_out["ddp-bf16"]  # torch has it for GPUs alone
    assert "BF16" in found.left_out["ddp-bf16"]
    assert ours_left(os.getpid()) == {}


def test_who_hangs_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "START_SECONDS", 0.01)
    monkeypatch.setattr(race, "STEP_SECONDS", 0.0)
    with pytest.raises(DropOutError, match=r"did not answer within 0 s"):
        race.race("mlp", Link.parse("loopback"), ["ddp"], period=1, rounds=1)
    assert ours_left(os.getpid()) == {}


def ddp_ranks() -> list[int]:
    return [number for number, words in ours_left(os.getpid()).items() if '"contestant": "ddp"' in words]


def test_who_dies_half_way_is_ended_and_the_others_go_on() -> None:
    """None of its processes is left to disturb the laps of the others."""
    left: list[list[int]] = []

    def tell(line: str) -> None:
        if "round 1 of 2, ddp" in line:
            os.kill(max(ddp_ranks()), signal.SIGKILL)
        elif "round 2" in line:
            left.append(ddp_ranks())

    found = race.race("mlp", Link.parse("loopback"), ["ddp", "prsgd"], period=2, rounds=2, tell=tell)
    assert "round 1: rank" in found.left_out["ddp"]
    assert len(found.laps["prsgd"]) == 2
    assert left
    assert not any(left)


class Counting(InProcess):
    """Tells how many sums were started, and how many were waited for."""

    started = arrived = 0

    def all_reduce(self, flat: Tensor) -> Work[Tensor]:
        self.started += 1
        return Then(super().all_reduce(flat), self._arrive)

    def _arrive(self, flat: Tensor) -> Tensor:
        self.arrived += 1
        return flat


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_what_travels_between_two_blocks_is_waited_for(overlap: int) -> None:
    """Where the overlap is the whole period an average is under way when a block ends: it is not to travel in the turn
    of another team."""
    comm = Counting(2)
    fleet = Fleet(nn.Linear(2, 1), 2, comm=comm)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    with LocalSGD(fleet, optimizer, schedule=every(2), overlap=overlap) as local:
        for _ in range(4):
            optimizer.zero_grad()
            fleet.backward(mse_loss, torch.randn(2, 1, 2), torch.zeros(2, 1, 1))
            optimizer.step()
        before = comm.started - comm.arrived
        drained(local)
        assert (before, comm.started - comm.arrived) == (1 if overlap == 2 else 0, 0)


def test_where_none_could_run_the_limit_is_told(tmp_path: Path) -> None:
    found = Race("mlp", "loopback", 2, 8, {NONE: [Lap(8, 1.0, 1.0, 0.0)]}, {"torchft": "torchft is not installed"})
    told.write([found], tmp_path, "prsgd bench")
    assert "| no communication: the limit | 1.000 |" in (tmp_path / "bench.md").read_text()


# The command


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--models", "mpl"], "models must be"),
        (["--models", "digits/cn"], "the task's models must be"),
        (["--accuracy", "2"], "accuracy must be above 0 and at most 1, got 2.0"),
        (["--accuracy", "0.9"], "to an accuracy: models must be of the lab's tasks, as digits/cnn, got 'mlp'"),
        (
            ["--accuracy", "0.9", "--models", "digits/cnn", "--contestants", "prsgd@x"],
            "a contestant's period must be a whole number >= 1, got 'prsgd@x'",
        ),
        (["--contestants", "dpd"], "contestants must be"),
        (["--links", "fast"], "a link must be a number with a unit"),
        (["--ranks", "1"], "ranks must be a whole number >= 2, got 1"),
        (["--rounds", "0"], "rounds must be a whole number >= 1, got 0"),
        (["--period", "0"], "period must be a whole number >= 1, got 0"),
    ],
)
def test_bad_arguments(args: list[str], message: str, tmp_path: Path) -> None:
    done = prsgd("bench", *args, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_list_names_all(tmp_path: Path) -> None:
    done = prsgd("bench", "--list", cwd=tmp_path)
    assert done.returncode == 0
    assert all(name in done.stdout for name in (*MODELS, *CONTESTANTS))
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


def test_the_command_tells_programs(tmp_path: Path) -> None:
    args = ["--models", "mlp", "--links", "loopback", "--contestants", "prsgd", "--rounds", "1", "--period", "2"]
    done = prsgd("bench", *args, "--json", "--out", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [found] = json.loads(done.stdout)["races"]
    assert found == json.loads((tmp_path / "bench.json").read_text())["races"][0]
    assert set(found["laps"]) == {"none", "prsgd"}


@pytest.fixture
def bench() -> Iterator[subprocess.Popen[str]]:
    args = ["--models", "mlp", "--links", "1Gbit", "--contestants", "ddp", "--rounds", "1000"]
    command = [sys.executable, "-m", "prsgd", "bench", *args]
    # Where tests run in the background of a shell Ctrl-C is ignored, and so it would be here.
    listens = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=listens
    ) as process:
        yield process
        process.kill()


@pytest.mark.usefixtures("can_link")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing_behind(bench: subprocess.Popen[str], number: signal.Signals) -> None:
    deadline = time.monotonic() + 120
    while not ours_left(bench.pid) and bench.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ours_left(bench.pid)
    bench.send_signal(number)
    assert bench.wait(timeout=60) == 130
    assert namespaces(bench.pid) == set()
    assert ours_left(bench.pid) == {}


def test_a_port_is_free() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", race._free_port()))
