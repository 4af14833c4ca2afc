"""A worker that is broken: what ``steady()`` leaves out, what ``clip`` bounds, and what neither may touch."""

from __future__ import annotations

import math
import pickle
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import prsgd
from prsgd.averaging.base import Sums
from prsgd.averaging.steady import EPSILON
from tests.problems import batch, model, walk
from tests.ranks import run_ranks, try_ranks

WIRES: dict[str, Any] = {
    "full": None,
    "half": prsgd.half(),
    "4 bits": prsgd.quantized(4, bucket=16),
    "4 bits, scattered": prsgd.quantized(4, bucket=16, way="scatter"),
    "sign": prsgd.quantized("sign", bucket=16),
    "sparse": prsgd.sparse(0.1),
}
STEADY: dict[str, Any] = {
    **{name: prsgd.mean(prsgd.steady(), wire) for name, wire in WIRES.items()},
    "edit": prsgd.outer(0.7, 0.8, of=prsgd.mean(prsgd.steady(penalty=1.0), clip=0.5)),
    "by samples": prsgd.mean(prsgd.steady(of="samples")),
}
FAR = pytest.mark.filterwarnings("ignore:round .* was left out")


# The rule, by itself


def brought(worker: int, norm: float | None, known: tuple[float, ...]) -> prsgd.Brought:
    return prsgd.Brought(worker, 8, 256, known, _change=lambda: norm)


def rounds_of(norms: Sequence[Sequence[float]], rule: prsgd.steady | None = None) -> list[tuple[list[float], Any]]:
    """The weights of workers whose changes have these norms, round by round, and who was left out."""
    rule, found = rule or prsgd.steady(), []
    known: tuple[float, ...] = ()
    for of_round in norms:
        bring = [brought(i, norm, known) for i, norm in enumerate(of_round)]
        told = tuple(rule.tell(b) for b in bring)
        found.append(([rule.weigh(b) for b in bring], rule.left_out(told)))
        known = rule.hear(known, told)
    return found


def test_the_limit_by_hand() -> None:
    """Of two workers with log norms of 0 on average, and deviations of 0.4 and 0.8, z = 3: e^1.2 and e^2.4."""
    known = (0.0, 0.0, 0.16, 0.64, 0.0, 0.0)
    rule = prsgd.steady()
    # Both have to be surpassed, so the limit is e^2.4 = 11.02 for either of them.
    for worker in (0, 1):
        assert rule.weigh(brought(worker, 11.0, known)) == 1.0
        assert rule.tell(brought(worker, 11.0, known)) == 11.0
        assert rule.weigh(brought(worker, 2 * math.exp(2.4), known)) == pytest.approx(EPSILON / 2)
        assert rule.tell(brought(worker, 11.1, known)) == -11.1
        assert rule.distrusts(brought(worker, 11.1, known))
        assert not rule.distrusts(brought(worker, 11.0, known))
    # Worker 1 was left out: half of its own deviations is e^1.2 = 3.32, and so are three of the other's.
    out = (*known[:4], 0.0, 1.0)
    assert rule.weigh(brought(1, 3.31, out)) == 1.0
    assert rule.weigh(brought(1, 3.33, out)) < EPSILON
    # However sure, e times the usual is not too much: z times a third.
    sure = (0.0, 0.0, 1e-9, 1e-9, 0.0, 0.0)
    assert rule.weigh(brought(0, 2.71, sure)) == 1.0
    assert rule.weigh(brought(0, 2.72, sure)) < EPSILON
    # What is too far to be anything is not even read, and one that stands still counts.
    assert rule.weigh(brought(0, 1e30, known)) == rule.weigh(brought(0, math.inf, known)) == 0.0
    assert rule.weigh(brought(0, 0.0, known)) == rule.weigh(brought(0, None, known)) == 1.0
    # EDiT's softmax of minus the norms.
    soft = prsgd.steady(penalty=1.0)
    ratio = soft.weigh(brought(0, 0.5, known)) / soft.weigh(brought(1, 2.0, known))
    assert ratio == pytest.approx(math.exp(1.5))


def test_what_is_usual_by_hand() -> None:
    rule = prsgd.steady()
    known = rule.hear((), (-1.0, -math.e))
    assert known == pytest.approx((0.0, 1.0, 1.0, 1.0, 0.0, 0.0))  # at first nobody knows: e^0, e^1, a factor of e
    # A fifth of what is new: 0 + 2 / 5; variance (1 + 4 / 5) * 4 / 5. Worker 1 is beyond, and not believed.
    # What is usual for it goes along with what is for the other: 1 + 2 / 5.
    known = rule.hear(known, (math.exp(2.0), -1e9))
    assert known == pytest.approx((0.4, 1.4, 1.44, 1.0, 0.0, 1.0))
    # Worker 0 says nothing (it is not finite, or done), worker 1 is back.
    known = rule.hear(known, (0.0, math.exp(1.4)))
    assert known == pytest.approx((0.4, 1.4, 1.44, 0.8, 0.0, 0.0))
    # Both have jumped: what is usual begins anew, but not with what is far beyond the other.
    known = rule.hear(known, (-1e3, -1e9))
    assert known == pytest.approx((math.log(1e3), math.log(1e3) + 3.0, 1.0, 1.0, 0.0, 0.0))


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("factor", [10.0, 0.1, 1e4])
def test_a_change_of_the_lr_leaves_nobody_out(workers: int, factor: float) -> None:
    """Back and forth, after few rounds and after many."""
    draw = torch.Generator().manual_seed(workers)
    norms = []
    for part, length in enumerate((2, 5, 40, 40, 3, 30)):
        noise = torch.randn(length, workers, generator=draw).mul(0.1).exp() * (factor if part % 2 else 1.0)
        norms += noise.tolist()
    found = rounds_of(norms)
    assert all(out == () for _, out in found)
    for weights, _ in found:  # nobody counts for less than a third of another: not even where all have jumped
        assert min(weights) > max(weights) / 3 > 0


def test_rounds_that_grow_leave_nobody_out() -> None:
    """By a fifth each time, by powers of two now and then, and as momentum builds up."""
    growths: list[Callable[[int], float]] = [
        lambda s: 1.2**s, lambda s: 2.0 ** (s // 7), lambda s: 1 - 0.9**s, lambda s: math.ceil(s ** (1 / 3)),
    ]  # fmt: skip
    for grow in growths:
        draw = torch.Generator().manual_seed(1)
        norms = [(torch.randn(8, generator=draw).mul(0.05).exp() * grow(s)).tolist() for s in range(1, 60)]
        assert sum(len(out) for _, out in rounds_of(norms)) == 0


def test_workers_that_always_differ_are_not_left_out() -> None:
    draw = torch.Generator().manual_seed(1)
    scale = torch.tensor([1.0, 1.0, 1.0, 16.0])
    norms = [(torch.randn(4, generator=draw).mul(0.05).exp() * scale).tolist() for _ in range(60)]
    assert all(out == () for _, out in rounds_of(norms))


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("begins", [0, 1, 2, 30])
@pytest.mark.parametrize("size", [1e3, 1e30, math.inf])
def test_one_that_is_far_off_is_left_out_as_long_as_it_is(workers: int, begins: int, size: float) -> None:
    """Also from the first round on, and also for hundreds of rounds: what it does never becomes usual."""
    draw = torch.Generator().manual_seed(workers)
    norms = torch.randn(300, workers, generator=draw).mul(0.1).exp()
    norms[begins : begins + 200, 1] *= size
    for s, (weights, out) in enumerate(rounds_of(norms.tolist())):
        assert out == ((1,) if begins <= s < begins + 200 else ())
        if out:
            assert weights[1] < weights[0] / 500
        elif s:
            assert weights == [1.0] * workers


@given(
    st.lists(
        st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e3), st.floats(1e-9, 1e9)), min_size=3, max_size=3),
        min_size=1,
        max_size=20,
    )
)
def test_somebody_always_counts(norms: list[list[float]]) -> None:
    """And the mean change is never longer than the longest of those that are not left out, but for rounding."""
    for of_round, (weights, out) in zip(norms, rounds_of(norms)):
        assert all(weight >= 0 for weight in weights)
        assert sum(weights) > 1e-36
        assert len(out) < 3
        moved = sum(weight * norm for weight, norm in zip(weights, of_round)) / sum(weights)
        kept = [norm for i, norm in enumerate(of_round) if i not in out]
        assert moved <= max(kept) * (1 + 1e-9) or len(set(map(bool, of_round))) > 1 or moved <= 3 * min(of_round)


# In a mean


def header(n: int, known: tuple[float, ...], averaging: Any, memory: Any, snap: Tensor) -> prsgd.Header:
    empty = torch.zeros(n, 0, dtype=torch.float64)
    return prsgd.Header(
        Sums(workers=n), empty[0], empty, counts=(True,) * n, bad=(False,) * n, steps=(1,) * n, samples=(1,) * n,
        told=known, changes=averaging.measure(memory, snap),
    )  # fmt: skip


@pytest.mark.parametrize("name", WIRES)
def test_an_outlier_adds_nothing(name: str) -> None:
    """By hand: from (1, 1) two go by (7, 1) and (7, 3) and one by 1e30, or by as much as float64 holds."""
    averaging = prsgd.mean(prsgd.steady(), WIRES[name])
    point = torch.ones(2, dtype=torch.float64)
    memory = averaging.init(point, 3)
    known = (*[math.log(7.0)] * 3, *[0.01] * 3, *[0.0] * 3)
    for huge in (1e30, 1e308):
        snap = point + torch.tensor([[7.0, 1.0], [huge, -huge], [7.0, 3.0]], dtype=torch.float64)
        given = header(3, known, averaging, memory, snap)
        target = averaging.launch(memory, prsgd.InProcess(3), snap, given).wait().target
        assert target is not None
        assert bool(target.isfinite().all())
        plain = prsgd.mean(wire=WIRES[name])
        others = snap[[0, 2]]
        landing = plain.launch(
            plain.init(point, 2), prsgd.InProcess(2), others, header(2, (), plain, {}, others)
        ).wait()
        assert landing.target is not None
        if "4 bits" not in name:  # which draws other numbers for other workers
            assert torch.equal(target, landing.target)


def test_the_first_average_counts_by_the_inverse_of_the_norms() -> None:
    """By 1, 4 and 1e30: (1 / 1 + 4 / 4 + 1) / (1 + 1 / 4 + 1e-30) = 3 / 1.25."""
    averaging = prsgd.mean(prsgd.steady())
    point = torch.zeros(1, dtype=torch.float64)
    memory = averaging.init(point, 3)
    snap = torch.tensor([[1.0], [4.0], [1e30]], dtype=torch.float64)
    landing = averaging.launch(memory, prsgd.InProcess(3), snap, header(3, (), averaging, memory, snap)).wait()
    assert landing.target is not None
    assert float(landing.target) == pytest.approx(2.4)
    assert float(landing.memory["point"]) == float(landing.target)


def test_a_clip_by_hand() -> None:
    """Pulled from 0 to 4 and 8 by halves: 2 and 4, on average 3, of which 1 is taken. From there 2.5 and 4.5: to 2."""
    path, local = walk([4.0, 8.0], schedule=prsgd.every(1), steps=2, averaging=prsgd.mean(clip=1.0))
    assert path == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    # The drift is from the mean: 1 on both sides, each time.
    assert [record.drift for record in local.records] == [1.0, 1.0]
    # A run that ends within a round ends with the mean of the models: from 1, 2.5 and 4.5 on average.
    path, _ = walk([4.0, 8.0], schedule=prsgd.every(2), steps=3, averaging=prsgd.mean(clip=1.0))
    assert path == [[2.0, 4.0], [1.0, 1.0], [2.5, 4.5], [3.5, 3.5]]


def test_a_clip_with_overlap_by_hand() -> None:
    """Gradients at (0, 0), then the first average lands: of (2, 4), clipped to 1, and each goes on by its gradient."""
    path, _ = walk([4.0, 8.0], schedule=prsgd.every(2), steps=4, overlap=1, averaging=prsgd.mean(clip=1.0))
    # Step 2: gradients 2 - 4 and 4 - 8; from 1 to 2 and 3. Step 3: 3 and 5.5, the snapshots; the mean is 4.25, whose
    # change from 1 is clipped: 2. Step 4: gradients -1 and -2.5; from 2 to 2.5 and 3.25.
    assert path[:4] == [[2.0, 4.0], [2.0, 3.0], [3.0, 5.5], [2.5, 3.25]]


def test_an_outer_step_of_a_clipped_mean_by_hand() -> None:
    """The mean change 3 is clipped to 1; an outer lr of 2 makes it 2. From there 3 and 5: +2, clipped, doubled: 4."""
    averaging = prsgd.outer(2.0, 0.0, of=prsgd.mean(clip=1.0))
    path, _ = walk([4.0, 8.0], schedule=prsgd.every(1), steps=2, averaging=averaging)
    assert path[:2] == [[2.0, 2.0], [4.0, 4.0]]


@pytest.mark.parametrize("wire", WIRES)
def test_a_clip_bounds_every_move_and_a_wide_one_none(wire: str) -> None:
    paths = {}
    for clip in (None, 1e9, 0.01):
        fleet = prsgd.Fleet(model(), 3)
        optimizer = torch.optim.SGD(fleet.parameters(), lr=0.2)
        points = [fleet.rows[0].clone()]
        averaging = prsgd.mean(wire=WIRES[wire], clip=clip)
        with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2), averaging=averaging) as local:
            for step in range(8):
                pairs = [batch(w, step) for w in range(3)]
                optimizer.zero_grad()
                fleet.backward(nn.functional.cross_entropy, [x for x, _ in pairs], [y for _, y in pairs])
                optimizer.step()
                if step % 2:
                    points.append(fleet.rows[0].clone())
                else:
                    with local.consensus() as seen:  # is not clipped
                        found = torch.cat([p.detach().flatten() for p in seen.parameters()])
                    torch.testing.assert_close(found, fleet.rows.mean(dim=0), rtol=0, atol=1e-14)
        paths[clip] = torch.stack(points)
    assert torch.equal(paths[None], paths[1e9])
    moves = (paths[0.01][1:] - paths[0.01][:-1]).norm(dim=1)
    torch.testing.assert_close(moves, torch.full_like(moves, 0.01), rtol=1e-9, atol=0)


def test_a_clip_of_a_sum_that_overflows_stays_where_it_is() -> None:
    averaging = prsgd.mean(clip=1.0)
    memory = averaging.init(torch.ones(2), 2)
    snap = torch.full((2, 2), 3e38)
    landing = averaging.launch(
        memory, prsgd.InProcess(2), snap, _float32(header(2, (), averaging, memory, snap))
    ).wait()
    assert landing.target.tolist() == [1.0, 1.0]


def _float32(given: prsgd.Header) -> prsgd.Header:
    vars(given).update(exact=given.exact.float(), extras=given.extras.float())
    return given


@dataclass(frozen=True)
class ByChange(prsgd.Weights):
    """The longer the way, the more."""

    measures: ClassVar[bool] = True

    def weigh(self, brought: prsgd.Brought) -> float:
        assert brought.change is not None
        return brought.change


def test_weights_of_ones_own_may_go_by_the_change() -> None:
    """2 and 4 from 0: (2 * 2 + 4 * 4) / 6."""
    path, _ = walk([4.0, 8.0], schedule=prsgd.every(1), steps=1, averaging=prsgd.mean(ByChange()))
    assert path[0] == pytest.approx([20 / 6] * 2)


# In a run


def run(
    rank: int | None,
    averaging: Any,
    overlap: int,
    faults: dict[tuple[int, int], float],
    *,
    steps: int = 24,
    stop_at: int | None = None,
) -> tuple[Tensor, list[Any], list[str]]:
    """Three workers in one process, or the one of a rank. After an update, faults multiply the model of (worker, step):
    what every rank, or the fleet's last worker ends with, parameters and buffers; the records; the warnings."""

    def build() -> tuple[Any, Any, Any]:
        net = model("batchnorm")
        hosted: Any = prsgd.Fleet(net, 3, mode="loop") if rank is None else net
        optimizer = torch.optim.SGD(hosted.parameters(), lr=0.05, momentum=0.9)
        modules = hosted.modules if rank is None else [net]

        def spoil(*_: Any) -> None:
            for worker, module in zip(range(3) if rank is None else [rank], modules):
                for tensor in [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]:
                    tensor.data.mul_(faults.get((worker, at), 1.0))

        optimizer.register_step_post_hook(spoil)  # before the run's own hook
        options = {"schedule": prsgd.every(3), "overlap": overlap, "averaging": averaging}
        return hosted, optimizer, prsgd.LocalSGD(hosted, optimizer, timeout_seconds=60, **options)

    at, records = 0, []
    hosted, optimizer, local = build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        local.start()
        for at in range(1, steps + 1):
            if at == stop_at:
                saved = pickle.dumps([hosted.state_dict(), optimizer.state_dict(), local.state_dict()])
                records = list(local.records)
                hosted, optimizer, local = build()
                for part, state in zip((hosted, optimizer, local), pickle.loads(saved)):
                    part.load_state_dict(state)
                local.start()
            optimizer.zero_grad()
            for worker, module in zip(
                range(3) if rank is None else [rank], hosted.modules if rank is None else [hosted]
            ):
                x, y = batch(worker, at)
                nn.functional.cross_entropy(module(x), y).backward()
            local.log(samples=4)
            optimizer.step()
        local.finish()
    known = {r.round: (r.step, r.workers, r.bad_workers, r.outliers) for r in [*records, *local.records]}
    last = hosted.modules[-1] if rank is None else hosted
    tensors = [t.detach().double().flatten() for t in [*last.parameters(), *last.buffers()]]
    return torch.cat(tensors), [known[r] for r in sorted(known)], [str(w.message) for w in caught]


ONCE = {(1, 12): 1e30}
OVER_AND_OVER = {(1, step): 1e8 for step in range(3, 25, 3)}


def every_case(rank: int) -> dict[Any, Any]:
    return {(name, overlap): run(rank, STEADY[name], overlap, ONCE) for name, overlap in product(STEADY, (0, 2))}


def test_ranks_equal_the_fleet_with_one_that_breaks_once() -> None:
    ranks = run_ranks(every_case, 3, timeout_seconds=250)
    for name, overlap in product(STEADY, (0, 2)):
        found, records, said = run(None, STEADY[name], overlap, ONCE)
        assert bool(found.isfinite().all())
        assert found.abs().max() < 50
        hit = 4 if overlap else 3  # with overlap the snapshot of the round that lands at step 12 is older
        assert [out for *_, out in records] == [int(i == hit) for i in range(len(records))], name
        assert [workers for _, workers, *_ in records] == [3 - int(i == hit) for i in range(len(records))]
        assert all(bad == 0 for _, _, bad, _ in records)
        assert [text.split(":")[:2] for text in said] == [[f"round {hit + 1}", " worker 1 was left out of the average"]]
        for rank, cases in enumerate(ranks):
            theirs, told, heard = cases[name, overlap]
            torch.testing.assert_close(
                theirs, found, rtol=1e-2 if name == "half" else 1e-9, atol=1e-2 if name == "half" else 1e-9
            )
            assert [r[1:] for r in told] == [
                r[1:] for r in records
            ]  # worker 1 is a step behind, and the fleet's last not
            assert len(heard) == (rank == 0)  # once, where worker 0 is


@pytest.mark.parametrize("name", STEADY)
@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_one_that_breaks_over_and_over_is_left_out_of_all(name: str, overlap: int) -> None:
    found, records, said = run(None, STEADY[name], overlap, OVER_AND_OVER)
    assert bool(found.isfinite().all())
    assert found.abs().max() < 50
    out = [out for *_, out in records]
    if overlap:  # a step that is dropped puts its rounds and the faults out of step, and some hit what is replaced
        assert set(out) == {0, 1}
        assert sum(out) >= 3
    else:
        assert out == [1] * 8
    assert len(said) == 1


@pytest.mark.parametrize("name", ["full", "sparse", "sign", "edit"])
@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("stop_at", [10, 12, 13, 14, 15, 16])
def test_a_run_stopped_around_a_fault_goes_on_to_the_last_bit(name: str, overlap: int, stop_at: int) -> None:
    whole, records, _ = run(None, STEADY[name], overlap, ONCE)
    again, told, _ = run(None, STEADY[name], overlap, ONCE, stop_at=stop_at)
    assert torch.equal(again, whole)
    assert told == records


def test_those_that_are_well_are_averaged_as_if_there_were_no_other() -> None:
    """And the one that was left out takes their mean, their statistics, and fresh momentum."""
    fleet = prsgd.Fleet(model("batchnorm"), 3)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.05, momentum=0.9)
    expected: list[Tensor] = []

    def spoil(*_: Any) -> None:
        if step == 11:
            for tensor in (fleet.rows[1], fleet.modules[1][1].running_mean):
                tensor.mul_(1e9)
            expected.append(fleet.rows[[0, 2]].mean(dim=0))
            expected.append((fleet.modules[0][1].running_mean + fleet.modules[2][1].running_mean) / 2)

    optimizer.register_step_post_hook(spoil)
    with (
        warnings.catch_warnings(record=True) as caught,
        prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2), averaging=prsgd.mean(prsgd.steady())) as local,
    ):
        warnings.simplefilter("always")
        for step in range(12):
            pairs = [batch(w, step) for w in range(3)]
            optimizer.zero_grad()
            fleet.backward(nn.functional.cross_entropy, [x for x, _ in pairs], [y for _, y in pairs])
            optimizer.step()
        for row, module in zip(fleet.rows, fleet.modules):
            torch.testing.assert_close(row, expected[0], rtol=1e-14, atol=1e-15)
            torch.testing.assert_close(module[1].running_mean, expected[1], rtol=1e-14, atol=1e-15)
        assert [len(optimizer.state[next(m.parameters())]) > 0 for m in fleet.modules] == [True, False, True]
    assert len(caught) == 1
    assert re.match(r"round 6: worker 1 was left out .* by \d\S+e\+09, far more than is usual", str(caught[0].message))
    assert [record.drift is not None and record.drift < 1 for record in local.records] == [True] * 6


@FAR
def test_a_look_and_the_end_leave_it_out_too() -> None:
    fleet = prsgd.Fleet(model(), 3)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.05)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2), averaging=prsgd.mean(prsgd.steady())) as local:
        for step in range(7):
            pairs = [batch(w, step) for w in range(3)]
            optimizer.zero_grad()
            fleet.backward(nn.functional.cross_entropy, [x for x, _ in pairs], [y for _, y in pairs])
            optimizer.step()
        with torch.no_grad():
            fleet.rows[2].fill_(1e20)
        others = fleet.rows[:2].mean(dim=0)
        with local.consensus() as seen:
            found = torch.cat([p.detach().flatten() for p in seen.parameters()])
        torch.testing.assert_close(found, others, rtol=0, atol=1e-14)
    torch.testing.assert_close(fleet.rows, others.expand(3, -1), rtol=0, atol=1e-14)
    assert [record.outliers for record in local.records] == [0, 0, 0, 1]


@FAR
def test_one_that_is_far_off_while_another_is_not_finite() -> None:
    fleet = prsgd.Fleet(model(), 4)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.05)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2), averaging=prsgd.mean(prsgd.steady())) as local:
        for step in range(10):
            pairs = [batch(w, step) for w in range(4)]
            optimizer.zero_grad()
            fleet.backward(nn.functional.cross_entropy, [x for x, _ in pairs], [y for _, y in pairs])
            if step == 7:
                with torch.no_grad():
                    fleet.rows[1].fill_(1e20)
                    fleet.rows[2].fill_(float("nan"))
                with pytest.warns(RuntimeWarning, match="worker 2: its model was not finite"):
                    optimizer.step()
            else:
                optimizer.step()
    assert [(r.workers, r.bad_workers, r.outliers) for r in local.records] == [
        (4, 0, 0), (4, 0, 0), (4, 0, 0), (2, 1, 1), (4, 0, 0),
    ]  # fmt: skip
    assert bool(fleet.rows.isfinite().all())


class Quartic(nn.Module):
    """x^4, whose gradient at 1e200 is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.x.pow(4).sum()


def thrown(rank: int | None) -> None:
    """Worker 1's model is huge once."""
    hosted: Any = prsgd.Fleet(Quartic(), 3) if rank is None else Quartic()
    optimizer = torch.optim.SGD(hosted.parameters(), lr=0.01)
    with prsgd.LocalSGD(hosted, optimizer, schedule=prsgd.every(2)):
        for step in range(8):
            optimizer.zero_grad()
            for worker, module in enumerate(hosted.modules) if rank is None else [(rank, hosted)]:
                module().backward()
                if worker == 1 and step == 3:
                    module.x.data.fill_(1e200)
            optimizer.step()


def test_a_run_that_one_worker_ended_says_which() -> None:
    said = "round 3: no worker has a finite model left to restart from (3 are not finite); in the average before, the "
    said += "numbers of worker 1's model added up to 2e+200 and those of no other to more than 1.7: "
    said += "mean(weights=prsgd.steady()) leaves such a worker out"
    with pytest.raises(prsgd.DivergedError, match=re.escape(said)):
        thrown(None)
    assert try_ranks(thrown, 3) == [("error", f"DivergedError: {said}")] * 3


# What cannot be


@pytest.mark.parametrize("clip", [0, -1.0, math.nan, math.inf, "1", True])
def test_a_clip_that_is_none(clip: Any) -> None:
    with pytest.raises(ValueError, match="clip must be a finite number > 0, got"):
        prsgd.mean(clip=clip)


def test_what_cannot_work_says_why() -> None:
    for threshold in (0, -3.0, math.nan, "3"):
        with pytest.raises(ValueError, match="threshold must be a finite number > 0, got"):
            prsgd.steady(threshold=threshold)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="penalty must be a finite number > 0, got -1"):
        prsgd.steady(penalty=-1)
    with pytest.raises(ValueError, match="of must be weights that tell nothing themselves, got steady"):
        prsgd.steady(of=prsgd.steady())
    with pytest.raises(ValueError, match="weights must be one of 'uniform', 'steps', 'samples', got 'step'"):
        prsgd.steady(of="step")
    with pytest.raises(ValueError, match="times changes may be more than float16 holds"):
        prsgd.mean(prsgd.steady(), dtype=torch.float16)


def test_a_state_without_the_point_is_refused() -> None:
    fleet = prsgd.Fleet(model(), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    state = prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2)).start().state_dict()
    for averaging, said in (
        (prsgd.mean(clip=1.0), r"another averaging than mean\(.*clip=1.0\): it does not hold 'point'"),
        (prsgd.mean(prsgd.steady()), r"of a run with mean\(\), this one has mean\(\) over steady\(\)"),
    ):
        other = prsgd.Fleet(model(), 2)
        local = prsgd.LocalSGD(
            other, torch.optim.SGD(other.parameters(), lr=0.1), schedule=prsgd.every(2), averaging=averaging
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(prsgd.CheckpointError, match=said):
                local.load_state_dict(state)
