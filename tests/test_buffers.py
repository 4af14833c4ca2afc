"""Buffers of every kind: what an average makes of them, and that all workers end with the same bits."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import prsgd
from prsgd.replicas.buffers import Buffers
from tests.problems import itself
from tests.ranks import run_ranks, try_ranks

# Where a test writes all buffers itself, the workers' parameters may be alike.
pytestmark = pytest.mark.filterwarnings("ignore:rounds .* alike to the last bit:RuntimeWarning")

INF, NAN = float("inf"), float("nan")
HUGE = torch.finfo(torch.float32).min  # what masks are filled with


def bits(tensor: Tensor) -> list[int]:
    """The tensor's bytes: equal bits are also those of NaN and of minus zero."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


Bits = dict[str, list[int]]
"""Of each buffer of a model."""


def all_bits(model: nn.Module) -> Bits:
    return {name: bits(b) for name, b in model.named_buffers(remove_duplicate=False)}


# Quantization-aware training, as torch has it


def quantized(backend: str, *, warm: bool = True) -> nn.Module:
    """A small net prepared for it; "qnnpack" has one range per tensor, "x86" one per channel of a weight."""
    from torch.ao import quantization as q

    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")  # deprecated, and there in every torch that we support
        torch.manual_seed(1)
        net = nn.Sequential(
            q.QuantStub(), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
        )
        net.qconfig = q.get_default_qat_qconfig(backend)
        q.prepare_qat(net.train(), inplace=True)
        if backend == "x86" and warm:
            net(images(0, 99)[0])  # its per-channel ranges have no shape before the first batch
    return net


def images(worker: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * worker + step)
    return torch.randn(4, 1, 4, 4, generator=generator) * (1 + worker), torch.randint(3, (4,), generator=generator)


def train_quantized(backend: str, overlap: int, *, warm: bool = True) -> list[tuple[Tensor, Bits]]:
    """The parameters and buffers of those of two workers that live here, after 7 steps with an average every 3."""
    fleet = prsgd.Fleet(quantized(backend, warm=warm), 2, mode="loop")
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1, momentum=0.9)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(3), overlap=overlap):
        for step in range(7):
            pairs = [images(w, step) for w in fleet.workers]
            optimizer.zero_grad()
            fleet.backward(nn.functional.cross_entropy, [x for x, _ in pairs], [y for _, y in pairs])
            optimizer.step()
    assert all(torch.isfinite(b).all() for m in fleet.modules for b in m.buffers())
    return [(row.clone(), all_bits(m)) for row, m in zip(fleet.rows, fleet.modules)]


def rank_quantized(rank: int, cases: list[tuple[str, int]]) -> list[Any]:
    return [train_quantized(*case)[0] for case in cases]


def test_quantization_aware_training_ends_with_the_same_bits_everywhere() -> None:
    cases = [("qnnpack", 0), ("qnnpack", 1), ("x86", 0), ("x86", 1)]
    by_rank = run_ranks(rank_quantized, 2, cases)
    for place, case in enumerate(cases):
        (row, buffers), second = train_quantized(*case)
        for theirs in (second, by_rank[0][place], by_rank[1][place]):
            assert torch.equal(theirs[0], row), case
            assert theirs[1] == buffers, case


def test_ranges_are_the_mean_of_those_that_have_seen_something() -> None:
    """Worker 2 has not: an observer begins at plus and minus infinity."""
    fleet = prsgd.Fleet(Bag({"low": torch.tensor(INF), "high": torch.full((2,), -INF)}), 3)
    with fleet_run(fleet, prsgd.every(1)) as step:
        for module, low, high in zip(fleet.modules, (-3.0, -1.0), (5.0, 8.0)):
            module.low.fill_(low)
            module.high.fill_(high)
        step()
        for module in fleet.modules:
            assert module.low.item() == -2.0
            assert module.high.tolist() == [6.5, 6.5]
        fleet.modules[0].low.fill_(-5.0)  # from here on its change, -3, is averaged
        step()
        assert [m.low.item() for m in fleet.modules] == [-3.0] * 3


# Buffers of our own


class Bag(nn.Module):
    """A parameter that nothing pulls, and buffers that tests write into."""

    def __init__(self, buffers: dict[str, Tensor], *, persistent: bool = True) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1))
        for name, value in buffers.items():
            self.register_buffer(name, value, persistent=persistent)

    def forward(self, _: Any) -> Tensor:
        return 0.0 * self.x.sum()


class fleet_run:
    """``with fleet_run(...) as step``: a run of LocalSGD, and the function that takes a step of all workers."""

    def __init__(self, fleet: prsgd.Fleet, schedule: prsgd.Schedule, **options: Any) -> None:
        self._fleet = fleet
        self._optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
        self.local = prsgd.LocalSGD(fleet, self._optimizer, schedule=schedule, **options)

    def __enter__(self) -> Any:
        self.local.start()
        return self._step

    def _step(self) -> None:
        nothing = [0.0] * len(self._fleet.workers)
        self._fleet.backward(itself, nothing, nothing)
        self._optimizer.step()

    def __exit__(self, *error: Any) -> None:
        self.local.__exit__(*error)


# Every kind, in every way of running


Make = Callable[[], Tensor]

SHARED = torch.full((3,), 1 / 3)
CONSTANTS: dict[str, Make] = {
    "third": lambda: torch.full((5,), 1 / 3),
    "double_third": lambda: torch.full((5,), 1 / 3, dtype=torch.float64),
    "half_third": lambda: torch.full((5,), 1 / 3, dtype=torch.float16),
    "eighths": lambda: torch.full((5,), 0.625).to(torch.float8_e4m3fn),
    "complex_third": lambda: torch.full((2, 2), complex(1 / 3, -1 / 7)),
    "mask": lambda: torch.full((3, 3), -INF).triu(1),
    "unset": lambda: torch.tensor([NAN, 1.0, INF]),
    "huge": lambda: torch.full((3, 3), HUGE).triu(1),
    "minus_zero": lambda: torch.tensor([-0.0, 0.0]),
    "wide": lambda: torch.linspace(0, 1, 7).expand(3, -1),
    "wide_integers": lambda: torch.arange(7).expand(3, -1),
    "empty": lambda: torch.zeros(0),
    "no_integers": lambda: torch.zeros(2, 0, dtype=torch.long),
    "causal": lambda: torch.ones(5, 5, dtype=torch.bool).tril(),
    "high_integers": lambda: torch.tensor([2**62 + 1, -(2**63), 2**24 + 1]),
    "unsigned": lambda: torch.tensor([2**63 + 5, 7], dtype=torch.uint64),
    "high_counter": lambda: torch.tensor(2**53 + 1),
    "shared_third": lambda: SHARED,
    "shared_third_again": lambda: SHARED,
}
FLOATS: dict[str, Make] = {
    "in_single": lambda: torch.zeros(3),
    "scalar": lambda: torch.tensor(0.5),
    "in_double": lambda: torch.full((2, 2), 1e9, dtype=torch.float64),
    "in_half": lambda: torch.ones(4, dtype=torch.float16),
    "in_bfloat16": lambda: torch.ones(4, dtype=torch.bfloat16),
    "in_complex": lambda: torch.full((2,), 1j),
    "transposed": lambda: torch.zeros(2, 3).t(),
    "expanded": lambda: torch.zeros(3).expand(2, -1),
    "range": lambda: torch.tensor([INF, -INF, 1.0]),
    "unset_yet": lambda: torch.tensor([NAN, NAN]),
}
WHOLES: dict[str, Make] = {
    "labels": lambda: torch.zeros(2, 3, dtype=torch.long),
    "bytes": lambda: torch.zeros(5, dtype=torch.uint8),
    "flags": lambda: torch.zeros(9, dtype=torch.bool),
    "flag": lambda: torch.tensor(False),
    "zero_point": lambda: torch.zeros(1, dtype=torch.int32),
    "short": lambda: torch.zeros(3, 2, dtype=torch.int16).t(),
    "expanded_labels": lambda: torch.zeros(3, dtype=torch.long).expand(2, -1),
}
COUNTERS: dict[str, Make] = {
    "steps": lambda: torch.tensor(0),
    "high_steps": lambda: torch.tensor(2**40),
    "jumps": lambda: torch.tensor(-5),
    "few": lambda: torch.tensor(0, dtype=torch.int32),
}
KINDS = {**CONSTANTS, **FLOATS, **WHOLES, **COUNTERS}


def bag(names: list[str], *, persistent: bool) -> Bag:
    return Bag({name: KINDS[name]() for name in names}, persistent=persistent)


def scribble(module: nn.Module, worker: int, step: int) -> None:
    """Change what is not constant, by numbers that only worker, step and name decide; in place or by other tensors."""
    for name, buffer in list(module.named_buffers()):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{worker} {step} {name}".encode()))
        if name in FLOATS:
            kind = buffer.dtype if buffer.dtype.is_complex else torch.float64
            value = torch.randn(buffer.shape, generator=generator, dtype=kind).to(buffer.dtype)
            if name == "in_double":
                value += 1e9  # more digits than the float32 in which changes are summed
        elif name in WHOLES:
            top = 2 if buffer.dtype == torch.bool else min(torch.iinfo(buffer.dtype).max, 2**62)
            value = torch.randint(top, buffer.shape, generator=generator).to(buffer.dtype)
        elif name in COUNTERS:
            value = buffer + int(torch.randint(2**45 if name == "jumps" else 9, (), generator=generator))
        else:
            continue
        if name.startswith("expanded"):
            setattr(module, name, value[0].clone().expand_as(value))
        elif step % 2:
            setattr(module, name, value)
        else:
            buffer.copy_(value)


def run_bag(names: list[str], num_workers: int, steps: int, period: int, overlap: int, persistent: bool) -> list[Bits]:
    """All hosted workers' buffers in the end."""
    fleet = prsgd.Fleet(bag(names, persistent=persistent), num_workers, mode="loop")
    with fleet_run(fleet, prsgd.every(period), overlap=overlap) as step:
        for t in range(steps):
            for worker, module in zip(fleet.workers, fleet.modules):
                scribble(module, worker, t)
            step()
    return [all_bits(module) for module in fleet.modules]


def expected(name: str, num_workers: int, steps: int, period: int, overlap: int) -> Tensor:
    """What the rules in other_buffers.py make of the same numbers, one buffer at a time."""
    own = [Bag({name: KINDS[name]()}) for _ in range(num_workers)]
    agreed = KINDS[name]()
    for t in range(steps):
        for worker, module in enumerate(own):
            scribble(module, worker, t)
        if t + 1 == steps or (not overlap and (t + 1) % period == 0):  # with overlap only the last average pools
            now = [getattr(module, name) for module in own]
            if name in FLOATS:
                wide = torch.promote_types(agreed.dtype, torch.float32)
                was = agreed.to(wide)
                new = torch.stack([x.to(wide) for x in now]).mean(dim=0)
                change = torch.stack([x.to(wide) - was for x in now]).mean(dim=0)
                agreed = torch.where(torch.isfinite(was), was + change, new).to(agreed.dtype)
            elif name in COUNTERS:
                agreed = torch.stack(now).amax(dim=0)
            else:
                agreed = now[0]
            for module in own:
                setattr(module, name, agreed.clone())
    return agreed


@settings(max_examples=60, deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=8, unique=True),
    num_workers=st.integers(2, 4),
    steps=st.integers(1, 5),
    period=st.integers(1, 3),
    overlap=st.integers(0, 1),
    persistent=st.booleans(),
)
def test_all_workers_end_with_the_same_buffers(
    names: list[str], num_workers: int, steps: int, period: int, overlap: int, persistent: bool
) -> None:
    first, *others = run_bag(names, num_workers, steps, period, overlap, persistent)
    for worker, found in enumerate(others, start=1):
        for name in names:
            assert found[name] == first[name], (name, worker)
    for name in names:
        start = KINDS[name]()
        found_there = torch.tensor(first[name], dtype=torch.uint8).view(start.dtype).view(start.shape)
        value = expected(name, num_workers, steps, period, overlap)
        if name in FLOATS:
            rtol, atol = (0.0, 1e-6) if name == "in_double" else (None, None)
            torch.testing.assert_close(found_there, value, rtol=rtol, atol=atol, msg=name)
        else:
            assert first[name] == bits(value), name


DENSE = [name for name in KINDS if 0 not in KINDS[name]().stride()]  # others are not sent when a run starts


def rank_bags(rank: int, cases: list[tuple[Any, ...]]) -> tuple[list[Bits], Bits]:
    """A run of each case; then one that each process begins with buffers of its own."""
    found = [run_bag(list(KINDS), *case)[0] for case in cases]
    model = bag(DENSE, persistent=True)
    if rank:
        for buffer in model.buffers():
            buffer.copy_(torch.ones((), dtype=torch.uint8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(2)):
        for t in range(3):
            scribble(model, rank, t)
            optimizer.zero_grad()
            model(None).backward()
            optimizer.step()
    return found, all_bits(model)


def test_two_processes_end_with_the_buffers_of_the_simulation() -> None:
    cases = [(2, 5, 2, 0, True), (2, 5, 3, 1, False)]
    by_rank = run_ranks(rank_bags, 2, cases)
    for place, case in enumerate(cases):
        for worker, found in enumerate(run_bag(list(KINDS), *case)):
            assert by_rank[worker][0][place] == found, (case, worker)
    from_worker_0 = run_bag(DENSE, 2, 3, 2, 0, True)
    assert [found for _, found in by_rank] == from_worker_0


def test_a_lone_worker_keeps_its_bits() -> None:
    names = list(KINDS)
    [found] = run_bag(names, 1, 3, 1, 0, True)
    alone = bag(names, persistent=True)
    for t in range(3):
        scribble(alone, 0, t)
    assert found == all_bits(alone)


def test_consensus_shows_the_buffers_of_all_and_gives_back_ones_own() -> None:
    fleet = prsgd.Fleet(bag(list(KINDS), persistent=False), 2, mode="loop")
    run = fleet_run(fleet, prsgd.every(9))
    with run as step:
        for worker, module in enumerate(fleet.modules):
            scribble(module, worker, 0)
        step()
        before = all_bits(fleet.modules[0])
        with run.local.consensus() as averaged:
            inside = all_bits(averaged)
        assert all_bits(fleet.modules[0]) == before != inside
    assert all_bits(fleet.modules[0]) == all_bits(fleet.modules[1]) == inside


def test_constants_are_not_even_written() -> None:
    """So they may be part of a graph that is still to be walked back."""
    fleet = prsgd.Fleet(bag(list(KINDS), persistent=True), 2, mode="loop")
    with fleet_run(fleet, prsgd.every(1)) as step:
        before = {name: getattr(fleet.modules[0], name)._version for name in CONSTANTS}
        scribble(fleet.modules[0], 0, 0)
        step()
    assert {name: getattr(fleet.modules[0], name)._version for name in CONSTANTS} == before


@pytest.mark.parametrize("inference", [False, True])
def test_a_buffer_that_forward_computes(inference: bool) -> None:
    """As part of a graph, or in inference mode: torch then wants no writing into it."""
    fleet = prsgd.Fleet(Bag({"hidden": torch.zeros(1)}), 2, mode="loop")
    with fleet_run(fleet, prsgd.every(1)) as step:
        for worker, module in enumerate(fleet.modules):
            with torch.inference_mode(inference):
                module.hidden = sum(module.parameters()) * 3 + torch.tensor(float(worker))
        step()
        assert [module.hidden.item() for module in fleet.modules] == [0.5, 0.5]


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_a_run_continues_from_a_state_with_all_kinds(stop_after: int) -> None:
    fleet = prsgd.Fleet(bag(DENSE, persistent=True), 2, mode="loop")
    run = fleet_run(fleet, prsgd.every(2))
    step = run.__enter__()
    for t in range(5):
        if t == stop_after:
            states = fleet.state_dict(), run.local.state_dict()
            fleet = prsgd.Fleet(bag(DENSE, persistent=True), 2, mode="loop")
            run = fleet_run(fleet, prsgd.every(2))
            fleet.load_state_dict(states[0])
            run.local.load_state_dict(states[1])
            step = run.__enter__()
        for worker, module in enumerate(fleet.modules):
            scribble(module, worker, t)
        step()
    run.__exit__(None, None, None)
    assert [all_bits(module) for module in fleet.modules] == run_bag(DENSE, 2, 5, 2, 0, True)


def test_a_state_of_other_buffers_is_refused() -> None:
    def run(names: list[str]) -> prsgd.LocalSGD:
        net = nn.Sequential(nn.Linear(1, 1), bag(names, persistent=True))
        return prsgd.LocalSGD(net, torch.optim.SGD(net.parameters(), lr=0.1), schedule=prsgd.every(2))

    saved = run(["third", "zero_point", "short"]).start().state_dict()
    message = r"buffers 'adopted' is \(5,\), this run's has the shape \(3,\)"
    with pytest.raises(prsgd.CheckpointError, match=message):
        run(["in_single", "steps"]).load_state_dict(saved)


# Numbers that are not finite


def two_workers(start: list[float], first: list[float], second: list[float]) -> list[float]:
    """What a buffer becomes that the two workers have changed so."""
    fleet = prsgd.Fleet(Bag({"values": torch.tensor(start)}), 2)
    with fleet_run(fleet, prsgd.every(1)) as step:
        for module, values in zip(fleet.modules, (first, second)):
            module.values = torch.tensor(values)
        step()
        found = all_bits(fleet.modules[0])
        assert all_bits(fleet.modules[1]) == found
        step()
        assert [all_bits(module) for module in fleet.modules] == [found] * 2  # and so it stays
    last: list[float] = fleet.modules[0].values.tolist()
    return last


def test_a_mask_that_is_filled_later_is_that_of_worker_0() -> None:
    assert two_workers([0.0, 0, 0], [0.0, -INF, INF], [0.0, -INF, INF]) == [0, -INF, INF]
    assert two_workers([0.0, 0, 0], [0.0, HUGE, -HUGE], [0.0, HUGE, -HUGE]) == [0, HUGE, -HUGE]
    assert two_workers([0.0, 0, 0], [2.0, -INF, HUGE], [4.0, 1, 1]) == [3, -INF, HUGE]
    assert two_workers([-INF, 1, HUGE], [-INF, -INF, HUGE], [-INF, -INF, HUGE]) == [-INF, -INF, HUGE]


def test_zeros_of_different_signs_become_one() -> None:
    assert two_workers([0.0, -0.0], [-0.0, -0.0], [0.0, 0.0]) == [0, 0]


def test_infinity_on_another_worker_is_no_change() -> None:
    assert two_workers([0.0, 8, 1], [2.0, 8, 1], [4.0, INF, HUGE]) == [3, 8, 1]


def test_what_was_infinite_becomes_the_mean_of_those_that_have_a_number() -> None:
    assert two_workers([INF, -INF], [2.0, 4], [3.0, 5]) == [2.5, 4.5]
    assert two_workers([INF, -INF], [INF, -INF], [3.0, 5]) == [3, 5]
    assert two_workers([INF, -INF], [0.0, 4], [0.0, -4]) == [0, 0]
    assert two_workers([NAN, HUGE, HUGE], [1.0, 2, HUGE], [3.0, 6, HUGE]) == [2, 4, HUGE]
    # A buffer in which one worker has some of the numbers, and nobody others.
    assert two_workers([-INF, -INF, HUGE], [-INF, -INF, HUGE], [5.0, -INF, HUGE]) == [5, -INF, HUGE]


def test_a_row_is_packed_anew() -> None:
    """The memory for it is used for every average: nothing of the one before stays."""
    nets = [Bag({"low": torch.tensor([INF])}), Bag({"low": torch.tensor([INF])})]
    buffers = Buffers(nets, range(2), 2)
    buffers.settle(torch.float32, torch.device("cpu"))
    rows = torch.full((2, buffers.width), NAN)
    for values, mean in (((4.0, 8.0), 6.0), ((5.0, 9.0), 7.0)):
        for i, value in enumerate(values):
            nets[i].low.fill_(value)
            buffers.pack(i, rows[i])
        pooled = buffers.pooled(buffers.sums(rows, [True, True]))
        buffers.adopt(pooled)
        assert pooled[0].tolist() == [mean]
    assert rows.tolist() == [[-1.0, 0.0], [3.0, 0.0]]  # changes, and nothing that is seen for the first time


def test_a_worker_with_a_new_nan_is_left_out_and_takes_the_others() -> None:
    fleet = prsgd.Fleet(nn.Sequential(Bag({"good": torch.zeros(2), "values": torch.zeros(2)})), 3)
    with fleet_run(fleet, prsgd.every(1)) as step:
        for module, value in zip(fleet.modules, (2.0, NAN, 4.0)):
            module[0].values[1] = value
        with pytest.warns(RuntimeWarning, match="worker 1: its model was not finite"):
            step()
    assert [module[0].values.tolist() for module in fleet.modules] == [[0, 3]] * 3


def test_a_worker_whose_batchnorm_statistics_are_not_finite_is_left_out() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2), Bag({"low": torch.tensor(INF)}))
    fleet = prsgd.Fleet(net, 2, mode="loop")
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(1)):
        fleet.backward(itself, torch.zeros(2, 4, 2), torch.zeros(2))
        fleet.modules[0][0].running_var[1] = INF
        with pytest.warns(RuntimeWarning, match="worker 0: its model was not finite"):
            optimizer.step()
    for module in fleet.modules:
        assert module[0].running_var.tolist() == [pytest.approx(0.9)] * 2
        assert module[1].low.item() == INF


def test_the_buffer_for_which_a_worker_is_bad_has_a_name() -> None:
    """Not one that is infinite on purpose."""
    nets = [nn.Sequential(nn.BatchNorm1d(2), Bag({"low": torch.tensor(INF), "a": torch.zeros(2)})) for _ in range(3)]
    buffers = Buffers(nets, range(3), 3)
    buffers.settle(torch.float32, torch.device("cpu"))
    nets[0][1].a[0] = INF
    nets[1][1].a[1] = NAN
    nets[2][0].running_mean[1] = INF
    assert [buffers.not_finite(i) for i in range(3)] == [None, "1.a", "0.running_mean"]
    rows = torch.zeros(3, buffers.width)
    for i, row in enumerate(rows):
        buffers.pack(i, row)
    assert torch.isfinite(rows).all(dim=1).tolist() == [True, False, False]


# Shapes


def rank_unwarmed(rank: int, backend: str) -> None:
    train_quantized(backend, 0, warm=False)


def test_a_buffer_that_gets_its_shape_in_the_first_step_is_named_with_the_remedy() -> None:
    """The per-channel ranges of torch's default for x86."""
    for rank, (kind, text) in enumerate(try_ranks(rank_unwarmed, 2, "x86")):
        assert kind == "error"
        assert text == (
            f"ValueError: worker {rank}: buffer '1.weight_fake_quant.scale' must keep its shape to be averaged, it was "
            "[1] when LocalSGD was made and is [4]: run the model once on a batch before that, if this gives the "
            "buffer its shape, or register it with persistent=False, and each worker keeps its own"
        )


@pytest.mark.parametrize("kind", ["in_single", "labels", "steps"])
def test_a_cache_that_changes_its_shape_is_left_to_its_worker(kind: str) -> None:
    fleet = prsgd.Fleet(Bag({"cache": KINDS[kind](), "values": torch.zeros(1)}, persistent=False), 3, mode="loop")
    run = fleet_run(fleet, prsgd.every(1))
    with run as step:
        grown = torch.full((2, 4), 7, dtype=KINDS[kind]().dtype)
        fleet.modules[1].cache = grown
        fleet.modules[2].register_buffer("cache", None, persistent=False)
        for module, value in zip(fleet.modules, (3.0, 4.0, 8.0)):
            module.values[0] = value
        step()
        with run.local.consensus():
            pass
        step()
    assert [module.values.item() for module in fleet.modules] == [5, 5, 5]
    assert fleet.modules[0].cache.shape == KINDS[kind]().shape
    assert all_bits(fleet.modules[1])["cache"] == bits(grown)
    assert fleet.modules[2].cache is None


def test_a_saved_buffer_that_is_taken_away_is_named() -> None:
    fleet = prsgd.Fleet(nn.Sequential(Bag({"values": torch.zeros(2)})), 2)
    step = fleet_run(fleet, prsgd.every(1)).__enter__()
    fleet.modules[1][0].register_buffer("values", None)
    with pytest.raises(ValueError, match=r"worker 1: buffer '0\.values' must keep .* was \[2\] .* and is None"):
        step()


def test_batchnorm_statistics_that_change_their_shape_are_named() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2), Bag({}))
    fleet = prsgd.Fleet(net, 2, mode="loop")
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(1)).start()
    fleet.backward(itself, torch.zeros(2, 4, 2), torch.zeros(2))
    fleet.modules[1][0].running_var = torch.ones(3)
    with pytest.raises(ValueError, match=r"worker 1: buffer '0\.running_var' must keep .* was \[2\] .* is \[3\]"):
        optimizer.step()


def test_a_buffer_without_a_shape_is_named() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.LazyBatchNorm1d(affine=False)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"buffer '1\.0\.running_mean' has no shape yet: run the model once"):
        prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(1))


def test_sparse_buffers_are_left_alone() -> None:
    fleet = prsgd.Fleet(Bag({"graph": torch.eye(3).to_sparse(), "values": torch.zeros(1)}), 2, mode="loop")
    with fleet_run(fleet, prsgd.every(1)) as step:
        fleet.modules[0].values.fill_(4.0)
        step()
    for module in fleet.modules:
        assert module.values.item() == 2.0
        assert torch.equal(module.graph.to_dense(), torch.eye(3))


def test_booleans_of_any_number_and_pattern_arrive() -> None:
    patterns = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
    for flags in (patterns.bool(), patterns.bool()[:, :7], torch.rand(131) < 0.5):
        nets = [Bag({"flags": flags.clone()}) for _ in range(2)]
        buffers = Buffers(nets, range(2), 2)
        buffers.settle(torch.float32, torch.device("cpu"))
        nets[0].flags.logical_not_()
        pooled = buffers.pooled(buffers.sums(torch.zeros(2, buffers.width), [True, True]))
        for i, net in enumerate(nets):
            buffers.write(i, pooled)
            assert all_bits(net) == {"flags": bits(~flags)}
        assert buffers.sum_width <= 3 * (flags.numel() / 64 + 1) + 1


def test_batchnorm_alone_sends_its_statistics_and_a_count_for_each_worker() -> None:
    net = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 5), nn.BatchNorm1d(5))
    buffers = Buffers([net], range(1), 8)
    assert buffers.width == 2 * (5 + 5)
    assert buffers.sum_width == 8 * 2 + 2 * (5 + 5) + 1
    assert Buffers([nn.Linear(2, 2)], range(1), 8).sum_width == 0
