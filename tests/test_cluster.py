"""A cluster's clock by hand, its files, and Algorithm 3 in simulation and in real processes."""

from __future__ import annotations

import dataclasses
import json
import re
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import prsgd
from prsgd import cluster as clusters
from prsgd.cli import main
from prsgd.clocks import trace
from prsgd.clocks.trace import Span, shares, split
from prsgd.cluster.clock import ClusterClock
from prsgd.cluster.model import Cluster
from prsgd.comm.links import bytes_of_sum
from prsgd.lab.config import Config
from prsgd.lab.folder import prepare
from prsgd.lab.progress import Stopped
from prsgd.lab.run import run
from prsgd.theory.bounds import active_workers
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("warm_launch")

FAR = 1e18
"""Bytes per second: a link that takes no time."""


def itself(out: Tensor, _: Any) -> Tensor:
    return out.sum()


def ride(schedule: prsgd.Schedule, clock: ClusterClock, ticks: int, overlap: int = 0) -> prsgd.LocalSGD:
    n = len(clock.cluster.speeds)
    fleet = prsgd.Fleet(nn.Linear(3, 1), n)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    with prsgd.LocalSGD(fleet, optimizer, schedule=schedule, clock=clock, overlap=overlap) as local:
        for _ in range(ticks):
            optimizer.zero_grad()
            fleet.backward(itself, torch.arange(1.0, n + 1).view(n, 1, 1).expand(n, 2, 3), torch.ones(n, 2))
            optimizer.step()
    return local


def bandwidth_for(seconds: float, num_bytes: int) -> float:
    """Of a ring of two that takes so long for this: each sends half of it twice."""
    return bytes_of_sum("all-reduce", 2, num_bytes)[0] / seconds


def test_figure_2_by_hand() -> None:
    """I_1 = 16 and I_2 = 8 on workers of speed 2 and 1: nobody waits."""
    local = ride(prsgd.per_worker([16, 8]), ClusterClock(Cluster("two", (2.0, 1.0), 1.0, FAR)), 32)
    first = local.records[0].modelled
    assert first is not None
    assert (first.computing, first.waiting, first.communicating) == ((8.0, 8.0), (0.0, 0.0), (0.0, 0.0))
    assert [r.modelled.seconds for r in local.records if r.modelled] == [8.0, 16.0]
    assert active_workers([16, 8]) == [2] * 8 + [1] * 8  # j_k of Theorem 3


def test_figure_1_by_hand() -> None:
    """Fixed rounds of 4: the fast one computes 2 s and waits 2 s; then 3 s of transfer and half a second of copying."""
    sent = ride(prsgd.every(4), ClusterClock(Cluster("two", (2.0, 1.0), 1.0, FAR)), 4).records[0].bytes_sent
    cluster = Cluster("two", (2.0, 1.0), 1.0, sent / 3.0, copy_seconds=0.5)
    local = ride(prsgd.every(4), ClusterClock(cluster), 8)
    for number, record in enumerate(local.records, 1):
        found = record.modelled
        assert found is not None
        assert found.computing == (2.0, 4.0)
        assert found.waiting == (2.0, 0.0)
        assert found.communicating == pytest.approx((3.5, 3.5), abs=1e-8)
        assert found.hidden == pytest.approx((0.0, 0.0), abs=1e-8)
        assert found.seconds == pytest.approx(7.5 * number, abs=1e-8)


def test_overlap_hides_what_it_can() -> None:
    """Closed after step 3, at 1.5 s and 3 s; there at 6 s. The slow one's step hides a second of the three."""
    sent = ride(prsgd.every(4), ClusterClock(Cluster("two", (2.0, 1.0), 1.0, FAR)), 4).records[0].bytes_sent
    local = ride(prsgd.every(4), ClusterClock(Cluster("two", (2.0, 1.0), 1.0, sent / 3.0)), 9, overlap=1)
    first, second = (local.records[i].modelled for i in range(2))
    assert first is not None
    assert second is not None
    assert first.waiting == (1.0, 0.0)  # 2 s ... 3 s
    assert first.communicating == pytest.approx((3.0, 2.0), abs=1e-8)
    assert first.hidden == pytest.approx((0.0, 1.0), abs=1e-8)
    assert first.seconds == pytest.approx(6.0, abs=1e-8)
    assert second.seconds == pytest.approx(12.0, abs=1e-8)  # 3 steps to 9 s, 3 s of transfer
    deep = ride(prsgd.every(4), ClusterClock(Cluster("two", (2.0, 1.0), 1.0, sent / 3.0)), 9, overlap=4)
    hidden = deep.records[0].modelled
    assert hidden is not None
    assert hidden.seconds == pytest.approx(4.0, abs=1e-8)  # launched at once, there at 3 s
    assert hidden.communicating == pytest.approx((1.0, 0.0), abs=1e-8)  # the fast one is there at 2 s


def test_timed_rounds_are_exact() -> None:
    """8 slow steps of 20 ms are 160 ms, not 159.999: speeds 4 2 1 1 take 32, 16, 8 and 8 steps."""
    clock = ClusterClock(clusters.load("mixed", 4))
    local = ride(prsgd.timed(0.16), clock, 3 * 32)
    assert local.steps == (96, 48, 24, 24)
    assert [record.period for record in local.records] == [32, 32, 32]
    last = local.records[-1].modelled
    assert last is not None
    assert last.seconds == max(clock(worker) for worker in range(4))  # the end, where nobody had news, took no time
    waits = [wait for record in local.records if record.modelled for wait in record.modelled.waiting]
    assert max(waits) < 1e-6


@pytest.mark.parametrize("overlap", [1, 2])
def test_timed_rounds_with_overlap_do_not_drift_apart(overlap: int) -> None:
    """Waiting for an average is no part of the round that is open: else the fast one's rounds shrink and shrink."""
    clock = ClusterClock(Cluster("two", (4.0, 1.0), 0.03, 125e6, 0.001))
    local = ride(prsgd.timed(0.16), clock, 1500, overlap=overlap)
    late = local.records[-20:-1]
    assert len(local.records) > 50
    idle = [r.modelled.waiting[0] + r.modelled.communicating[0] for r in late if r.modelled]
    busy = [r.modelled.computing[0] for r in late if r.modelled]
    assert sum(idle) < 0.3 * sum(busy)  # at most a slow step or two a round


@pytest.mark.parametrize("shape", ["ring", "tree", "parameter-server"])
def test_shapes_cost_what_their_links_say(shape: str) -> None:
    """The fleet counts bytes as an all-reduce; a cluster's shape is its own."""
    cluster = Cluster("eight", (1.0,) * 8, 1.0, 1e3, 0.01, shape)
    local = ride(prsgd.every(2), ClusterClock(cluster), 4)
    record = local.records[0]
    assert record.modelled is not None
    whole = record.bytes_sent * 8 / 14
    expected = cluster.link.average_seconds(whole, workers=8)
    assert record.modelled.communicating == pytest.approx((expected,) * 8, rel=1e-3)


def test_a_state_of_another_clock_is_refused() -> None:
    clock = ClusterClock(clusters.load("mixed", 4), seed=1)
    for other, message in (
        (ClusterClock(clusters.load("lan-1g", 4), seed=1), "of another cluster than mixed"),
        (ClusterClock(clusters.load("mixed", 4), seed=2), "seed 2, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            clock.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="without a cluster's clock"):
        clock.load_state_dict({})


def test_measured_rounds_follow_the_speeds() -> None:
    """Two rounds of 8 for all; then 32, 16, 8 and 8."""
    local = ride(prsgd.measured(slowest=8), ClusterClock(clusters.load("mixed", 4)), 8 + 8 + 32 + 32)
    assert [record.period for record in local.records] == [8, 8, 32, 32]
    assert local.steps == (80, 48, 32, 32)
    seconds = local.records[0].step_seconds
    assert seconds is not None
    assert seconds == pytest.approx((0.005, 0.01, 0.02, 0.02), rel=1e-5)


def test_stragglers_are_fair_and_repeatable() -> None:
    cluster = clusters.load("stragglers", 4)
    one, again = (ride(prsgd.every(5), ClusterClock(cluster, seed=3), 50) for _ in range(2))
    assert [r.modelled for r in one.records] == [r.modelled for r in again.records]
    clock = ClusterClock(dataclasses.replace(cluster, speeds=(1.0,)), seed=1)
    for _ in range(20_000):
        clock.computed([0])
    assert clock.step_seconds(0) == pytest.approx(0.02, rel=0.02)  # the mean is 1, at a deviation of about 0.5
    steps = np.array([span.end - span.begin for span in clock.trace.spans()])
    assert np.log(steps / 0.02).std() == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize("overlap", [0, 2])
def test_a_state_goes_on_with_the_same_times(overlap: int) -> None:
    """In mid-round and in mid-flight, with stragglers: every later record is equal to the last bit."""
    cluster = dataclasses.replace(clusters.load("mixed", 4), jitter=0.3)

    def fresh(load: dict[str, Any] | None = None) -> tuple[Any, ...]:
        torch.manual_seed(0)
        fleet = prsgd.Fleet(nn.Linear(3, 1), 4)
        optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
        clock = ClusterClock(cluster, seed=2)
        local = prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.timed(0.1), clock=clock, overlap=overlap)
        if load is not None:
            fleet.load_state_dict(load["fleet"])
            local.load_state_dict(load["local"])
        return fleet, optimizer, local.start()

    def go(parts: tuple[Any, ...], ticks: int) -> None:
        fleet, optimizer, _ = parts
        for _ in range(ticks):
            optimizer.zero_grad()
            fleet.backward(itself, torch.arange(1.0, 5.0).view(4, 1, 1).expand(4, 2, 3), torch.ones(4, 2))
            optimizer.step()

    whole = fresh()
    go(whole, 61)
    state = {"fleet": whole[0].state_dict(), "local": whole[2].state_dict()}
    state = {**state, "local": {**state["local"], "clock": json.loads(json.dumps(state["local"]["clock"]))}}
    broken = fresh(state)
    for parts in (whole, broken):
        go(parts, 80)
        parts[2].finish()
    late = [record.modelled for record in broken[2].records[-4:]]
    assert late == [record.modelled for record in whole[2].records[-4:]]


def test_a_clock_wants_all_workers_in_one_process() -> None:
    clock = ClusterClock(clusters.load("lan-1g", 4))
    with pytest.raises(ValueError, match="the cluster has 4 workers, the run 2"):
        prsgd.LocalSGD(
            fleet := prsgd.Fleet(nn.Linear(1, 1), 2),
            torch.optim.SGD(fleet.parameters(), lr=0.1),
            schedule=prsgd.every(2),
            clock=clock,
        )
    with pytest.raises(ValueError, match="a cluster's clock needs all workers in one process"):
        clock.check(4, range(2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bandwith = '1Gbit'", "unknown key 'bandwith': did you mean 'bandwidth'?"),
        ("step_time = '20ms'", "bandwidth is missing"),
        ("bandwidth = '1Gbit'", "step_time is missing"),
        ("step_time = '20ms'\nbandwidth = 'fast'", "bandwidth must be a number with a unit such as"),
        ("step_time = '20ms'\nbandwidth = '0Gbit'", "bandwidth must be above 0, got '0Gbit'"),
        ("step_time = '20ms'\nbandwidth = 1000", "bandwidth must be a text with a unit, got 1000"),
        ("step_time = '20'\nbandwidth = '1Gbit'", "step_time must be a time with a unit such as"),
        ("step_time = '0ms'\nbandwidth = '1Gbit'", "step_time must be above 0, got '0ms'"),
        ("step_time = '20ms'\nbandwidth = '1GB/s'\nspeeds = [1, 2]", "speeds must have one entry per worker: 4 wor"),
        ("step_time = '20ms'\nbandwidth = '1GB/s'\nspeeds = [1, 2, -1, 1]", "speeds[2] must be a finite number > 0, g"),
        ("step_time = '20ms'\nbandwidth = '1GB/s'\nlatency = '5 parsec'", "latency must be a time with a unit such as"),
        ("step_time = '20ms'\nbandwidth = '1GB/s'\nshape = 'star'", "shape must be one of ring, tree, parameter"),
        ("step_time = '20ms'\nbandwidth = '1GB/s'\njitter = -1", "jitter must be a number from 0 to 5, got -1"),
        ("step_time = '20ms", "at end of document"),
    ],
)  # fmt: skip
def test_bad_files(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{path}: ")) as refused:
        clusters.load(str(path), 4)
    assert message in str(refused.value)
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--workers", "4", "--cluster", str(path), "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_file_and_back(tmp_path: Path) -> None:
    made = Cluster("mine", (4.0, 1.5), 0.0213, 123_456_789.0, 0.00042, "tree", 0.25, 0.0011)
    clusters.write(made, tmp_path / "c.toml")
    assert clusters.load(str(tmp_path / "c.toml"), 2) == made
    text = 'step_time = "1s"\nbandwidth = ["1Gbit", "100Mbit"]\n'
    (tmp_path / "d.toml").write_text(text)
    assert clusters.load(str(tmp_path / "d.toml"), 2).bytes_per_second == 12.5e6  # the slowest link's


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--cluster", "mixd"], "got 'mixd': did you mean 'mixed'?"),
        (["--method", "pr-sgd-timed"], "needs to know how long a round lasts: --seconds, or a --cluster"),
        (["--method", "pr-sgd-timed", "--seconds", "0"], "seconds must be a finite number > 0, got 0"),
        (["--method", "pr-sgd-timed", "--seconds", "-1"], "seconds must be a finite number > 0, got -1"),
        (["--method", "pr-sgd-timed", "--seconds", "1", "--period", "4"], "two ways to say how long a round lasts"),
        (["--method", "pr-sgd-timed", "--seconds", "1", "--period", "4", "--cluster", "mixed"], "is 0.08, got 1"),
        (["--seconds", "1"], "method pr-sgd has no rounds by the clock, got seconds 1.0"),
        (["--cluster", "mixed", "--processes", "2"], "processes must be 1, or one per worker (8), with a clus"),
        (["--method", "pr-sgd-timed", "--seconds", "1", "--overlap", "1", "--processes", "2"],
         "overlap must be 0 with method pr-sgd-timed in several processes, got 1"),
        (["--method", "pr-sgd-measured", "--period", "4", "--overlap", "4", "--processes", "2"],
         "overlap must be below the period 4 with method pr-sgd-measured in several processes, got 4"),
        (["--weights", "fair"], "weights must be one of 'uniform', 'steps', got 'fair'"),
        (["--method", "pr-sgd-measured", "--period", "4", "--overlap", "5"], "overlap must be at most slowest 4"),
    ],
)  # fmt: skip
def test_bad_options(args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", *args, "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_algorithm_3_wants_identical_distributions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["train", "--method", "pr-sgd-timed", "--cluster", "mixed", "--workers", "4", "--epochs", "1"]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main([*args, "--split", "dirichlet:0.3", "--out", str(tmp_path / "a")]) == 0
    assert "Assumption 2, identical distributions, does not hold" in capsys.readouterr().err
    assert main([*args, "--out", str(tmp_path / "b")]) == 0  # a warning would be an error here


def test_seconds_shorter_than_a_step() -> None:
    with pytest.warns(RuntimeWarning, match=r"timed\(0.001\): a step takes as long as a round or longer"):
        local = ride(prsgd.timed(0.001), ClusterClock(clusters.load("lan-1g", 2)), 6)
    assert [record.period for record in local.records] == [1] * 6
    for bad in (0, -1.0, float("nan"), "1s"):
        with pytest.raises(ValueError, match="seconds must be a finite number > 0"):
            prsgd.timed(bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="slowest must be a whole number >= 1, got 0"):
        prsgd.measured(0)


TIMED = Config(task="digits", method="pr-sgd-timed", workers=4, cluster="mixed", period=4, epochs=3).resolve()


@pytest.mark.parametrize("config", [TIMED, dataclasses.replace(TIMED, overlap=1, cluster="stragglers").resolve()])
def test_a_run_on_a_cluster_resumes_to_the_last_bit(config: Config, tmp_path: Path) -> None:
    for name in ("whole", "broken"):
        prepare(config, tmp_path / name)
    whole = run(config, tmp_path / "whole")
    ticks = iter(range(10**6))
    with pytest.raises(Stopped):
        run(config, tmp_path / "broken", should_stop=lambda: next(ticks) > 70)
    again = run(config, tmp_path / "broken")
    assert again.weights_sha256 == whole.weights_sha256
    assert again.modelled_seconds == whole.modelled_seconds
    lines = [(tmp_path / name / "records.jsonl").read_text().splitlines() for name in ("whole", "broken")]
    seconds = [[r["modelled"] for r in map(json.loads, one) if r["kind"] == "average"] for one in lines]
    assert seconds[0] == seconds[1]


@pytest.mark.parametrize(("method", "overlap"), [("pr-sgd-timed", 0), ("pr-sgd-measured", 1)])
def test_a_cluster_played_by_processes(method: str, overlap: int, tmp_path: Path) -> None:
    """Two processes of speeds 4 and 1 that take different numbers of steps end in the same round."""
    place = tmp_path / "two.toml"
    # Long beside what a step takes on a busy machine, which would make the two alike.
    place.write_text('step_time = "40ms"\nspeeds = [4, 1]\nbandwidth = "1Gbit"\n')
    given = ["--workers", "2", "--processes", "2", "--cluster", str(place), "--period", "6", "--epochs", "2"]
    args = ["train", "--method", method, "--overlap", str(overlap), *given, "--out", str(tmp_path / "run")]
    assert main(args) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 1.8 < summary["epochs"] < 2.4  # whole rounds
    kept = [sorted(p.name for p in place.iterdir()) for place in sorted((tmp_path / "run" / "checkpoints").glob("*"))]
    assert kept  # by the epoch, which the processes have in common, and not by their own steps
    (tmp_path / "run" / "summary.json").unlink()
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0  # from there
    lines = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    epochs = [line["epoch"] for line in lines if line["kind"] == "evaluation"]
    assert len(epochs) == 3
    assert all(abs(epoch - number) < 0.4 for number, epoch in enumerate(epochs))  # whole rounds, one of them estimated
    periods = [line["period"] for line in lines if line["kind"] == "average"]
    assert max(periods) > 10  # rank 0 is the fast one
    assert {path.name for path in (tmp_path / "run").glob("trace-*.json")} == {"trace-0.json", "trace-1.json"}


def test_samples_count_and_not_ticks(tmp_path: Path) -> None:
    """An epoch is as many samples for all methods: the fast worker's extra steps bring it nearer."""
    even = dataclasses.replace(TIMED, method="pr-sgd", seconds=None).resolve()
    found = {}
    for config in (TIMED, even):
        prepare(config, tmp_path / config.method)
        found[config.method] = run(config, tmp_path / config.method)
    samples = [found[name].samples for name in ("pr-sgd", "pr-sgd-timed")]
    assert samples[0] <= samples[1] <= samples[0] + 4 * 8  # to the tick
    modelled = [found[name].modelled_seconds for name in ("pr-sgd", "pr-sgd-timed")]
    assert modelled[0] is not None
    assert modelled[1] is not None
    assert modelled[0] / modelled[1] > 1.6  # 8 : 4 speeds used of 8 : 8


def test_a_thousand_workers(tmp_path: Path) -> None:
    config = Config(task="synthetic", workers=1024, cluster="stragglers", period=2, steps=6, batch_size=4).resolve()
    prepare(config, tmp_path)
    summary = run(config, tmp_path)
    assert summary.modelled_seconds is not None
    assert summary.modelled_seconds > 6 * 0.02
    lines = map(json.loads, (tmp_path / "records.jsonl").read_text().splitlines())
    first = next(line for line in lines if line["kind"] == "average")
    assert len(first["modelled"]["waiting"]) == 1024


SPEEDS = (4, 2, 1)
STEP_SECONDS = 0.08
"""Of the slowest: the fastest one's 20 ms are long beside what a busy machine takes now and then."""


def timed_rank(rank: int, overlap: int) -> tuple[int, list[int], list[Span]]:
    """Steps that are mostly sleep."""
    torch.manual_seed(rank)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with prsgd.LocalSGD(model, optimizer, schedule=prsgd.timed(0.8), overlap=overlap) as local:
        while local.round < 5:
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            time.sleep(STEP_SECONDS / SPEEDS[rank])
            optimizer.step()
    return local.step, [record.period for record in local.records], local.trace.spans()


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_real_timed_run(overlap: int) -> None:
    """Three processes of speeds 4, 2 and 1: the fast ones take more steps and nobody waits for long."""
    found = run_ranks(timed_rank, 3, overlap)
    steps = [number for number, _, _ in found]
    assert steps[0] > 1.5 * steps[1] > 2 * steps[2]  # about 4 : 2 : 1, less what a busy machine takes
    assert len(found[0][1]) == len(found[1][1]) == len(found[2][1])  # the round is the common clock
    spans = [Span(rank, s.kind, s.begin, s.end, s.number) for rank, (_, _, own) in enumerate(found) for s in own]
    for share in shares(split(spans)):
        assert share.computing > share.waiting + share.communicating
    kinds = {span.kind for span in spans}
    assert {"step", "blocked", "flight"} <= kinds


def measured_rank(rank: int) -> tuple[list[int], tuple[float, ...] | None]:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with prsgd.LocalSGD(model, optimizer, schedule=prsgd.measured(slowest=4)) as local:
        while local.round < 5:
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            time.sleep(STEP_SECONDS / SPEEDS[rank])
            optimizer.step()
    return [record.period for record in local.records], local.records[1].step_seconds


def test_a_real_measured_run() -> None:
    found = run_ranks(measured_rank, 3)
    assert found[0][1] == found[1][1] == found[2][1]  # all know the same times
    assert [periods[:2] for periods, _ in found] == [[4, 4]] * 3
    assert found[2][0][2] == 4  # the slowest
    assert found[0][0][2] > found[1][0][2] > 4


def test_calibrate_measures_a_real_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "mine.toml"
    assert main(["calibrate", "--processes", "2", "--steps", "60", "--out", str(place)]) == 0
    assert "2 processes, a step of the slowest takes" in capsys.readouterr().out
    found = clusters.load(str(place), 2)
    assert max(found.speeds) < 20
    assert 1e5 < found.bytes_per_second < 1e12
    assert 0 < found.latency_seconds < 1
    with pytest.raises(SystemExit):
        main(["calibrate", "--out", "/nowhere/mine.toml"])
    assert "out must be a file in a folder that is there" in capsys.readouterr().err


def test_pauses_do_not_count() -> None:
    """A round by the clock goes on after an evaluation where it was."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with prsgd.LocalSGD(model, optimizer, schedule=prsgd.timed(1.0)) as local:
        for step in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            if step == 2:
                with local.consensus():
                    time.sleep(0.6)
                with local.paused():
                    time.sleep(0.6)
        assert local.round == 0
    pauses = [span.end - span.begin for span in local.trace.spans() if span.kind == "pause"]
    assert len(pauses) == 2
    assert min(pauses) >= 0.6


def test_the_trace_is_a_ring() -> None:
    ring = trace.Trace(spans=3)
    for step in range(5):
        ring.add("step", 0, float(step), step + 0.5, step)
    assert [span.number for span in ring.spans()] == [2, 3, 4]
    ring.add("step", (0, 1), (9.0, 9.0), (9.5, 9.5), (7, 8))  # two spans at once
    assert [(span.worker, span.number) for span in ring.spans()] == [(0, 4), (0, 7), (1, 8)]
    with pytest.raises(ValueError, match="not a trace of prsgd"):
        trace.from_chrome({"traceEvents": [{"ph": "X"}]})


def test_timeline_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["compare", "--workers", "4", "--cluster", "mixed", "--methods", "pr-sgd", "pr-sgd-timed", "pr-sgd-measured"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main([*args, "--period", "4", "--epochs", "2", "--seeds", "1", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "Training loss against modelled seconds" in page
    assert "Who did what when" in page
    capsys.readouterr()
    assert main(["timeline", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines() if not line.startswith(("/", "for Perfetto")))
    for name in ("timeline", "idle", "loss-against-modelled-seconds"):
        assert (tmp_path / "figures" / f"{name}.png").stat().st_size > 5000
    [place] = tmp_path.glob("pr-sgd-timed*/trace.json")
    events = json.loads(place.read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} >= {"step", "average", "flight"}
    with pytest.raises(SystemExit) as stopped:
        main(["timeline", str(tmp_path / "figures")])
    assert stopped.value.code == 2
