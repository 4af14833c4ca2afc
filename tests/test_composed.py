"""Weights x wires x what is done with the mean change: by hand, equal over gloo, resumed to the last bit, in bytes."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prsgd
from prsgd.averaging.base import SUMS_WIDTH, Sums
from prsgd.averaging.weights import Weights
from tests.problems import batch, model
from tests.ranks import run_ranks

WIRES: dict[str, Any] = {
    "full": None,
    "half": prsgd.half(),
    "4 bits": prsgd.quantized(4, bucket=16),
    "4 bits, scattered": prsgd.quantized(4, bucket=16, way="scatter"),
    "sign": prsgd.quantized("sign", bucket=16),
    "sign, scattered": prsgd.quantized("sign", bucket=16, way="scatter"),
    "sparse": prsgd.sparse(0.1),
    "sparse, 2 bits": prsgd.sparse(0.1, bits=2),
}
WEIGHTS = ("uniform", "steps", "samples")
COMPOSED: dict[str, Any] = {
    **{f"{weights}, {name}": prsgd.mean(weights, wire) for name, wire in WIRES.items() for weights in WEIGHTS},
    "quantized diloco": prsgd.outer(0.7, 0.9, of=prsgd.mean(wire=prsgd.quantized(4, bucket=16))),
    "sparseloco": prsgd.outer(0.7, 0.9, of=prsgd.mean(wire=prsgd.sparse(0.02, bits=2))),
    "sparseloco by samples": prsgd.outer(0.7, 0.9, of=prsgd.mean("samples", prsgd.sparse(0.02))),
    **{f"steady, {name}, clipped": prsgd.mean(prsgd.steady(), wire, clip=0.1) for name, wire in WIRES.items()},
    "half slowmo": prsgd.outer(1.0, 0.7, nesterov=False, by_inner_lr=True, of=prsgd.mean("steps", prsgd.half())),
}


def header(n: int, samples: tuple[int, ...] | None = None) -> prsgd.Header:
    empty = torch.zeros(n, 0, dtype=torch.float64)
    return prsgd.Header(
        Sums(workers=n), torch.zeros(0, dtype=torch.float64), empty, counts=(True,) * n, bad=(False,) * n,
        steps=(1,) * n, samples=samples or (1,) * n,
    )  # fmt: skip


def test_quantized_diloco_by_hand() -> None:
    """Changes that lie on levels need no coin. Outer lr 1/2, Nesterov momentum 1/2."""
    averaging = prsgd.outer(0.5, 0.5, of=prsgd.mean(wire=prsgd.quantized(4)))
    comm = prsgd.InProcess(2)
    memory = averaging.init(torch.zeros(2, dtype=torch.float64), 2)
    landing = averaging.launch(
        memory, comm, torch.tensor([[7.0, 1.0], [7.0, 3.0]], dtype=torch.float64), header(2)
    ).wait()
    # The mean change is (7, 2): u = (-7, -2), direction u + u/2 = (-10.5, -3), point (5.25, 1.5).
    assert landing.target.tolist() == [5.25, 1.5]
    memory = landing.memory or {}
    assert memory["point"].tolist() == [5.25, 1.5]
    assert memory["velocity"].tolist() == [-7.0, -2.0]
    # From there by (0, 7) and (14, 0): the wire speaks of the way from the *outer* point. The mean change is (7, 3.5):
    # u = (-3.5 - 7, -1 - 3.5) = (-10.5, -4.5), direction (-7 - 5.25, -3.5 - 2.25), point (5.25 + 6.125, 1.5 + 2.875).
    snap = memory["point"] + torch.tensor([[0.0, 7.0], [14.0, 0.0]], dtype=torch.float64)
    landing = averaging.launch(memory, comm, snap, header(2)).wait()
    assert landing.target.tolist() == [11.375, 4.375]
    assert landing.memory["averages"] == 2


def test_sparseloco_by_hand() -> None:
    """Of two numbers the larger travels, the other is added to the next change. Outer lr 1, momentum 1/2, plain."""
    averaging = prsgd.outer(1.0, 0.5, nesterov=False, of=prsgd.mean(wire=prsgd.sparse(0.5)))
    comm = prsgd.InProcess(2)
    memory = averaging.init(torch.zeros(2, dtype=torch.float64), 2)
    snap = torch.tensor([[4.0, 1.0], [2.0, 6.0]], dtype=torch.float64)
    landing = averaging.launch(memory, comm, snap, header(2)).wait()
    assert landing.target.tolist() == [2.0, 3.0]  # sent (4, 0) and (0, 6)
    assert landing.memory["residuals"].tolist() == [[0.0, 1.0], [2.0, 0.0]]
    # Nobody moves: sent (0, 1) and (2, 0), so (1, 1/2) and half of (2, 3) before.
    landing = averaging.launch(landing.memory or {}, comm, landing.target.expand(2, -1).clone(), header(2)).wait()
    assert landing.target.tolist() == [2.0 + 1.0 + 1.0, 3.0 + 0.5 + 1.5]
    assert landing.memory["residuals"].tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("name", WIRES)
def test_weights_by_samples_with_each_wire_by_hand(name: str) -> None:
    """Worker 0 has three times the samples: (3 * 7 + 1 * -7) / 4. All wires say these changes exactly."""
    averaging = prsgd.mean("samples", WIRES[name])
    memory = averaging.init(torch.zeros(1, dtype=torch.float64), 2)
    snap = torch.tensor([[7.0], [-7.0]], dtype=torch.float64)
    landing = averaging.launch(memory, prsgd.InProcess(2), snap, header(2, (30, 10))).wait()
    assert landing.target.tolist() == [3.5]


def trained(fleet: Any, optimizer: Any, local: Any, steps: range, workers: range) -> None:
    for step in steps:
        pairs = [batch(worker, step) for worker in workers]
        optimizer.zero_grad()
        if isinstance(fleet, prsgd.Fleet):
            fleet.backward(nn.functional.cross_entropy, [x for x, _ in pairs], [y for _, y in pairs])
        else:
            nn.functional.cross_entropy(fleet(pairs[0][0]), pairs[0][1]).backward()
        local.log(samples=[10 + 20 * worker for worker in workers])
        optimizer.step()


def run(name: str, rank: int | None, overlap: int) -> tuple[Tensor, list[Any]]:
    net = model("batchnorm")
    hosted: Any = prsgd.Fleet(net, 2, mode="loop") if rank is None else net
    optimizer = torch.optim.SGD(hosted.parameters(), lr=0.2, momentum=0.9)
    workers = range(2) if rank is None else range(rank, rank + 1)
    averaging = copy.deepcopy(COMPOSED[name])
    with prsgd.LocalSGD(hosted, optimizer, schedule=prsgd.every(3), overlap=overlap, averaging=averaging) as local:
        trained(hosted, optimizer, local, range(11), workers)
    first = hosted.modules[0] if rank is None else hosted
    return (
        torch.cat([t.detach().double().flatten() for t in [*first.parameters(), *first.buffers()]]),
        [(r.round, r.step, r.workers, r.bytes_sent, r.hops, r.samples) for r in local.records],
    )


def every_case(rank: int) -> dict[str, Any]:
    return {f"{name} {overlap}": run(name, rank, overlap) for name in COMPOSED for overlap in (0, 2)}


def test_ranks_equal_the_fleet() -> None:
    first, second = run_ranks(every_case, 2, timeout_seconds=250)
    for name in COMPOSED:
        for overlap in (0, 2):
            model, records = run(name, None, overlap)
            for found, told in (first[f"{name} {overlap}"], second[f"{name} {overlap}"]):
                assert torch.equal(found, model), name
                assert told == records, name


@pytest.mark.parametrize(
    "name",
    [
        "quantized diloco",
        "sparseloco",
        "sparseloco by samples",
        "half slowmo",
        "samples, sign",
        "samples, sign, scattered",
    ],
)
@pytest.mark.parametrize("at", [2, 4, 5])
def test_resumed_to_the_last_bit(name: str, at: int) -> None:
    def fresh() -> tuple[Any, ...]:
        fleet = prsgd.Fleet(model(), 2)
        optimizer = torch.optim.SGD(fleet.parameters(), lr=0.2, momentum=0.9)
        averaging = copy.deepcopy(COMPOSED[name])
        local = prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(3), overlap=2, averaging=averaging)
        return fleet, optimizer, local

    fleet, optimizer, local = fresh()
    with local:
        trained(fleet, optimizer, local, range(10), range(2))
    again, other, part = fresh()
    part.start()
    trained(again, other, part, range(at), range(2))
    states = [copy.deepcopy(each.state_dict()) for each in (again, other, part)]
    again, other, rest = fresh()
    for each, state in zip((again, other, rest), states):
        each.load_state_dict(state)
    with rest:
        trained(again, other, rest, range(at, 10), range(2))
    assert torch.equal(again.rows, fleet.rows)


def test_buffers_travel_once() -> None:
    """Of BatchNorm's statistics each worker sends what a sum takes, and not a copy to everybody."""
    n, p = 8, 1000
    comm, statistics = prsgd.InProcess(n), torch.zeros(400)
    wire = prsgd.quantized(4)
    averaging = prsgd.mean(wire=wire)
    sent = {}
    for name, exact in (("none", torch.zeros(0)), ("some", statistics)):
        given = prsgd.Header(
            Sums(workers=n), exact, torch.zeros(n, 0), counts=(True,) * n, bad=(False,) * n, steps=(1,) * n,
            samples=(1,) * n,
        )  # fmt: skip
        landing = averaging.launch(averaging.init(torch.zeros(p), n), comm, torch.randn(n, p), given).wait()
        sent[name] = landing.bytes_sent
    assert sent["none"] == (n - 1) * (wire.num_bytes(p) + 4 * (1 + SUMS_WIDTH))
    assert sent["some"] - sent["none"] == 2 * (n - 1) * 400 * 4 // n


def test_one_averaging_given_to_two_runs_shares_nothing() -> None:
    for name in COMPOSED:
        averaging = COMPOSED[name]
        fleets = [prsgd.Fleet(model(), 2) for _ in range(2)]
        optimizers = [torch.optim.SGD(fleet.parameters(), lr=0.2, momentum=0.9) for fleet in fleets]
        runs = [
            prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(3), averaging=averaging).start()
            for fleet, optimizer in zip(fleets, optimizers)
        ]
        for step in range(9):  # in turns
            for fleet, optimizer, local in zip(fleets, optimizers, runs):
                trained(fleet, optimizer, local, range(step, step + 1), range(2))
        for local in runs:
            local.finish()
        assert torch.equal(fleets[0].rows, fleets[1].rows), name


# Weights of one's own


def test_a_function_of_what_a_worker_brings() -> None:
    """Worker i's loss is i + 1, and it counts by its inverse: weights 1 and 1/2."""
    fleet = prsgd.Fleet(nn.Linear(1, 1, bias=False).double(), 2)
    with torch.no_grad():
        fleet.rows.zero_()
    optimizer = torch.optim.SGD(fleet.parameters(), lr=1.0)

    def inverse(brought: prsgd.Brought) -> float:
        assert brought.loss is not None
        return 1 / brought.loss

    seen = []
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(1), averaging=prsgd.mean(inverse)) as local:
        for _ in range(2):
            optimizer.zero_grad()
            x = torch.tensor([[[-3.0]], [[3.0]]], dtype=torch.float64)
            fleet.backward(lambda out, _: out.sum(), x, x)
            local.log(loss=torch.tensor([1.0, 2.0]))
            optimizer.step()
            seen.append(float(fleet.rows[0]))
    # By 3 and -3: (3 - 3/2) / (3/2) = 1 each time.
    assert seen == pytest.approx([1.0, 2.0], abs=1e-15)


@dataclass(frozen=True)
class ByRank(Weights):
    """Workers count by the order of what they told in the last average: the one that told most counts 3, others 1."""

    tells = True

    def tell(self, brought: prsgd.Brought) -> float:
        return float(brought.samples)

    def weigh(self, brought: prsgd.Brought) -> float:
        if not brought.told:
            return 1.0
        return 3.0 if brought.told[brought.worker] == max(brought.told) else 1.0


def told(rank: int | None) -> list[float]:
    net = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        net.weight.zero_()
    hosted: Any = prsgd.Fleet(net, 2) if rank is None else net
    workers = range(2) if rank is None else range(rank, rank + 1)
    optimizer = torch.optim.SGD(hosted.parameters(), lr=1.0)
    seen = []
    with prsgd.LocalSGD(hosted, optimizer, schedule=prsgd.every(1), averaging=prsgd.mean(ByRank())) as local:
        for step in range(3):
            optimizer.zero_grad()
            for worker, module in zip(workers, hosted.modules if rank is None else [hosted]):
                (module.weight.sum() * (-4.0 if worker else 4.0)).backward()
            # Worker 1 has more samples in the first round, worker 0 in the second.
            local.log(samples=[100 if worker == (step == 0) else 1 for worker in workers])
            optimizer.step()
            seen.append(float(next(iter(hosted.parameters())).detach()))
    return seen


def test_weights_by_what_all_told_one_average_before() -> None:
    # -4 and 4: alike at first (0); then worker 1 counts 3: +2; then worker 0 does: -2.
    assert told(None) == [0.0, 2.0, 0.0]
    assert run_ranks(told, 2) == [told(None)] * 2


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), "x", None])
def test_a_weight_that_is_none_is_refused(weight: Any) -> None:
    fleet = prsgd.Fleet(model(), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    averaging = prsgd.mean(lambda _: weight)
    local = prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(1), averaging=averaging).start()
    with pytest.raises(ValueError, match=r"a weight must be a number >= 0, got .* for worker 0"):
        trained(fleet, optimizer, local, range(1), range(2))
