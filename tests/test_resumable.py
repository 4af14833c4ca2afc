"""``prsgd.resumable``: runs that end at any moment and go on, with as many workers and with others."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prsgd
from prsgd.saving.finding import Found, states_of
from prsgd.saving.states import Packed, States
from tests.problems import batch
from tests.ranks import run_ranks, try_ranks


class EndedError(Exception):
    """What a process dies of in these tests."""


def network() -> nn.Module:
    """With all that a state must hold: statistics, random numbers, parameters."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)).double()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([t.detach().double().flatten() for t in model.state_dict().values()])


PARTS: dict[str, dict[str, Any]] = {
    "plain": {"schedule": prsgd.every(2)},
    "overlap": {"schedule": prsgd.every(3), "overlap": 2},
    "outer": {"schedule": prsgd.every(2), "averaging": prsgd.outer(0.7, 0.5)},
    "average": {"schedule": prsgd.every(2), "optimizer_state": "average"},
    "reset": {"schedule": prsgd.every(2), "optimizer_state": "reset"},
    "sparse": {"schedule": prsgd.every(2), "averaging": prsgd.sparse(0.3)},
    "easgd": {"schedule": prsgd.every(2), "averaging": prsgd.easgd()},
    "growing": {"schedule": prsgd.growing(lr_scale=0.05)},
    "auto": {"schedule": prsgd.auto(tolerance=40.0), "overlap": 1},
}

UNEVEN: dict[str, dict[str, Any]] = {
    "alone": {"schedule": prsgd.per_worker([1]), "overlap": 1},
    "two": {"schedule": prsgd.per_worker([1, 3]), "overlap": 1},
}


def train(
    folder: Path, parts: str, *, rank: int = 0, steps: int = 24, end: int | None = None, every: int = 2
) -> dict[str, Any]:
    """Take ``steps`` in all, or die before step ``end``; returns what there is to compare."""
    model = network()
    random.seed(rank)
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.8)
    noted = {"drawn": [0.0]}
    local = prsgd.LocalSGD(model, optimizer, **(PARTS | UNEVEN)[parts], timeout_seconds=30.0)
    held = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "noted": noted}
    with prsgd.resumable(folder, local, every=every, **held) as run:
        began, launched = flat(model), local.launched
        for t in range(run.step, steps):
            if t == end:
                raise EndedError
            x, y = batch(rank, t)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            noted["drawn"] = [*noted["drawn"], random.random()]
            local.log(samples=len(x))
            optimizer.step()
            scheduler.step()
            run.tick()
    return {
        "model": flat(model),
        "began": began,
        "launched": launched,
        "step": run.step,
        "round": run.round,
        "samples": run.samples,
        "rounds": local.round,
        "lr": scheduler.get_last_lr(),
        "drawn": noted["drawn"],
    }


def rank_train(rank: int, folder: Path, parts: str, end: int | None, apart: bool = False) -> dict[str, Any] | str:
    """``apart``: every worker has a folder of its own, as on machines that share no disk."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = train(folder / f"{rank}" if apart else folder, parts, rank=rank, end=end)
        except (EndedError, prsgd.PeerError) as error:
            return type(error).__name__
    return {**found, "said": [str(w.message) for w in said if issubclass(w.category, RuntimeWarning)]}


@pytest.mark.parametrize("parts", PARTS)
def test_one_process_goes_on_to_the_last_bit(parts: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", parts)
    rounds = [whole["round"]]
    for end in (9, 16, 19):
        with pytest.raises(EndedError):
            train(tmp_path / "broken", parts, end=end)
    found = train(tmp_path / "broken", parts)
    assert found["step"] > 0
    assert found["round"] not in rounds
    assert torch.equal(found["model"], whole["model"])
    assert (found["lr"], found["drawn"], found["rounds"]) == (whole["lr"], whole["drawn"], whole["rounds"])


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("parts", PARTS)
def test_processes_go_on_to_the_last_bit(parts: str, apart: bool, tmp_path: Path) -> None:
    whole = run_ranks(rank_train, 2, tmp_path / "whole", parts, None)
    ended = run_ranks(rank_train, 2, tmp_path / "broken", parts, 17, apart)
    assert set(ended) <= {"EndedError", "PeerError"}
    found = run_ranks(rank_train, 2, tmp_path / "broken", parts, None, apart)
    for one, other in zip(found, whole):
        assert one["step"] > 0
        assert torch.equal(one["model"], other["model"])
        assert (one["lr"], one["drawn"], one["rounds"]) == (other["lr"], other["drawn"], other["rounds"])
        assert one["said"] == []
    assert found[0]["samples"] == found[1]["samples"] == sum(one["step"] for one in found) * len(batch(0, 0)[0])


def saved(folder: Path, worker: int, round: int) -> dict[str, Any]:
    found: dict[str, Any] = states_of(folder, worker).load(round)
    return found


@pytest.mark.parametrize("now", [1, 2, 4])
@pytest.mark.parametrize("parts", PARTS)
def test_other_workers_go_on_from_the_mean(parts: str, now: int, tmp_path: Path) -> None:
    run_ranks(rank_train, 3, tmp_path, parts, 17)
    [round] = [max(set.intersection(*(set(states_of(tmp_path, worker).whole()) for worker in range(3))))]
    before = [saved(tmp_path, worker, round) for worker in range(3)]
    found = run_ranks(rank_train, now, tmp_path, parts, None)
    models = [state["parts"]["model"] for state in before]
    mean = torch.cat([torch.stack([m[key].double() for m in models]).mean(0).flatten() for key in models[0]])
    names = [key for key in models[0] for _ in range(models[0][key].numel())]
    second = torch.stack([m["1.running_var"].double() + m["1.running_mean"].double() ** 2 for m in models]).mean(0)
    place = [i for i, name in enumerate(names) if name == "1.running_var"]
    mean[place] = second - mean[[i for i, name in enumerate(names) if name == "1.running_mean"]] ** 2
    counted = [i for i, name in enumerate(names) if name == "1.num_batches_tracked"]
    mean[counted] = models[0]["1.num_batches_tracked"].double()
    for one in found:
        assert torch.allclose(one["began"], mean, rtol=1e-12, atol=1e-14)
        assert torch.equal(one["model"], found[0]["model"])
        assert one["round"] == one["launched"] == round  # or the next state would be written over this one
        assert one["step"] == before[0]["local"]["lanes"][0]["paces"][0]["steps"]
        assert one["rounds"] > round
        assert one["lr"] == found[0]["lr"]
    said = f"after round {round} the run goes on from the mean of 3 workers' states, with {now} now: what"
    assert sum(said in line for one in found for line in one["said"]) == 1
    if now < 3:  # what strangers left is gone when nobody who is there needs it
        left = [int(path.parent.name.removeprefix("round-")) for path in tmp_path.glob("round-*/*-2.*")]
        assert min([*left, round]) >= states_of(tmp_path, 0).whole()[0]


def test_a_worker_that_launches_before_its_first_step(tmp_path: Path) -> None:
    """With a period of 1 and an overlap of 1 start() launches its average, and not the other's: gloo ended a process
    whose sum of samples met that."""
    run_ranks(rank_train, 1, tmp_path, "alone", 9)
    [one, other] = run_ranks(rank_train, 2, tmp_path, "two", None)
    assert one["step"] in (8, 9)  # states are written while it trains: the newest may be there already
    assert one["samples"] == other["samples"] == one["step"] * len(batch(0, 0)[0])
    assert torch.equal(one["model"], other["model"])


def test_there_and_back(tmp_path: Path) -> None:
    """Three workers, then two, then three again: always on from the newest."""
    run_ranks(rank_train, 3, tmp_path, "outer", 9)
    run_ranks(rank_train, 2, tmp_path, "outer", 17)
    [first, second, third] = run_ranks(rank_train, 3, tmp_path, "outer", None)
    assert first["round"] == second["round"] == third["round"] == 8
    assert "the mean of 2 workers' states, with 3 now" in first["said"][0]
    assert torch.equal(first["model"], third["model"])


def test_what_an_averaging_remembers_of_all_stays(tmp_path: Path) -> None:
    run_ranks(rank_train, 3, tmp_path, "outer", 9)
    before = saved(tmp_path, 0, 4)["local"]["lanes"][0]["averaging"]
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    local = prsgd.LocalSGD(model, optimizer, **PARTS["outer"])
    held: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": {}, "noted": {}}
    run = prsgd.resumable(tmp_path, local, **held)
    with pytest.warns(RuntimeWarning, match="from the mean of 3 workers' states, with 1 now"):
        run.__enter__()
    after = local.state_dict()["lanes"][0]["averaging"]
    point = torch.cat([p.detach().flatten() for p in model.parameters()])
    run.__exit__(None, None, None)
    assert torch.equal(after["velocity"], before["velocity"])
    assert torch.equal(after["point"], point)


def damage(folder: Path, worker: int, round: int) -> None:
    path = folder / f"round-{round:08d}" / f"worker-{worker}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_damaged_state_is_passed_over_by_all(tmp_path: Path) -> None:
    whole = run_ranks(rank_train, 2, tmp_path / "whole", "plain", None)
    run_ranks(rank_train, 2, tmp_path / "broken", "plain", 17)
    damage(tmp_path / "broken", 1, 8)
    found = run_ranks(rank_train, 2, tmp_path / "broken", "plain", None)
    assert [one["round"] for one in found] == [6, 6]
    assert [torch.equal(one["model"], other["model"]) for one, other in zip(found, whole)] == [True, True]
    assert all("worker-1.safetensors is damaged" in one["said"][0] for one in found)


def test_no_state_is_whole(tmp_path: Path) -> None:
    with pytest.raises(EndedError):
        train(tmp_path, "plain", end=9)
    for path in tmp_path.glob("round-*/*.json"):
        path.write_text("{")
    with (
        pytest.warns(RuntimeWarning, match="passed over"),
        pytest.raises(prsgd.CheckpointError, match=r"no other state in .* is whole: begin anew in another folder"),
    ):
        train(tmp_path, "plain")


def test_a_newer_version(tmp_path: Path) -> None:
    with pytest.raises(EndedError):
        train(tmp_path, "plain", end=9)
    for path in tmp_path.glob("round-*/manifest-*.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(prsgd.CheckpointError, match="has the format 99, this version of prsgd reads up to 1"):
        train(tmp_path, "plain")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("outer", r"the state is of a run with mean\(\), this one has outer\(\)"),
        ("overlap", "the state is of a run with overlap 0, this one has 2"),
        ("average", "the state is of a run with optimizer state 'keep', this one has 'average'"),
    ],
)
def test_a_folder_of_another_run(other: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(EndedError):
        train(tmp_path, "plain", end=9)
    with pytest.raises(prsgd.CheckpointError, match=said):
        train(tmp_path, other)


def test_a_folder_of_another_model(tmp_path: Path) -> None:
    with pytest.raises(EndedError):
        train(tmp_path, "plain", end=9)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    local = prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(2))
    said = r"are of \['model', 'noted', 'optimizer', 'scheduler'\], this run has \['model', 'optimizer'\]"
    with (
        pytest.raises(prsgd.CheckpointError, match=said),
        prsgd.resumable(tmp_path, local, model=model, optimizer=optimizer),
    ):
        pass
    local = prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(2))
    said = "the state of 'model' in .* does not fit: it has no 'weight' and 1 more, and this one has no "
    with (
        pytest.raises(prsgd.CheckpointError, match=said),
        prsgd.resumable(tmp_path, local, model=model, optimizer=optimizer, scheduler={}, noted={}),
    ):
        pass


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(2))
    with pytest.raises(ValueError, match="must be given the model and all optimizers that local trains"):
        prsgd.resumable(tmp_path, local, model=model)
    with pytest.raises(ValueError, match=r"sampler must have state_dict\(\) and load_state_dict\(\), or be a dict"):
        prsgd.resumable(tmp_path, local, model=model, optimizer=optimizer, sampler=[1, 2])
    with pytest.raises(ValueError, match="every must be a whole number >= 1, got 0"):
        prsgd.resumable(tmp_path, local, every=0, model=model, optimizer=optimizer)


def rank_without_space(rank: int, folder: Path) -> tuple[list[str], int, list[int]]:
    """A disk that takes no file above 100 bytes any more, after the first state."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        local = prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(2))
        with prsgd.resumable(folder, local, every=1, model=model, optimizer=optimizer) as run:
            for t in range(8):
                if t == 4:
                    run._await_writer()
                    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
                x, y = batch(rank, t)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                run.tick()
    return [str(w.message) for w in said], local.round, states_of(folder, 0).whole()


def test_no_space_left(tmp_path: Path) -> None:
    [(said, rounds, whole)] = run_ranks(rank_without_space, 1, tmp_path)
    assert rounds == 4
    assert whole == [1, 2]
    said, [ends] = [[line for line in said if ("records.jsonl" in line) is about] for about in (False, True)]
    assert len(said) == 2
    assert "a state was not saved in" in said[0]
    assert "(File too large); training goes on, and the one before it is kept" in said[0]
    assert "records.jsonl ends with round" in ends
    assert sorted(path.name for path in tmp_path.glob("round-*")) == ["round-00000001", "round-00000002"]


def test_what_a_killed_worker_left_of_a_state_is_removed(tmp_path: Path) -> None:
    """Also of workers that are no more, whom nobody would clear up after."""
    with pytest.raises(EndedError):
        train(tmp_path, "plain", end=9)
    for name in ("round-00000003/.worker-2.safetensors.4711", "round-00000009/worker-5.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("half")
    (tmp_path / "round-00000003" / "a note of mine").write_text("kept")
    train(tmp_path, "plain")
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("round-*/*")}
    assert {name for name in left if not name.endswith(("-0.json", "-0.safetensors"))} == {
        "round-00000003/a note of mine"
    }


def test_a_folder_that_cannot_be_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^folder must be a path, got ''$"):
        train("", "plain")  # type: ignore[arg-type]
    (tmp_path / "file").write_text("mine")
    with pytest.raises(prsgd.CheckpointError, match=r"^states are kept in a folder, and .*file is a file$"):
        train(tmp_path / "file", "plain")


def test_a_model_of_another_dtype(tmp_path: Path) -> None:
    """torch casts what it loads in silence."""

    def run(dtype: torch.dtype) -> int:
        model = nn.Linear(6, 3).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        local = prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(2))
        with prsgd.resumable(tmp_path, local, every=1, model=model, optimizer=optimizer) as run:
            for _ in range(run.step, 4):
                model(torch.ones(1, 6, dtype=dtype)).sum().backward()
                optimizer.step()
                run.tick()
        return run.step

    run(torch.float64)
    with pytest.raises(prsgd.CheckpointError, match="a run with dtype 'float64', this one has 'float32'"):
        run(torch.float32)
    assert run(torch.float64) == 4


def rank_fleet(rank: int, folder: Path, workers: int, end: int | None) -> Any:
    fleet = prsgd.Fleet(network(), workers, seed=3)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.05, momentum=0.9)
    local = prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2), timeout_seconds=30.0)
    try:
        with prsgd.resumable(folder, local, every=2, model=fleet, optimizer=optimizer) as run:
            for t in range(run.step, 16):
                if t == end:
                    raise EndedError
                x, y = zip(*(batch(worker, t) for worker in fleet.workers))
                optimizer.zero_grad()
                fleet.backward(nn.functional.cross_entropy, x, y)
                optimizer.step()
                run.tick()
    except (EndedError, prsgd.PrsgdError) as error:
        return f"{type(error).__name__}: {error}"
    return run.step, flat(fleet.modules[0])


@pytest.mark.parametrize("processes", [1, 2])
def test_a_fleet(processes: int, tmp_path: Path) -> None:
    whole = run_ranks(rank_fleet, processes, tmp_path / "whole", 5, None)
    run_ranks(rank_fleet, processes, tmp_path / "broken", 5, 11)
    found = run_ranks(rank_fleet, processes, tmp_path / "broken", 5, None)
    for (step, model), (_, unbroken) in zip(found, whole):
        assert step == 8
        assert torch.equal(model, unbroken)
    [said, *_] = run_ranks(rank_fleet, processes, tmp_path / "broken", 6, None)
    assert "a Fleet goes on with as many workers in as many processes as it had" in said


@pytest.mark.parametrize("parts", ["plain", "overlap", "growing"])
def test_every_record_is_kept_once(parts: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", parts)
    for end in (9, 16, 19):
        with pytest.raises(EndedError):
            train(tmp_path / "broken", parts, end=end)
    train(tmp_path / "broken", parts)
    found = [
        [json.loads(line) for line in (tmp_path / name / "records.jsonl").read_text().splitlines()]
        for name in ("whole", "broken")
    ]
    assert [record["round"] for record in found[0]] == list(range(1, whole["rounds"] + 1))
    same = ("round", "step", "period", "drift", "lr", "samples", "bytes_sent")
    assert [[record[key] for key in same] for record in found[1]] == [[r[key] for key in same] for r in found[0]]


def rank_uneven(rank: int, folder: Path, end: int | None) -> Any:
    """Worker 0 has 4 batches of an epoch, the other 14: of 7 averages it answers 5 from inside ``epoch()``."""
    model, own = network(), 4 if rank == 0 else 14
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    local = prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(2), timeout_seconds=30.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with prsgd.resumable(folder, local, every=4, model=model, optimizer=optimizer) as run:
                for epoch in range(run.step // own, 5):
                    with local.epoch():
                        for t in range(max(run.step, epoch * own), (epoch + 1) * own):
                            if rank and t == end:
                                raise EndedError
                            x, y = batch(rank, t)
                            optimizer.zero_grad()
                            nn.functional.cross_entropy(model(x), y).backward()
                            optimizer.step()
                            run.tick()
        except (EndedError, prsgd.PeerError) as error:
            return type(error).__name__
    return run.round, flat(model), [str(w.message) for w in said if issubclass(w.category, RuntimeWarning)]


def test_uneven_epochs(tmp_path: Path) -> None:
    """No state is saved that others cannot save: kept are those that all have, and all go on to the last bit."""
    whole = run_ranks(rank_uneven, 2, tmp_path / "whole", None)
    run_ranks(rank_uneven, 2, tmp_path / "broken", 50)
    kept = [states_of(tmp_path / "broken", worker).whole() for worker in range(2)]
    assert kept[0] == kept[1]
    for (round, model, said), (_, unbroken, also_said) in zip(
        run_ranks(rank_uneven, 2, tmp_path / "broken", None), whole
    ):
        assert round == kept[0][-1]
        assert torch.equal(model, unbroken)
        assert said == also_said == []


class Masked(nn.Module):
    """With a mask, as attention has one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def rank_not_finite(rank: int, folder: Path, end: int | None, lost: int) -> Any:
    """A worker loses its model before the average that is saved, and with it its momentum."""
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    local = prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(2), timeout_seconds=30.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            with prsgd.resumable(folder, local, every=4, model=model, optimizer=optimizer) as run:
                momentum = [s["momentum_buffer"].clone() for s in optimizer.state.values()]
                for t in range(run.step, 10):
                    if t == end:
                        raise EndedError
                    x, y = batch(rank, t)
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    if (rank, t) == (lost, 7):
                        next(model.parameters()).data.fill_(float("nan"))
                    optimizer.step()
                    run.tick()
        except (EndedError, prsgd.PeerError) as error:
            return type(error).__name__
    return run.round, flat(model.inner), model.get_buffer("mask"), momentum


@pytest.mark.parametrize("lost", [-1, 0, 1])
def test_the_mean_of_what_there_is(lost: int, tmp_path: Path) -> None:
    run_ranks(rank_not_finite, 2, tmp_path, 9, lost)
    states = [saved(tmp_path, worker, 4)["parts"]["optimizer"]["state"] for worker in range(2)]
    assert [bool(state) for state in states] == [worker != lost for worker in range(2)]
    [(round, model, mask, momentum)] = run_ranks(rank_not_finite, 1, tmp_path, None, -1)
    assert round == 4
    assert torch.isfinite(model).all()
    assert torch.equal(mask, Masked().get_buffer("mask"))
    known = [state for state in states if state] if lost else []  # what worker 0 has not, nobody begins with
    means = [torch.stack([s[i]["momentum_buffer"] for s in known]).mean(0) for i in (known[0] if known else ())]
    assert len(momentum) == len(means)
    assert all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(momentum, means))


def rank_logs(rank: int, folder: Path, end: int | None, first: bool) -> Any:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    local = prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(2), timeout_seconds=30.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            with prsgd.resumable(folder, local, every=2, model=model, optimizer=optimizer) as run:
                for t in range(run.step, 12):
                    if t == end:
                        raise EndedError
                    x, y = batch(rank, t)
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    if first:
                        local.log(samples=1)
                    optimizer.step()
                    if not first:
                        local.log(samples=1)
                    run.tick()
        except (EndedError, prsgd.PeerError) as error:
            return type(error).__name__
    return run.step, run.samples, [(record.round, record.samples) for record in local.records]


@pytest.mark.parametrize("first", [True, False])
def test_samples_of_others(first: bool, tmp_path: Path) -> None:
    """Three workers, then two, then three: all their samples are counted, and each in its own round."""
    run_ranks(rank_logs, 3, tmp_path, 5, first)
    run_ranks(rank_logs, 2, tmp_path, 9, first)
    for step, samples, records in run_ranks(rank_logs, 3, tmp_path, None, first):
        assert (step, samples) == (8, 3 * 4 + 2 * 4)
        assert records[-2:] == [(5, 6), (6, 6)]


def rounds_in(folder: Path) -> list[int]:
    return [json.loads(line)["round"] for line in (folder / "records.jsonl").read_text().splitlines()]


def test_records_when_worker_0_is_elsewhere(tmp_path: Path) -> None:
    """The file begins in the middle, and no record is in it twice all the same."""
    with pytest.raises(EndedError):
        train(tmp_path, "plain", end=9)
    (tmp_path / "records.jsonl").unlink()
    with pytest.raises(EndedError):
        train(tmp_path, "plain", end=19, every=4)
    train(tmp_path, "plain")
    assert rounds_in(tmp_path) == list(range(4, 13))


def test_records_of_a_disk_that_was_full(tmp_path: Path) -> None:
    """A line that ends in the middle is cut off, with what may come after it."""
    with pytest.raises(EndedError):
        train(tmp_path, "plain", end=9)
    lines = (tmp_path / "records.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "records.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:30])
    train(tmp_path, "plain")
    assert rounds_in(tmp_path) == [1, 2, *range(4, 13)]


def rank_refuses(rank: int, folder: Path, fault: str) -> str:
    """Worker 1 cannot go on, and stays."""
    own = folder / str(rank)
    if fault == "format" and rank:
        for path in own.glob("round-*/manifest-*.json"):
            path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    if fault == "no folder" and rank:
        own = own / "round-00000008" / "manifest-1.json" / "no folder"
    if fault == "no records" and not rank:
        (own / "records.jsonl").unlink()
        (own / "records.jsonl").mkdir()
    try:
        train(own, "plain", rank=rank)
    except (prsgd.PrsgdError, OSError) as error:
        time.sleep(3.0)
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("fault", "here", "there"),
    [
        ("format", "CheckpointError: checkpoint .* has the format 99", "CheckpointError: worker 1: .* the format 99"),
        ("no folder", "NotADirectoryError: ", "CheckpointError: worker 1: .*Not a directory"),
        ("no records", "PeerError: round 9, worker 1: a peer failed or left", "IsADirectoryError: "),
    ],
)
def test_what_ends_one_ends_all(fault: str, here: str, there: str, tmp_path: Path) -> None:
    run_ranks(rank_train, 2, tmp_path, "plain", 17, True)
    [other, one] = run_ranks(rank_refuses, 2, tmp_path, fault, timeout_seconds=30.0)
    assert re.match(here, one)
    assert re.match(there, other)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({("a", 1): 2.0}, r"dicts with plain keys, got the key \('a', 1\)"),
        ({torch.float32: 1}, "dicts with plain keys, got the key torch.float32"),
        ({"seen": {1, 2}}, "plain values and tensors, got set"),
        ({"graph": torch.eye(2).to_sparse()}, "dense tensors, got one that is torch.sparse_coo"),
    ],
)
def test_what_cannot_be_saved_is_told_at_once(value: dict[Any, Any], said: str, tmp_path: Path) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(2))
    with pytest.raises(ValueError, match=f"noted has a state that cannot be saved: a checkpoint holds {said}"):
        prsgd.resumable(tmp_path, local, model=model, optimizer=optimizer, noted=value)


def test_a_writer_that_fails_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no matter of the disk does not pass in silence."""

    def fail(self: Packed) -> tuple[bytes, bytes]:
        raise MemoryError("no room for a copy")

    monkeypatch.setattr(Packed, "content", fail)
    with pytest.raises(MemoryError, match="no room for a copy"):
        train(tmp_path, "plain")


def rank_with_a_slow_disk(rank: int, folder: Path) -> str:
    """Worker 1 is killed while it writes its fourth state, and worker 0 has written its fifth."""
    write = States.write

    def slowly(self: States, number: int, packed: Packed, **said: Any) -> None:
        if rank and number == 4:
            while not (folder / "round-00000005" / "manifest-0.json").exists():
                time.sleep(0.01)
            time.sleep(0.2)
            os._exit(1)
        write(self, number, packed, **said)

    States.write = slowly  # type: ignore[method-assign]
    try:
        train(folder, "plain", rank=rank, every=1)
    except prsgd.PeerError as error:
        return type(error).__name__
    return "nothing"


def test_a_slow_disk(tmp_path: Path) -> None:
    """So much is kept that there is a state of all, wherever the last one is still written."""
    whole = run_ranks(rank_train, 2, tmp_path / "whole", "plain", None)
    assert try_ranks(rank_with_a_slow_disk, 2, tmp_path / "broken") == [("result", "PeerError"), ("died", 1)]
    found = run_ranks(rank_train, 2, tmp_path / "broken", "plain", None)
    assert [one["round"] for one in found] == [3, 3]
    assert [torch.equal(one["model"], other["model"]) for one, other in zip(found, whole)] == [True, True]


def test_all_forget_at_the_same_time(tmp_path: Path) -> None:
    """In a folder that they share, what one is about to remove another has removed."""
    failed = []

    def forget(folder: Path) -> None:
        try:
            Found("", 0, 4, exact=True, bearers={}).forget_newer(folder)
        except OSError as error:
            failed.append(error)

    for n in range(20):
        for place in (tmp_path / str(n) / f"round-{round:08d}" for round in range(1, 7)):
            place.mkdir(parents=True)
            for worker in range(4):
                (place / f"manifest-{worker}.json").touch()
        threads = [threading.Thread(target=forget, args=(tmp_path / str(n),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert list((tmp_path / str(n)).iterdir()) == []
    assert failed == []


def test_states_of_another_run(tmp_path: Path) -> None:
    """A machine that was in another run has states with the same numbers: they are not taken for this one's."""
    for name in ("one", "other"):
        run_ranks(rank_train, 2, tmp_path / name, "plain", 17, True)
    shutil.rmtree(tmp_path / "one" / "1")
    shutil.copytree(tmp_path / "other" / "1", tmp_path / "one" / "1")
    found = run_ranks(rank_train, 2, tmp_path / "one", "plain", None, True)
    assert [one["round"] for one in found] == [8, 8]
    assert "after round 8 the run goes on from one worker's state, with 2 now" in found[0]["said"][0]
    assert torch.equal(found[0]["began"], found[1]["began"])


def test_workers_that_come_and_go_are_told_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that came back looked for states where the others averaged, and all of them hung."""
    net = torch.nn.Linear(2, 1)
    local = prsgd.LocalSGD(net, torch.optim.SGD(net.parameters(), lr=0.1), schedule=prsgd.every(2))
    monkeypatch.setattr(type(local.comm), "is_elastic", True)
    with pytest.raises(ValueError, match="resumable is for workers that start together"):
        prsgd.resumable(tmp_path, local, model=net)
