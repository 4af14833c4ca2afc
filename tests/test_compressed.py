"""Changes in few bits or few numbers, or in half precision: by hand, right on average, with nothing lost."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import prsgd
from prsgd.averaging.base import SUMS_WIDTH
from prsgd.averaging.wires.base import CACHED, Gathered
from prsgd.averaging.wires.packing import pack, packed_bytes, unpack
from tests.problems import train_fleet, walk

QUANTIZERS = {str(bits): prsgd.quantized(bits, bucket=32) for bits in (1, 2, 3, 4, 5, 8, 11, 16, "ternary")}
HEADER = 8 * (SUMS_WIDTH + 1)
"""The sums and the worker's weight, in the walk's float64."""


def random(size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@settings(deadline=None)
@given(levels=st.integers(2, 2**16), count=st.integers(1, 300), seed=st.integers(0, 9))
def test_what_is_packed_comes_back(levels: int, count: int, seed: int) -> None:
    codes = torch.randint(levels, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    packed = pack(codes, levels)
    assert packed.dtype == torch.uint8
    assert len(packed) == packed_bytes(count, levels)
    assert torch.equal(unpack(packed, levels, count).int(), codes)


def test_packed_numbers_take_their_bits_and_no_more() -> None:
    for bits in range(1, 17):
        assert packed_bytes(8000, 2**bits) == 1000 * bits
    assert packed_bytes(8000, 3) == 1600  # 1.6 bits, where log2(3) = 1.585 is the least


@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantizers_are_right_on_average(name: str) -> None:
    """Over 1,500 draws the mean lies within 5 standard errors of the number in each of 70 places, and not always at it.

    A value between two levels a step apart varies by at most half a step, its mean by half a step / sqrt(draws).
    """
    quantizer, draws = QUANTIZERS[name], 1500
    values = random(70)
    total, squares = torch.zeros(70, dtype=torch.float64), torch.zeros(70, dtype=torch.float64)
    for worker in range(draws):
        got = quantizer.decode(quantizer.encode(values, worker), values)
        total += got
        squares += (got - values) ** 2
    edges = values.split(32)
    scale = torch.cat([part.abs().amax().expand(len(part)) for part in edges])
    step = 2 * scale / (quantizer.levels - 1)
    error = (total / draws - values).abs()
    assert bool((error <= 5 * step / 2 / math.sqrt(draws) + 1e-12).all())
    at_most = step**2 / 4  # the variance of a coin between two levels
    assert bool((squares / draws <= at_most * (1 + 5 / math.sqrt(draws)) + 1e-24).all())
    assert bool((squares.sum() / draws > at_most.sum() / 10).all())


@pytest.mark.parametrize("name", [*QUANTIZERS, "sign", "sparse", "sparse, 2 bits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 31, 32, 1000])
def test_declared_bytes_are_the_bytes(name: str, dtype: torch.dtype, size: int) -> None:
    others = {
        "sign": prsgd.quantized("sign", bucket=32),
        "sparse": prsgd.sparse(0.05),
        "sparse, 2 bits": prsgd.sparse(0.05, bits=2),
    }
    one: Gathered = {**QUANTIZERS, **others}[name]
    encoded = one.encode(random(size, dtype=dtype), 3)
    assert encoded.dtype == torch.uint8
    assert len(encoded) == one.num_bytes(size, dtype)
    decoded = one.decode(encoded, random(size, dtype=dtype))
    assert decoded.dtype == dtype
    assert bool(decoded.isfinite().all())


def test_levels_by_hand() -> None:
    values = torch.tensor([1.0, -1.0, 0.0, 0.5], dtype=torch.float64)
    for bits in (2, 3, "ternary"):  # an end or the middle of the scale is a level, and no coin is thrown
        one = prsgd.quantized(bits)
        assert one.decode(one.encode(values), values)[:3].tolist() == [1.0, -1.0, 0.0]
    three = prsgd.quantized(3)  # levels 0, 1/3, 2/3, 1
    found = {round(float(three.decode(three.encode(values, worker), values)[3]), 9) for worker in range(50)}
    assert found == {round(1 / 3, 9), round(2 / 3, 9)}
    nothing = torch.zeros(5)
    for bits in (1, 4, "ternary", "sign"):
        one = prsgd.quantized(bits)
        assert torch.equal(one.decode(one.encode(nothing), nothing), nothing)
    tiny = torch.full((5,), 1e-42)  # below what float32 can invert
    assert bool(prsgd.quantized(4).decode(prsgd.quantized(4).encode(tiny), tiny).isfinite().all())


def test_buckets_have_scales_of_their_own() -> None:
    values = torch.tensor([1000.0, -1000.0, 1e-3, -1e-3], dtype=torch.float64)
    one = prsgd.quantized("sign", bucket=2)
    assert torch.equal(one.decode(one.encode(values), values), values)


@pytest.mark.parametrize(
    "wire", [prsgd.quantized("sign", bucket=8, way="gather"), prsgd.sparse(0.1), prsgd.sparse(0.3, bits=2)], ids=str
)
def test_error_feedback_loses_nothing(wire: Any) -> None:
    """Over any number of averages: what was sent and what is kept add up to what there was to send."""
    comm = prsgd.InProcess(3)
    point = random(50)
    averaging = prsgd.mean(wire=wire)
    memory = averaging.init(point, 3)
    header = make_header(3)
    total = torch.zeros(3, 50, dtype=torch.float64)
    moved = torch.zeros(50, dtype=torch.float64)
    for average in range(12):
        change = torch.stack([random(50, 100 * average + worker) for worker in range(3)])
        before = memory["point"]
        landing = averaging.launch(memory, comm, before + change, header).wait()
        memory = landing.memory or {}
        total += change
        moved += landing.target - before
        kept = memory["residuals"]
        torch.testing.assert_close(moved + kept.mean(dim=0), total.mean(dim=0), rtol=0, atol=1e-12)
    assert float(kept.abs().max()) > 0


def make_header(n: int) -> prsgd.Header:
    from prsgd.averaging.base import Sums

    empty = torch.zeros(n, 0, dtype=torch.float64)
    return prsgd.Header(
        Sums(workers=n), torch.zeros(0, dtype=torch.float64), empty, counts=(True,) * n, bad=(False,) * n,
        steps=(1,) * n, samples=(1,) * n,
    )  # fmt: skip


def test_signs_by_hand() -> None:
    """Two numbers in one bucket. Worker 0 changes by (3, 1), worker 1 by (-1, 5), twice."""
    averaging = prsgd.mean(wire=prsgd.quantized("sign"))
    memory = averaging.init(torch.zeros(2, dtype=torch.float64), 2)
    change = torch.tensor([[3.0, 1.0], [-1.0, 5.0]], dtype=torch.float64)
    comm = prsgd.InProcess(2)
    landing = averaging.launch(memory, comm, change, make_header(2)).wait()
    # Scales 2 and 3: sent (2, 2) and (-3, 3), kept (1, -1) and (2, 2).
    assert landing.target is not None
    assert landing.target.tolist() == [-0.5, 2.5]
    assert landing.memory["residuals"].tolist() == [[1.0, -1.0], [2.0, 2.0]]
    # Next (4, 0) and (1, 7): scales 2 and 4, sent (2, 2) and (4, 4), kept (2, -2) and (-3, 3).
    assert landing.memory is not None
    landing = averaging.launch(landing.memory, comm, landing.target + change, make_header(2)).wait()
    assert landing.target is not None
    assert landing.target.tolist() == [2.5, 5.5]
    assert landing.memory["residuals"].tolist() == [[2.0, -2.0], [-3.0, 3.0]]


@pytest.mark.parametrize(("bits", "unit"), [(4, 1.0), ("ternary", 7.0), (2, 7.0)], ids=["4 bits", "ternary", "2 bits"])
def test_levels_walk_by_hand(bits: int | str, unit: float) -> None:
    """Changes that lie on levels need no coin: 4 bits have -7 ... 7 sevenths of the largest, three levels -1, 0, 1."""
    averaging = prsgd.mean(wire=prsgd.quantized(bits))
    memory = averaging.init(torch.zeros(3, dtype=torch.float64), 2)
    comm = prsgd.InProcess(2)
    first = torch.tensor([[7.0, unit * (bits == 4), -7.0], [0.0, 7.0, 7.0]], dtype=torch.float64)
    landing = averaging.launch(memory, comm, first, make_header(2)).wait()
    assert landing.target is not None
    assert landing.target.tolist() == [3.5, 3.5 + (0.5 if bits == 4 else 0.0), 0.0]
    # From there: worker 0 by (14, -14, 0), worker 1 by (-14, 0, 14).
    second = landing.target + torch.tensor([[14.0, -14.0, 0.0], [-14.0, 0.0, 14.0]], dtype=torch.float64)
    assert landing.memory is not None
    landing = averaging.launch(landing.memory, comm, second, make_header(2)).wait()
    assert landing.target is not None
    assert landing.target.tolist() == [3.5, -3.5 + (0.5 if bits == 4 else 0.0), 7.0]


def test_one_scale_for_all() -> None:
    """A bucket larger than the model is the model."""
    values = random(1000)
    huge, whole = prsgd.quantized(4, bucket=10**9), prsgd.quantized(4, bucket=1000)
    assert huge.num_bytes(1000) == 500 + 4
    assert torch.equal(huge.encode(values), whole.encode(values))


def test_the_largest_by_hand() -> None:
    averaging = prsgd.mean(wire=prsgd.sparse(0.5))
    memory = averaging.init(torch.zeros(4, dtype=torch.float64), 2)
    change = torch.tensor([[3.0, -4.0, 1.0, 2.0], [0.0, 1.0, 6.0, -5.0]], dtype=torch.float64)
    comm = prsgd.InProcess(2)
    landing = averaging.launch(memory, comm, change, make_header(2)).wait()
    assert landing.target is not None
    assert landing.target.tolist() == [1.5, -2.0, 3.0, -2.5]
    assert landing.memory["residuals"].tolist() == [[0.0, 0.0, 1.0, 2.0], [0.0, 1.0, 0.0, 0.0]]
    nothing = landing.target.expand(2, -1).clone()
    assert landing.memory is not None
    landing = averaging.launch(landing.memory, comm, nothing, make_header(2)).wait()
    assert landing.target is not None
    assert landing.target.tolist() == [1.5, -1.5, 3.5, -1.5]  # what was kept goes now
    assert landing.bytes_sent == 4 + 2 * 2 + 2 * 8 + HEADER


def test_the_largest_in_2_bits_by_hand() -> None:
    """Four of five travel. Their magnitudes 1, 2, 4, 9 have the mean 4: the levels are (1 + 2 + 4) / 3 and 9."""
    one = prsgd.sparse(0.8, bits=2)
    averaging = prsgd.mean(wire=one)
    memory = averaging.init(torch.zeros(5, dtype=torch.float64), 1)
    change = torch.tensor([[2.0, -9.0, 0.5, -1.0, 4.0]], dtype=torch.float64)
    landing = averaging.launch(memory, prsgd.InProcess(1), change, make_header(1)).wait()
    low = 7 / 3
    assert landing.target.tolist() == [low, -9.0, 0.0, -low, low]
    assert landing.memory["residuals"].tolist() == [[2 - low, 0.0, 0.5, -1 + low, 4 - low]]
    assert one.num_bytes(5, torch.float64) == 4 + 4 * 2 + 1 + 2 * 8  # a run's count, places, 4 x 2 bits, two levels
    sign = prsgd.sparse(0.8, bits=1)
    assert sign.decode(sign.encode(change[0]), change[0]).tolist() == [4.0, -4.0, 0.0, -4.0, 4.0]
    many = prsgd.sparse(0.8, bits=4)  # eight levels, for four magnitudes
    assert many.decode(many.encode(change[0]), change[0]).tolist() == [2.0, -9.0, 0.0, -1.0, 4.0]
    for nothing in (torch.zeros(5), torch.full((5,), 3e38)):
        assert torch.equal(one.decode(one.encode(nothing), nothing).sort().values[1:], nothing[1:])


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_few_bits_of_the_largest_say_nearly_all_of_them(bits: int) -> None:
    """A level is the mean of what it stands for: the sum of magnitudes is kept, and each bit takes error away."""
    values = random(100_000, dtype=torch.float32)
    whole = prsgd.sparse(0.02).decode(prsgd.sparse(0.02).encode(values), values)
    one = prsgd.sparse(0.02, bits=bits)
    found = one.decode(one.encode(values), values)
    assert torch.equal(found.sign(), whole.sign())
    assert float(found.abs().sum()) == pytest.approx(float(whole.abs().sum()), rel=1e-5)
    at_most = {1: 0.15, 2: 0.08, 3: 0.05, 4: 0.03, 8: 0.004}
    assert float((found - whole).norm() / whole.norm()) < at_most[bits]


def test_sparseloco_sends_a_500th_of_what_minibatch_adamw_does() -> None:
    """At period 32, of a model of 3M parameters that 8 workers train; a mini-batch step sends 2 (N - 1) / N of it."""
    size, workers = 3_000_000, 8
    wire = prsgd.sparse(0.02, bits=2)
    sent = (workers - 1) * (wire.num_bytes(size) + (SUMS_WIDTH + 1) * 4)
    assert 32 * 2 * (workers - 1) / workers * 4 * size / sent > 700


def test_places_beyond_65536() -> None:
    values = torch.zeros(200_000)
    places = torch.tensor([0, 32_767, 32_768, 65_535, 65_536, 131_071, 131_072, 199_999])
    values[places] = torch.arange(1.0, 9.0)
    one = prsgd.sparse(8 / 200_000)
    assert one.num_kept(200_000) == 8
    assert torch.equal(one.decode(one.encode(values), values), values)


def test_everything_sent_is_the_mean() -> None:
    """Density 1 sends all; 16 bits nearly all."""
    how: dict[str, Any] = {"schedule": prsgd.every(2), "kind": "batchnorm"}
    means, _, _ = train_fleet([7] * 3, averaging=prsgd.mean(), **how)
    rows, _, _ = train_fleet([7] * 3, averaging=prsgd.sparse(1.0), **how)
    torch.testing.assert_close(rows, means, rtol=0, atol=1e-13)
    rows, _, _ = train_fleet([7] * 3, averaging=prsgd.quantized(16), **how)
    torch.testing.assert_close(rows, means, rtol=0, atol=1e-3)


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_one_number_is_sent_as_it_is(overlap: int) -> None:
    """A bucket of one has its number as scale: the walk is that of the mean, and drift is measured from it."""
    targets = [0.0, 4.0, -3.0]
    how: dict[str, Any] = {"schedule": prsgd.every(2), "steps": 7, "overlap": overlap}
    path, local = walk(targets, averaging=prsgd.mean(), **how)
    for averaging in (prsgd.quantized(1), prsgd.quantized("ternary"), prsgd.quantized("sign"), prsgd.sparse(0.1)):
        found, other = walk(targets, averaging=averaging, **how)
        torch.testing.assert_close(torch.tensor(found), torch.tensor(path), rtol=0, atol=1e-12)
        assert [r.drift for r in other.records] == pytest.approx([r.drift for r in local.records], abs=1e-12)


def test_half_precision_by_hand() -> None:
    """The change is rounded, not the model: 1000 + 1/3 would be 1000 in bfloat16."""
    path, local = walk([1000.0, 1001.0], schedule=prsgd.every(1), steps=1, start=1000.0, lr=1 / 3,
                       averaging=prsgd.mean(dtype=torch.bfloat16))  # fmt: skip
    third = float(torch.tensor(1 / 3).bfloat16())
    assert path[0] == [1000.0 + third / 2] * 2
    assert local.records[0].bytes_sent == 2 + 8 * SUMS_WIDTH  # 2 (N - 1) / N of one rounded number, and of the sums
    assert math.isclose(path[0][0], 1000 + 1 / 6, rel_tol=0, abs_tol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0, 1, CACHED, 2 * CACHED + 3])
def test_half_precision_run_by_run_is_what_it_is_at_once(dtype: torch.dtype, size: int) -> None:
    """Rounded, added up in half precision, divided by the weight, which is not 1; what float16 has not said is kept."""
    point, wire = random(size, dtype=torch.float32), prsgd.half(dtype)
    averaging = prsgd.mean(wire=wire)
    snap = point + torch.stack([random(size, worker, torch.float32) for worker in (1, 2, 3)])
    landing = averaging.launch(averaging.init(point, 3), prsgd.InProcess(3), snap, make_header(3)).wait()
    assert landing.target is not None
    assert landing.memory is not None
    changes = snap - point
    rounded = changes.to(dtype)
    assert torch.equal(landing.target, point + (rounded[0] + rounded[1] + rounded[2]).float() / 3)
    if wire.keeps_residuals:
        assert torch.equal(landing.memory["residuals"], changes - rounded.float())


def test_half_precision_averages_optimizer_state_too() -> None:
    how: dict[str, Any] = {"schedule": prsgd.every(2), "optimizer_state": "average", "lr": 0.05}
    rows, _, _ = train_fleet([8] * 3, averaging=prsgd.mean(dtype=torch.bfloat16), **how)
    means, _, _ = train_fleet([8] * 3, averaging=prsgd.mean(), **how)
    torch.testing.assert_close(rows, means, rtol=0, atol=5e-3)


def test_rounding_follows_the_seed() -> None:
    how: dict[str, Any] = {"schedule": prsgd.every(2)}
    first, again, other = (train_fleet([8] * 3, averaging=prsgd.quantized(2, seed=s), **how)[0] for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("wire", "format_bytes"),
    [
        (prsgd.quantized(4, way="gather"), lambda p: p * 4 / 8 + p / 512 * 4),
        (prsgd.quantized(8, way="gather"), lambda p: p + p / 512 * 4),
        (prsgd.quantized(2, way="gather"), lambda p: p * 1.6 / 8 + p / 512 * 4),
        (prsgd.quantized(3, way="gather"), lambda p: p * 3 / 8 + p / 512 * 4),
        (prsgd.quantized("ternary", way="gather"), lambda p: p * 1.6 / 8 + p / 512 * 4),
        (prsgd.quantized("sign", way="gather"), lambda p: p / 8 + p / 512 * 4),
        (prsgd.sparse(0.01), lambda p: p * 0.01 * 6),
        (prsgd.sparse(0.02, bits=2), lambda p: p * 0.02 * 2.25),
    ],
    ids=lambda value: None if callable(value) else str(value),
)
def test_bytes_within_2_percent_of_the_format(wire: Any, format_bytes: Any) -> None:
    p, n = 50_000, 4
    averaging = prsgd.mean(wire=wire)
    memory = averaging.init(torch.zeros(p), n)
    header = prsgd.Header(
        make_header(n).sums, torch.zeros(0), torch.zeros(n, 0), counts=(True,) * n, bad=(False,) * n, steps=(1,) * n,
        samples=(1,) * n,
    )  # fmt: skip
    landing = averaging.launch(memory, prsgd.InProcess(n), random(n * p, dtype=torch.float32).view(n, p), header).wait()
    declared = (n - 1) * (format_bytes(p) + (SUMS_WIDTH + 1) * 4)
    assert landing.bytes_sent == pytest.approx(declared, rel=0.02)
    assert landing.hops == n - 1


def test_bad_input() -> None:
    for bits in (0, 17, -1, 2.5, True, None):
        with pytest.raises(ValueError, match='bits must be a whole number from 1 to 16, "ternary" or "sign", got'):
            prsgd.quantized(bits)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='bits must be a whole number from 1 to 16, "ternary" or "sign", got'):
        prsgd.quantized("4")
    with pytest.raises(ValueError, match="did you mean 'ternary'"):
        prsgd.quantized("tenary")
    with pytest.raises(ValueError, match="bucket must be"):
        prsgd.quantized(4, bucket=0)
    for density in (0.0, 1.1, -0.5, True, "x", float("nan")):
        with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got"):
            prsgd.sparse(density)  # type: ignore[arg-type]
    for bits in (0, 2.0, True):
        with pytest.raises(ValueError, match="bits must be a whole number >= 1, got"):
            prsgd.sparse(0.1, bits=bits)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bits must be at most 8, got 9"):
        prsgd.sparse(0.1, bits=9)
    for dtype in (torch.int8, torch.float32, "bfloat16"):
        with pytest.raises(ValueError, match=r"dtype must be torch.bfloat16 or torch.float16, got"):
            prsgd.mean(dtype=dtype)  # type: ignore[arg-type]
    for wire in (None, prsgd.quantized(4), prsgd.sparse(0.1)):
        with pytest.raises(ValueError, match="weights must be one of"):
            prsgd.mean("x", wire)
    with pytest.raises(ValueError, match=r"wire must be one such as half\(\) or quantized\(4\), got 4"):
        prsgd.mean(wire=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"of must be a mean\(\), got quantized"):
        prsgd.outer(of=prsgd.quantized(4))  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8, 12, 16, "ternary"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_keep_their_place(bits: int | str, dtype: torch.dtype) -> None:
    """Rounding takes none of them beyond the last level, whatever the scale, also where it is drawn up most. (Of many
    levels float32 cannot tell a draw of almost 1 from 1, and -scale is once in a while the level above.)"""
    scales = torch.rand(64, 1, generator=torch.Generator().manual_seed(0), dtype=dtype) + 0.5
    change = (scales * torch.ones(4096).to(dtype)).flatten()
    change[1::2] *= -1
    wire = prsgd.quantized(bits, bucket=4096)
    rounding = 1e-5 if wire.levels < 256 else 2.1 / wire.levels
    found = wire.decode(wire.encode(change), change)
    torch.testing.assert_close(found, change, rtol=rounding, atol=0)
    assert bool((found.abs() <= change.abs() * (1 + 1e-5)).all())


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, "ternary", "sign"])
@pytest.mark.parametrize("size", [1e-45, 1e-39, 2e-38, 1e-36, 1e-34, 1e-30, 1e38])
def test_next_to_nothing_and_next_to_everything(bits: int | str, size: float) -> None:
    """Where levels by scale are more than float32 holds nothing is said, and not -scale for 0."""
    change = torch.tensor([size, 0.0, -size, 0.5 * size])
    wire = prsgd.quantized(bits)
    found = torch.stack([wire.decode(wire.encode(change, average=draw), change) for draw in range(400)]).double()
    assert bool(torch.isfinite(found).all())
    assert bool((found.abs() <= 1.5 * size).all())
    if bits != "sign" and size >= 1e-30:
        assert bool(((found.mean(dim=0) - change.double()).abs() <= 5 * size / 20).all())
    if bits not in (1, "sign"):
        # Of 65,535 levels float32 cannot tell a draw of almost 1 from 1, and 0 is once in a while the level above.
        assert bool((found[:, 1].abs() <= (size / 32767 * 1.01 if bits == 16 else 0.0)).all())
