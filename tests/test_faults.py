"""Uneven data, models that turn NaN, peers that fail, leave, differ or come late."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import prsgd
from prsgd.comm.works import Pending, translated
from prsgd.core import patience
from tests.problems import batch, model, train_fleet, train_model
from tests.ranks import LIMIT_SECONDS, run_ranks, try_ranks


def rank_uneven(rank: int, num_steps: list[int], overlap: int) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
    _, local, net = train_model(
        rank, num_steps[rank], kind="batchnorm", dtype=torch.float32, schedule=prsgd.every(4), overlap=overlap
    )
    return {k: v.clone() for k, v in net.state_dict().items()}, [(r.round, r.workers) for r in local.records]


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("num_steps", [[5, 9, 14], [0, 4, 8]])
def test_uneven_data_ends_with_one_model(num_steps: list[int], overlap: int) -> None:
    found = run_ranks(rank_uneven, 3, num_steps, overlap)
    for state, records in found[1:]:
        assert records == found[0][1]
        for key, value in state.items():
            assert torch.equal(value, found[0][0][key]), key
    if num_steps == [5, 9, 14]:
        # Round 2: worker 0 brings its fifth step and is done. Round 3: worker 1 its ninth. Then worker 2 is alone.
        assert found[0][1] == [(1, 3), (2, 3), (3, 2), (4, 1)]


def test_nobody_has_data() -> None:
    rows, local, _ = train_fleet([0, 0], schedule=prsgd.every(4))
    assert local.records == []
    assert torch.equal(rows[0], torch.cat([p.detach().flatten() for p in model().parameters()]))


def nan_at(step: int, worker: int, bad_worker: int, net: nn.Module) -> None:
    if worker == bad_worker and step == 7:
        with torch.no_grad():
            next(net.parameters()).fill_(float("nan"))


def rank_nan(rank: int, overlap: int, bad_worker: int) -> Any:
    net = model("batchnorm", torch.float32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    said: list[str] = []
    with (
        warnings.catch_warnings(record=True) as caught,
        prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(4), overlap=overlap) as local,
    ):
        warnings.simplefilter("always")
        for step in range(1, 17):
            x, y = batch(rank, step, torch.float32)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            local.log(loss=loss)
            optimizer.step()
            nan_at(step, rank, bad_worker, net)
        said = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
    state = {k: v.clone() for k, v in net.state_dict().items()}
    return state, [(r.workers, r.bad_workers) for r in local.records], said, [r.loss for r in local.records]


@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_a_worker_that_turns_nan_recovers(overlap: int) -> None:
    found = run_ranks(rank_nan, 3, overlap, 1)
    for state, records, _, losses in found:
        for key, value in state.items():
            assert torch.isfinite(value).all(), key
            assert torch.equal(value, found[0][0][key]), key
        # The NaN comes after step 7; with overlap the snapshot of round 2 is older, and round 3 sees it first.
        assert [i for i, (_, bad) in enumerate(records) if bad] == [2 if overlap else 1]
        assert (2, 1) in records
        assert all(loss is None or loss == loss for loss in losses)
    assert [len(said) for _, _, said, _ in found] == [0, 1, 0]
    assert "worker 1: its model was not finite" in found[1][2][0]


def test_a_bad_worker_in_a_fleet_takes_the_others_mean_and_fresh_momentum() -> None:
    fleet = prsgd.Fleet(model(), 3)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1, momentum=0.9)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2)):
        for t in range(2):
            pairs = [batch(w, t) for w in range(3)]
            optimizer.zero_grad()
            fleet.backward(nn.functional.cross_entropy, [x for x, _ in pairs], [y for _, y in pairs])
            if t == 1:
                # What plain SGD would make of workers 0 and 2.
                after = []
                for m in (fleet.modules[0], fleet.modules[2]):
                    after.append(
                        torch.cat(
                            [
                                (p - 0.1 * (0.9 * optimizer.state[p]["momentum_buffer"] + p.grad)).detach().flatten()
                                for p in m.parameters()
                            ]
                        )
                    )
                next(fleet.modules[1].parameters()).grad.fill_(float("inf"))
                with pytest.warns(RuntimeWarning, match="worker 1"):
                    optimizer.step()
            else:
                optimizer.step()
        torch.testing.assert_close(fleet.rows, ((after[0] + after[1]) / 2).expand(3, -1), rtol=1e-14, atol=1e-15)
        assert [len(optimizer.state[next(m.parameters())]) > 0 for m in fleet.modules] == [True, False, True]


def rank_all_nan(rank: int) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2)):
        for t in range(4):
            x, y = batch(rank, t)
            optimizer.zero_grad()
            (nn.functional.cross_entropy(net(x), y) * float("nan")).backward()
            optimizer.step()


def test_all_bad_is_an_error_on_all() -> None:
    for kind, said in try_ranks(rank_all_nan, 2):
        assert kind == "error"
        assert said.startswith("DivergedError: round 1: no worker has a finite model left"), said


@pytest.mark.filterwarnings("default:worker 2")
@pytest.mark.parametrize("overlap", [0, 1])
def test_the_last_runner_turns_nan_and_takes_the_model_of_those_that_are_done(overlap: int) -> None:
    fleet = prsgd.Fleet(model(), 3)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2), overlap=overlap) as local:
        for t in range(9):
            if t == 2:
                fleet.stop(0)
                fleet.stop(1)
            if t == 5:
                with torch.no_grad():
                    fleet.rows[2].fill_(float("nan"))
            pairs = [batch(w, t) for w in range(3)]
            optimizer.zero_grad()
            fleet.backward(nn.functional.cross_entropy, [x for x, _ in pairs], [y for _, y in pairs])
            optimizer.step()
            if t == (4 if overlap == 0 else 5):  # the last average without the NaN has landed
                kept = fleet.rows[0].clone()
            if t == (5 if overlap == 0 else 7):  # the first one with it
                assert torch.equal(fleet.rows, kept.expand_as(fleet.rows))
    assert torch.isfinite(fleet.rows).all()
    assert torch.equal(fleet.rows, fleet.rows[0].expand_as(fleet.rows))
    assert [r.bad_workers for r in local.records if r.bad_workers] == [1]
    assert [r.workers for r in local.records if r.bad_workers] == [2]


def rank_finished_resume(rank: int) -> Any:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = None
    for _ in range(2):
        local = prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2))
        if state is not None:
            local.load_state_dict(state)
        with local:
            for t in range(4):
                x, y = batch(rank, t)
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
        state = local.state_dict()
    return torch.cat([p.detach().flatten() for p in net.parameters()]), local.step, local.round


def test_going_on_from_a_finished_run() -> None:
    (a, *counted), (b, *also) = run_ranks(rank_finished_resume, 2)
    assert torch.equal(a, b)
    assert counted == also == [8, 4]


def wait_for(place: Path) -> None:
    """What another rank says by making a file: of its connections nothing may be left."""
    limit = time.monotonic() + LIMIT_SECONDS
    while not place.exists():
        assert time.monotonic() < limit, f"no {place.name} in time"
        time.sleep(0.01)


def rank_catches(rank: int, folder: Path) -> str:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    local = prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(1), timeout_seconds=4.0).start()
    said = "none"
    for t in range(3):
        if rank == 1 and t == 1:
            wait_for(folder / "caught")
        x, y = batch(rank, t)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        try:
            optimizer.step()
        except prsgd.PeerError as error:
            said = type(error).__name__
            (folder / "caught").touch()
    try:
        local.finish()
    except prsgd.UsageError as error:
        return f"{said}, {local.round}: {error}"
    return "finished"


def test_a_caught_error_does_not_go_on_as_an_average(tmp_path: Path) -> None:
    assert run_ranks(rank_catches, 2, tmp_path) == [
        "AverageTimeout, 1: finish() after the run failed",
        "PeerError, 1: finish() after the run failed",
    ]


def rank_never_starts(rank: int, folder: Path) -> str:
    net = model()
    local = prsgd.LocalSGD(net, torch.optim.SGD(net.parameters(), lr=0.1), schedule=prsgd.every(1), timeout_seconds=2.0)
    if rank == 1:
        wait_for(folder / "over")
        return "late"
    try:
        local.start()
    except prsgd.PeerError as error:
        return str(error)
    finally:
        (folder / "over").touch()
    return "started"


def test_the_time_limit_holds_on_entering(tmp_path: Path) -> None:
    first, second = run_ranks(rank_never_starts, 2, tmp_path)
    assert second == "late"
    assert first.startswith("process 0 of 2: a peer failed or left")


def rank_fleets_differ(rank: int, what: str) -> None:
    net = nn.Conv2d(2, 2, 3)
    if what == "strides" and rank == 1:
        net.weight.data = net.weight.data.contiguous(memory_format=torch.channels_last)
    fleet = prsgd.Fleet(net, 4 + 2 * rank if what == "num_workers" else 4)
    local = prsgd.LocalSGD(fleet, torch.optim.SGD(fleet.parameters(), lr=0.1), schedule=prsgd.every(1))
    if what == "loaded" and rank == 1:
        other = prsgd.LocalSGD(
            net, torch.optim.SGD(net.parameters(), lr=0.1), schedule=prsgd.once(), comm=prsgd.InProcess()
        )
        state = other.start().state_dict()
        state["setup"] = local._parts.setup
        lane, n = state["lanes"][0], len(fleet.workers)
        for part, name in (
            (lane, "paces"),
            (lane, "accounts"),
            (lane["books"], "pages"),
            (state, "waits"),
            (state, "ailing"),
        ):
            part[name] *= n
        local.load_state_dict(state)
    local.start()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("num_workers", "num_workers must be the same in every process"),
        (
            "strides",
            "worker 2 has parameter 'weight' [2, 2, 3, 3] float32 strides [18, 1, 6, 2], worker 0 has parameter",
        ),
        ("loaded", "worker 2 has a state loaded after 0 averages, worker 0 has no state loaded"),
    ],
)
def test_fleets_that_differ(what: str, said: str) -> None:
    for kind, text in try_ranks(rank_fleets_differ, 2, what):
        assert kind == "error"
        assert text.startswith("MismatchError: ")
        assert said in text


def rank_consensus_when_done(rank: int) -> Tensor:
    fleet = prsgd.Fleet(model(), 4)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    seen = torch.zeros(0)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2), timeout_seconds=60) as local:
        for worker in fleet.workers:
            fleet.stop(worker)
        if rank == 0:
            with local.consensus() as averaged:
                seen = torch.cat([p.detach().flatten() for p in averaged.parameters()])
    return seen


def test_consensus_of_workers_that_are_done() -> None:
    seen, _ = run_ranks(rank_consensus_when_done, 2)
    assert torch.equal(seen, torch.cat([p.detach().flatten() for p in model().parameters()]))


def rank_raises(rank: int, overlap: int, how: str, shape: str) -> tuple[str, str, float]:
    comm = prsgd.TorchDistributed(shape=shape)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    began = time.monotonic()
    try:
        with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(4), overlap=overlap, comm=comm):
            for t in range(10_000):
                if rank == 1 and t == 7:
                    if how == "exit":
                        import os

                        os._exit(3)
                    raise KeyError("mine")
                x, y = batch(rank, t)
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
    except (KeyError, prsgd.PeerError) as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "none", "", 0.0


@pytest.mark.parametrize("how", ["raise", "exit"])
@pytest.mark.parametrize(
    ("overlap", "shape", "ranks"),
    [
        (0, "all-reduce", 4),
        (1, "all-reduce", 4),
        (4, "all-reduce", 4),
        (1, "parameter-server", 4),
        (0, "all-reduce", 2),  # who swap
        (1, "all-reduce", 2),
    ],
)
def test_one_rank_fails_and_all_end(overlap: int, shape: str, ranks: int, how: str) -> None:
    outcomes = try_ranks(rank_raises, ranks, overlap, how, shape)
    for rank, (kind, value) in enumerate(outcomes):
        if rank == 1 and how == "exit":
            assert (kind, value) == ("died", 3)
            continue
        assert kind == "result", outcomes
        name, said, _ = value
        if rank == 1:
            assert (name, said) == ("KeyError", "'mine'")
        else:
            assert name == "PeerError"
            assert f"worker {rank}: a peer failed or left" in said
            assert said.startswith(("round 2", "round 3"))


def rank_late(rank: int, folder: Path) -> str:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    try:
        with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(1), timeout_seconds=4.0):
            for t in range(3):
                if rank == 1 and t == 1:
                    wait_for(folder / "over")
                x, y = batch(rank, t)
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
    except prsgd.PeerError as error:
        (folder / "over").touch()
        return f"{type(error).__name__}: {error}"
    return "none"


def test_the_time_limit_names_round_and_worker(tmp_path: Path) -> None:
    first, second = run_ranks(rank_late, 2, tmp_path)
    assert first == "AverageTimeout: round 2, worker 0: worker 1 did not come within 4 s"
    assert second.startswith("PeerError: round 2, worker 1: a peer failed or left")


def rank_hangs(rank: int, folder: Path) -> str:
    """After some rounds, whose length sets the limit; rounds of this test are shorter than the shortest limit."""
    patience.SHORTEST = 3.0
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    try:
        with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(1)):
            for t in range(9):
                if rank == 2 and t == 6:
                    wait_for(folder / "over")
                x, y = batch(rank, t)
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
    except prsgd.PeerError as error:
        (folder / "over").touch()
        return f"{type(error).__name__}: {error}"
    return "none"


def test_a_hung_worker_is_named_by_a_limit_from_the_rounds(tmp_path: Path) -> None:
    found = run_ranks(rank_hangs, 3, tmp_path)
    late = [line for line in found if "worker 2 did not come within" in line]
    assert late, found
    for line in late:
        assert line.startswith("AverageTimeout: round 7, worker ")
        assert "(the longest round so far took " in line
        assert "timeout_seconds= sets another limit)" in line


def test_a_connection_that_tcp_gave_up_is_no_time_limit() -> None:
    """After a cut cable the waiter's own limit has long not passed."""
    error = translated(RuntimeError("[/gloo/pair.cc:547] Read error [10.0.0.1]:4711: Connection timed out"), 600.0)
    assert type(error) is prsgd.PeerError
    assert str(error) == "a peer failed or left (Read error [10.0.0.1]:4711: Connection timed out)"
    late = translated(RuntimeError("[/gloo/unbound_buffer.cc:81] Timed out waiting 4000ms for recv"), 4.0)
    assert type(late) is prsgd.AverageTimeout


class JustAfter(dist.Work):
    """Over, with or without an error, just after a wait for it was given up."""

    def __init__(self, error: str | None = None) -> None:
        super().__init__()
        self.error, self.waits = error, 0

    def wait(self, timeout: object = None) -> bool:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return self.waits > 0

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return torch.futures.Future()


class Watched:
    """As a communicator that looks every second whether its peers are there."""

    timeout_seconds, is_watched, transfers = 600.0, True, 1

    def lost_seconds(self) -> float:
        return 0.0

    def tell_waiting(self, transfer: int) -> None:
        pass

    def absent(self, transfer: int) -> str:
        return "a peer"


def test_a_transfer_that_comes_just_after_a_look_is_no_time_limit() -> None:
    """Long transfers are waited for second by second: one that ended between two looks was told as ten minutes."""
    flat = torch.ones(3)
    assert Pending(Watched(), JustAfter(), flat, 12).wait() is flat
    with pytest.raises(prsgd.PeerError, match=r"a peer failed or left \(Connection closed by peer\)"):
        Pending(Watched(), JustAfter("Connection closed by peer"), flat, 12).wait()


def rank_of_unlike_speed(rank: int) -> int:
    """Short rounds, then one of 20 steps: where worker 0 takes a second for it, worker 1 takes five."""
    patience.SHORTEST = 2.0
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.post_local(5, 20)) as local:
        for t in range(25):
            if t >= 5:
                time.sleep(0.25 if rank else 0.05)
            x, y = batch(rank, t)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    return local.round


def test_rounds_that_become_longer_make_the_limit_longer() -> None:
    assert run_ranks(rank_of_unlike_speed, 2) == [6, 6]


def rank_early(rank: int) -> int:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with prsgd.LocalSGD(
        net, optimizer, schedule=prsgd.every(10), timeout_seconds=4.0, done_timeout_seconds=60.0
    ) as local:
        for t in range(3 if rank == 0 else 5):
            time.sleep(1.2 * rank)
            x, y = batch(rank, t)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    return local.round


def test_a_worker_that_is_done_has_its_own_time_limit() -> None:
    assert run_ranks(rank_early, 2) == [1, 1]


def rank_differs(rank: int, what: str) -> str:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 2)]
    if rank == 2:
        if what == "shape":
            layers[1] = nn.Linear(4, 3)
        elif what == "dtype":
            layers[1] = nn.Linear(4, 2).double()
        elif what == "frozen":
            layers[1].requires_grad_(False)
        elif what == "more":
            layers.append(nn.Linear(2, 2))
    net: nn.Module = nn.Sequential(*layers)
    if what == "name" and rank == 2:
        net = nn.Sequential()
        net.add_module("0", layers[0])
        net.add_module("head", layers[1])
    before = [p.clone() for p in net.parameters()]
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    try:
        averaging = prsgd.mean("steps" if what == "averaging" and rank == 2 else "uniform")
        overlap = int(what == "overlap" and rank == 2)
        prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(1), averaging=averaging, overlap=overlap).start()
    except prsgd.MismatchError as error:
        assert all(torch.equal(a, b) for a, b in zip(before, net.parameters()))
        return str(error)
    return "none"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("shape", "worker 2 has parameter '1.weight' [3, 4] float32, worker 0 has parameter '1.weight' [2, 4] float32"),
        ("dtype", "worker 2 has parameter '1.weight' [2, 4] float64, worker 0 has parameter '1.weight' [2, 4] float32"),
        (
            "name",
            "worker 2 has parameter 'head.weight' [2, 4] float32, worker 0 has parameter '1.weight' [2, 4] float32",
        ),
        ("frozen", "worker 2 has parameter '1.weight' [2, 4] float32 frozen, worker 0 has parameter '1.weight' [2, 4]"),
        ("more", "worker 2 has parameter '2.weight' [2, 2] float32, worker 0 has optimizer_state 'keep'"),
        (
            "averaging",
            "worker 2 has averaging mean(weights='steps', wire=None, clip=None), "
            "worker 0 has averaging mean(weights='uniform', wire=None, clip=None)",
        ),
        ("overlap", "worker 2 has optimizer_state 'keep', overlap 1, worker 0 has"),
    ],
)
def test_models_that_differ_are_named(what: str, said: str) -> None:
    for text in run_ranks(rank_differs, 3, what):
        assert said in text


def rank_consensus_split(rank: int) -> str:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    try:
        with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2)) as local:
            for t in range(4):
                x, y = batch(rank, t)
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
                if local.step == (3 if rank else 1):
                    with local.consensus():
                        pass
    except prsgd.MismatchError as error:
        return str(error)
    return "none"


def test_consensus_at_different_steps_is_an_error_on_all() -> None:
    for said in run_ranks(rank_consensus_split, 3):
        assert said.startswith(
            "round 1: 1 of 3 workers called consensus() while 2 averaged: every worker must call it, not worker 0 alone"
        )


def rank_consensus_done(rank: int, overlap: int) -> tuple[Tensor, Tensor]:
    """Worker 0 has only 3 steps; the others call consensus() at step 7, and it answers."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = torch.zeros(0)
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(5), overlap=overlap) as local:
        for t in range(3 if rank == 0 else 8):
            x, y = batch(rank, t)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            if local.step == 7:
                own = torch.cat([p.detach().flatten() for p in net.parameters()])
                with local.consensus() as averaged:
                    seen = torch.cat([p.detach().flatten() for p in averaged.parameters()])
                assert torch.equal(own, torch.cat([p.detach().flatten() for p in net.parameters()]))
    return seen, torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("overlap", [0, 2])
def test_done_workers_answer_consensus(overlap: int) -> None:
    found = run_ranks(rank_consensus_done, 3, overlap)
    assert torch.equal(found[1][0], found[2][0])
    # Worker 0's three steps were averaged with round 1, so at step 7 the consensus is the mean of the other two.
    fleet = prsgd.Fleet(model(), 3)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(5), overlap=overlap):
        for t in range(7):
            if t == 3:
                fleet.stop(0)
            pairs = [batch(w, t) for w in range(3)]
            optimizer.zero_grad()
            fleet.backward(nn.functional.cross_entropy, [x for x, _ in pairs], [y for _, y in pairs])
            optimizer.step()
        simulated = (fleet.rows[1] + fleet.rows[2]) / 2
    torch.testing.assert_close(found[1][0], simulated, rtol=1e-12, atol=1e-14)
    for _, final in found:
        assert torch.equal(final, found[0][1])


def test_start_from_worker_0() -> None:
    found = run_ranks(rank_starts, 3)
    assert all(torch.equal(f, found[0]) for f in found)


def rank_starts(rank: int) -> Tensor:
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    net[0].bias.requires_grad_(False)
    net[1].running_mean.fill_(rank)
    if rank == 0:
        net[0].weight.data = net[0].weight.data.half().float()
    local = prsgd.LocalSGD(net, torch.optim.SGD(net.parameters(), lr=0.1), schedule=prsgd.every(3))
    local.start()
    state = torch.cat([t.detach().flatten().double() for t in net.state_dict().values()])
    local.finish()
    return state
