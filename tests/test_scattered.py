"""Sums of packed changes to which each worker adds up a part: by hand, right on average, with nothing lost, the same in
every process, in bytes and messages."""

from __future__ import annotations

import math
import os
import random as dice
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import prsgd
from prsgd.averaging.base import SUMS_WIDTH, Sums
from prsgd.cluster import Cluster, ClusterClock
from prsgd.comm.base import Communicator, Done, Work
from prsgd.comm.combining import Peers, combine_over
from prsgd.comm.links import bytes_of_combination
from tests.problems import train_fleet, train_model
from tests.ranks import run_ranks, try_ranks


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def header(steps: tuple[int, ...], dtype: torch.dtype = torch.float64, exact: Tensor | None = None) -> prsgd.Header:
    """Of hosted workers that count by their steps; those with none do not."""
    n = len(steps)
    counts = tuple(s > 0 for s in steps)
    return prsgd.Header(
        Sums(workers=sum(counts)), torch.zeros(0, dtype=dtype) if exact is None else exact,
        torch.zeros(n, 0, dtype=dtype), counts=counts, bad=(False,) * n, steps=steps, samples=steps,
    )  # fmt: skip


def scattered(bits: int | str, **options: Any) -> prsgd.mean:
    return prsgd.mean("steps", prsgd.quantized(bits, way="scatter", **options))


def test_by_hand() -> None:
    """Two lines of two numbers: worker 0 owns the first, worker 1 the second. What lies on a level needs no coin: 4
    bits have -7 ... 7 sevenths of the largest."""
    averaging = scattered(4, bucket=2)
    memory = averaging.init(torch.zeros(4, dtype=torch.float64), 2)
    snap = torch.tensor([[7.0, 3.0, 14.0, -4.0], [7.0, -1.0, -7.0, 5.0]], dtype=torch.float64)
    landing = averaging.launch(memory, prsgd.InProcess(2), snap, header((1, 1))).wait()
    # The sums (14, 2) and (7, 1) are levels of their own scales, 14 and 7.
    assert landing.target.tolist() == pytest.approx([7.0, 1.0, 3.5, 0.5], abs=1e-15)
    assert landing.memory["averages"] == 1


def test_a_sum_between_two_levels_is_rounded_again() -> None:
    """(7, 7) and (7, 0), weights 1 and 3: the sum (28, 7) lies between levels 4 apart, 1.75 of them up."""
    seen = set()
    for seed in range(40):
        averaging = scattered(4, seed=seed)
        memory = averaging.init(torch.zeros(2, dtype=torch.float64), 2)
        snap = torch.tensor([[7.0, 7.0], [7.0, 0.0]], dtype=torch.float64)
        landing = averaging.launch(memory, prsgd.InProcess(2), snap, header((1, 3))).wait()
        seen.add(tuple(round(4 * x, 9) for x in landing.target.tolist()))
    assert seen == {(28.0, 4.0), (28.0, 8.0)}


def test_signs_by_hand() -> None:
    """Worker 0 changes by (3, 1), worker 1 by (-1, 5): scales 2 and 3, sent (2, 2) and (-3, 3), kept (1, -1) and (2,
    2). The sum travels in 4 bits: with weights 3 and 2 it is (0, 12), which are levels."""
    averaging = scattered("sign")
    memory = averaging.init(torch.zeros(2, dtype=torch.float64), 2)
    change = torch.tensor([[3.0, 1.0], [-1.0, 5.0]], dtype=torch.float64)
    landing = averaging.launch(memory, prsgd.InProcess(2), change, header((3, 2))).wait()
    assert landing.target is not None
    assert landing.target.tolist() == pytest.approx([0.0, 12 / 5], abs=1e-15)
    assert landing.memory is not None
    assert landing.memory["residuals"].tolist() == [[1.0, -1.0], [2.0, 2.0]]


@pytest.mark.parametrize("bits", [1, 2, 4, 8, "ternary"])
def test_both_roundings_are_right_on_average(bits: int | str) -> None:
    """Over 1,500 draws the mean of the targets lies within 5 standard errors of the mean of the models in each of 80
    places, and they scatter by what both roundings explain, and more than with one. Models of the same 80 numbers (5
    lines) 100 times over are as many draws, since coins are thrown for each number.

    Of a number between two levels a step apart the variance is at most a quarter of the step squared: of the first
    rounding w_i^2 / W^2 of it for each worker; the second's levels are those of the sum, whose scale is at most the sum
    of the workers' scales.
    """
    seeds, times, steps = 15, 100, (1, 2, 3)
    draws = seeds * times
    snap = random(3, 80)
    weights = torch.tensor(steps, dtype=torch.float64) / 6
    mean = weights @ snap
    once, twice = torch.zeros(2, 80, dtype=torch.float64)
    total = torch.zeros(80, dtype=torch.float64)
    for seed in range(seeds):
        for way, squares in (("gather", once), ("scatter", twice)):
            averaging = prsgd.mean("steps", prsgd.quantized(bits, bucket=16, seed=seed, way=way))
            memory = averaging.init(torch.zeros(80 * times, dtype=torch.float64), 3)
            landing = averaging.launch(memory, prsgd.InProcess(3), snap.repeat(1, times), header(steps)).wait()
            assert landing.target is not None
            targets = landing.target.view(times, 80)
            squares += ((targets - mean) ** 2).sum(dim=0)
            total += targets.sum(dim=0) * (way == "scatter")
    levels = prsgd.quantized(bits).levels
    scales = torch.cat([part.abs().amax(dim=1, keepdim=True).expand_as(part) for part in snap.split(16, dim=1)], dim=1)
    first = (weights**2) @ (2 * scales / (levels - 1)) ** 2 / 4
    second = (2 * (weights @ (scales * (1 + 2 / (levels - 1)))) / (levels - 1)) ** 2 / 4
    error = (total / draws - mean).abs()
    assert bool((error <= 5 * (first + second).sqrt() / math.sqrt(draws) + 1e-12).all())
    assert float(twice.mean()) / draws <= float((first + second).mean())
    assert float(twice.mean()) > 1.2 * float(once.mean())


def test_the_two_roundings_are_drawn_apart() -> None:
    wire = prsgd.quantized(1)
    values = random(2000)
    own, again, other = wire.encode(values, 1, 2), wire.encode(values, 1, 2, again=True), wire.encode(values, 1, 2)
    assert torch.equal(own, other)
    # Of two throws of the same coins about every other falls alike where they are fair, and fewer differ elsewhere.
    differ = float((wire.decode(own, values) != wire.decode(again, values)).double().mean())
    assert 0.2 < differ < 0.6


@pytest.mark.parametrize(("num_workers", "size"), [(2, 50), (3, 50), (5, 41), (7, 9)])
def test_signs_lose_nothing(num_workers: int, size: int) -> None:
    """Whatever the weights: what each worker has said and keeps is what it had to say, and over 400 draws the second
    rounding moves all by the mean of what was said, within 5 standard errors: of 15 levels, half a step each."""
    comm, chance, draws = prsgd.InProcess(num_workers), dice.Random(size), 400
    memory = scattered("sign", bucket=8).init(random(size), num_workers)
    for average in range(4):
        steps = tuple(chance.choice([0, 1, 2, 5]) for _ in range(num_workers))
        point, residuals = memory["point"], memory["residuals"]
        snap = point + random(num_workers, size, seed=average)
        moved, after = torch.zeros(size, dtype=torch.float64), []
        for seed in range(draws):
            landing = scattered("sign", bucket=8, seed=seed).launch(memory, comm, snap, header(steps)).wait()
            if landing.target is None or landing.memory is None:
                break
            moved += (landing.target - point) / draws
            after.append(landing.memory)
        if not any(steps):
            assert not after
            continue
        memory = after[0]
        assert all(torch.equal(other["residuals"], memory["residuals"]) for other in after)
        had = snap - point + residuals
        said = had - memory["residuals"]
        scales = torch.cat(
            [part.abs().mean(dim=1, keepdim=True).expand_as(part) for part in had.split(8, dim=1)], dim=1
        )
        weights = torch.tensor(steps, dtype=torch.float64)
        says = weights > 0
        torch.testing.assert_close(said[says].abs(), scales[says], rtol=0, atol=1e-12)
        assert torch.equal(memory["residuals"][~says], residuals[~says])
        mean = weights @ torch.where(says[:, None], said, 0.0) / weights.sum()
        half_step = weights @ scales / weights.sum() / 14
        assert bool(((moved - mean).abs() <= 5 * half_step / math.sqrt(draws) + 1e-12).all())


def test_which_way() -> None:
    """Whichever sends less. With two workers that is the same, and one rounding is better than two; signs, whose sums
    have 4 bits, scatter (64 + 4) + (256 + 4) bytes for each 64 + 4 that are gathered by N workers."""
    wire, sign = prsgd.quantized(4), prsgd.quantized("sign")
    assert [n for n in range(1, 9) if wire.scatters(n, 10**6)] == [3, 4, 5, 6, 7, 8]
    assert [n for n in range(1, 9) if sign.scatters(n, 512 * 2000)] == [5, 6, 7, 8]
    assert wire.scatters(1000, 512 * 1000)
    assert not wire.scatters(1000, 512 * 1000 - 1)  # not a line for everybody
    assert not prsgd.quantized(4, bucket=10**9).scatters(8, 10**6)
    assert prsgd.quantized(4, way="scatter").scatters(2, 1)
    assert not prsgd.quantized(4, way="gather").scatters(1000, 10**6)
    with pytest.raises(ValueError, match="way must be one of 'auto', 'gather', 'scatter', got 'scater'"):
        prsgd.quantized(4, way="scater")


@pytest.mark.parametrize(
    ("num_workers", "bits"),
    [(3, 4), (4, 4), (8, 4), (16, 4), (3, "ternary"), (16, "ternary"), (5, "sign"), (16, "sign")],
)
def test_bytes_and_messages(num_workers: int, bits: int | str) -> None:
    """2 (N - 1) / N of a packed change, as in an all-reduce; a few numbers to everybody; buffers by an all-reduce."""
    size, wire = 512 * 16 + 100, prsgd.quantized(bits)
    averaging = prsgd.mean(wire=wire)
    snap = random(num_workers, size, dtype=torch.float32)
    sent = []
    for exact in (None, torch.zeros(400)):
        memory = averaging.init(torch.zeros(size), num_workers)
        given = header((1,) * num_workers, torch.float32, exact)
        landing = averaging.launch(memory, prsgd.InProcess(num_workers), snap, given).wait()
        assert landing.hops == 2
        assert landing.hears is None
        sent.append(landing.bytes_sent)
    packed = 17 * (wire.num_bytes(512) + 260 if bits == "sign" else 2 * wire.num_bytes(512))  # the last line in full
    numbers = 4 * (SUMS_WIDTH + 1)
    assert sent[0] == round((num_workers - 1) * (packed / num_workers + numbers))
    assert sent[1] - sent[0] == 2 * (num_workers - 1) * 400 * 4 // num_workers


def test_a_cluster_counts_two_messages() -> None:
    """4 workers take a step of a second and send their bytes at 1 MB/s, with 10 ms of latency."""
    cluster = Cluster(name="four", speeds=(1.0,) * 4, step_seconds=1.0, bytes_per_second=1e6, latency_seconds=0.01)
    averaging = prsgd.quantized(4, bucket=8)
    _, local, _ = train_fleet([2] * 4, schedule=prsgd.every(1), averaging=averaging, clock=ClusterClock(cluster))
    first, second = local.records
    assert first.hops == second.hops == 2
    assert first.modelled is not None
    assert second.modelled is not None
    took = second.modelled.seconds - first.modelled.seconds
    assert took == pytest.approx(1.0 + second.bytes_sent / 1e6 + 2 * 0.01, abs=1e-9)


# In several processes


def drawn(case: int) -> dict[str, Any]:
    chance = dice.Random(case)
    num_workers = chance.choice([3, 4, 5, 7])
    return {
        "num_workers": num_workers,
        "size": chance.choice([1, 7, 33, 64, 200, 1000]),
        "wire": prsgd.quantized(
            chance.choice((1, 2, 3, 4, 8, 9, "ternary", "sign")), bucket=chance.choice([1, 5, 8, 16, 512]),
            seed=case, way=chance.choice(["auto", "scatter", "scatter"]),
        ),
        "dtype": chance.choice([torch.float32, torch.float64]),
        "steps": [tuple(chance.choice([0, 1, 1, 2, 7]) for _ in range(num_workers)) for _ in range(3)],
    }  # fmt: skip


def averages(comm: Communicator, case: int) -> list[Any]:
    """Three averages in a row of a random wire: targets, what is told, and what travels."""
    given, hosted = drawn(case), comm.workers
    averaging = prsgd.mean("steps", given["wire"])
    memory = averaging.init(random(given["size"], dtype=given["dtype"]), len(hosted))
    found = []
    for average, steps in enumerate(given["steps"]):
        changes = random(given["num_workers"], given["size"], seed=average, dtype=given["dtype"])[list(hosted)]
        exact = torch.full((3,), float(hosted.start == 0), dtype=given["dtype"])
        told = header(tuple(steps[worker] for worker in hosted), given["dtype"], exact)
        landing = averaging.launch(memory, comm, memory["point"] + changes, told).wait(60)
        memory = landing.memory or memory
        sums = landing.header.sums
        found.append((landing.target, landing.bytes_sent, landing.hops, sums.weight, sums.workers))
        assert landing.header.exact.tolist() == [1.0] * 3
    return found


def rank_averages(rank: int, cases: range) -> list[Any]:
    return [averages(prsgd.TorchDistributed(num_workers=drawn(case)["num_workers"]), case) for case in cases]


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_equal_one_to_the_last_bit(processes: int) -> None:
    cases = range(40)
    ranks = run_ranks(rank_averages, processes, cases)
    for case in cases:
        expected = averages(prsgd.InProcess(drawn(case)["num_workers"]), case)
        for found in ranks:
            for (target, *told), (wanted, *should) in zip(found[case], expected, strict=True):
                assert told == should, drawn(case)
                assert (target is None) == (wanted is None)
                assert target is None or torch.equal(target, wanted), drawn(case)


def rank_trains(rank: int, bits: int | str, overlap: int) -> Tensor:
    averaging = prsgd.outer(of=prsgd.mean(wire=prsgd.quantized(bits, bucket=8)))
    row, _, _ = train_model(rank, 9, kind="batchnorm", schedule=prsgd.every(3), overlap=overlap, averaging=averaging)
    return row


@pytest.mark.parametrize(("bits", "overlap"), [(4, 0), (4, 3), ("sign", 2)])
def test_ranks_equal_a_fleet(bits: int | str, overlap: int) -> None:
    averaging = prsgd.outer(of=prsgd.mean(wire=prsgd.quantized(bits, bucket=8)))
    rows, _, _ = train_fleet([9] * 4, kind="batchnorm", schedule=prsgd.every(3), overlap=overlap, averaging=averaging)
    for found in run_ranks(rank_trains, 4, bits, overlap):
        torch.testing.assert_close(found, rows[0], rtol=0, atol=1e-10)


def rank_waits_for_nothing(rank: int) -> bool:
    """Does the second message leave before anybody waits?"""
    comm = prsgd.TorchDistributed()
    called = []

    def combine(lines: Tensor, _: Tensor, owners: range) -> Tensor:
        called.append(owners)
        return lines.sum(dim=0)

    out = torch.zeros(6, 4)
    work = comm.all_combine(torch.ones(1, 6, 4), torch.full((1, 1), float(rank)), combine, out=out)
    until = time.monotonic() + 60
    while not called and time.monotonic() < until:
        time.sleep(0.001)
    early = bool(called)
    assert work.wait(60).tolist() == [[0.0], [1.0], [2.0]]
    assert out.tolist() == [[3.0] * 4] * 6
    assert called == [comm.workers]
    return early


def test_somebody_sees_to_it_while_workers_take_steps() -> None:
    assert run_ranks(rank_waits_for_nothing, 3) == [True] * 3


def rank_leaves(rank: int) -> None:
    comm = prsgd.TorchDistributed(timeout_seconds=60)

    def combine(lines: Tensor, _: Tensor, owners: range) -> Tensor:
        return lines.sum(dim=0)

    comm.all_combine(torch.ones(1, 6, 4), torch.zeros(1, 1), combine, out=torch.zeros(6, 4)).wait()
    if rank == 1:
        comm.close()
        return
    comm.all_combine(torch.ones(1, 6, 4), torch.zeros(1, 1), combine, out=torch.zeros(6, 4)).wait()


def test_a_peer_that_leaves_is_told_of() -> None:
    outcomes = try_ranks(rank_leaves, 3)
    assert outcomes[1] == ("result", None)
    for kind, text in (outcomes[0], outcomes[2]):
        assert kind == "error"
        assert text.startswith("PeerError: a peer failed or left"), text


def rank_dies(rank: int, how: str) -> str:
    """The others have sent it all that they have, and wait for what it makes of that."""
    comm = prsgd.TorchDistributed(timeout_seconds=60)

    def combine(lines: Tensor, _: Tensor, owners: range) -> Tensor:
        if rank == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            raise {"RuntimeError": RuntimeError, "ZeroDivisionError": ZeroDivisionError}[how]("of my own")
        return lines.sum(dim=0)

    out = torch.zeros(6, 4)
    began = time.monotonic()
    work = comm.all_combine(torch.ones(1, 6, 4), torch.zeros(1, 1), combine, out=out)
    try:
        for _ in range(2):  # it says so whenever it is asked
            with pytest.raises((prsgd.PeerError, RuntimeError, ZeroDivisionError)) as told:
                work.wait()
        return f"{told.typename}: {told.value}"
    finally:
        comm.close()
        assert time.monotonic() - began < 30
        assert threading.active_count() == 1


def test_a_peer_that_is_killed_half_way() -> None:
    outcomes = try_ranks(rank_dies, 3, "killed")
    assert outcomes[1] == ("died", -signal.SIGKILL)
    for kind, text in (outcomes[0], outcomes[2]):
        assert kind == "result", text
        assert text.startswith("PeerError: a peer failed or left"), text


@pytest.mark.parametrize("how", ["RuntimeError", "ZeroDivisionError"])
def test_an_error_of_ones_own_is_no_peers_fault(how: str) -> None:
    outcomes = try_ranks(rank_dies, 3, how)
    assert outcomes[1] == ("result", f"{how}: of my own")
    for kind, text in (outcomes[0], outcomes[2]):
        assert kind == "result", text
        assert text.startswith("PeerError: a peer failed or left"), text


def rank_makes_another_dtype(rank: int) -> list[list[float]]:
    comm = prsgd.TorchDistributed()
    out = torch.zeros(5, 4)
    lines = torch.arange(20.0).view(1, 5, 4) * (1 + rank)
    work = comm.all_combine(
        lines, torch.zeros(1, 1), lambda lines, *_: lines.double().sum(dim=0).t().contiguous().t(), out=out
    )
    work.wait(60)
    comm.close()
    return out.tolist()


def test_what_is_made_may_be_of_another_dtype_and_layout() -> None:
    """As in one process, where it is copied: sent as it is, it would be read as something else."""
    expected = (6 * torch.arange(20.0)).view(5, 4).tolist()
    assert run_ranks(rank_makes_another_dtype, 3) == [expected] * 3


class Strict:
    """Messages of two processes with each other as nccl has them: in the order in which each of them started its own,
    one that speaks against one that listens. ``stuck`` are pairs whose turn will never come."""

    def __init__(self, processes: int) -> None:
        self.started: dict[tuple[int, int], list[tuple[str, Tensor]]] = {
            (a, b): [] for a in range(processes) for b in range(processes) if a != b
        }
        self.changed = threading.Condition()
        self.stuck = False

    def end(self, process: int) -> Any:
        def start(kind: str, tensors: list[Tensor], peer: int, tag: int) -> Any:
            with self.changed:
                mine, other = self.started[process, peer], self.started[peer, process]
                turn = len(mine)
                mine.append((kind, tensors[0]))
                self.changed.notify_all()

            def wait(_: object) -> None:
                with self.changed:
                    assert self.changed.wait_for(lambda: len(other) > turn or self.stuck, 60)
                    if self.stuck or other[turn][0] == kind:
                        self.stuck = True
                        self.changed.notify_all()
                        raise AssertionError(f"{process} and {peer} both {kind}")
                    if kind == "recv":
                        tensors[0].copy_(other[turn][1])

            return SimpleNamespace(wait=wait)

        return SimpleNamespace(send=partial(start, "send"), recv=partial(start, "recv"))


def test_of_two_processes_one_speaks_while_the_other_listens() -> None:
    group, outs = Strict(3), torch.zeros(3, 6, 4)

    def run(process: int) -> None:
        peers = Peers(process, [range(p, p + 1) for p in range(3)], timedelta(seconds=60), [1, 2, 3])
        lines, numbers = torch.full((1, 6, 4), float(process + 1)), torch.zeros(3, 1)
        combine_over(
            peers, lines, torch.ones(1, 1), lambda lines, *_: lines.sum(dim=0), outs[process], numbers,
            group.end(process),
        )  # fmt: skip

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(run, process) for process in range(3)]:
            done.result()
    assert outs.unique().tolist() == [6.0]


def test_one_worker_sends_no_messages() -> None:
    averaging = scattered(4)
    memory = averaging.init(torch.zeros(4, dtype=torch.float64), 1)
    landing = averaging.launch(memory, prsgd.InProcess(1), random(1, 4), header((1,))).wait()
    assert (landing.bytes_sent, landing.hops) == (0, 0)


# A communicator of one's own


class Plain(Communicator):
    """Knows no better way to combine than to gather."""

    timeout_seconds = 1.0

    def __init__(self, num_workers: int) -> None:
        self.num_workers, self.workers = num_workers, range(num_workers)

    def all_gather(self, payload: Tensor) -> Work[Tensor]:
        return Done(payload, bytes_sent=1, hops=3)

    all_reduce = exchange = broadcast = close = None  # type: ignore[assignment]


def test_a_communicator_that_only_gathers() -> None:
    averaging, snap = scattered("sign", bucket=8), random(4, 50)
    memory = averaging.init(torch.zeros(50, dtype=torch.float64), 4)
    told = header((1, 2, 0, 3))
    found, expected = (averaging.launch(memory, comm, snap, told).wait() for comm in (Plain(4), prsgd.InProcess(4)))
    assert found.target is not None
    assert expected.target is not None
    assert torch.equal(found.target, expected.target)
    assert found.hops == 3


def test_bytes_of_a_combination_by_hand() -> None:
    """4 workers bring 100 bytes: each sends 75 of its own, and the 10 that it made of 25 to three; 8 more to three."""
    assert bytes_of_combination(4, 100, 40, 8) == 75 + 30 + 24
    assert bytes_of_combination(1, 100, 40, 8) == 0
