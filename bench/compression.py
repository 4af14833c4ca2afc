"""What fewer bytes cost: packing and unpacking 25M numbers, against the time that they save at 1 Gbit/s.

python bench/compression.py

An average as float32 takes an all-reduce of 2 (N - 1) / N models. In few bits each worker packs one change, sends it to
N - 1 others, and unpacks N. Target: packing and unpacking take less than half of the time saved, or it does not pay.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

import prsgd
from prsgd.averaging.wires.base import Gathered

VALUES, TIMES = 25_000_000, 5
BYTES_PER_SECOND = 1e9 / 8
WORKERS = (2, 4, 8, 16)
FORMS: dict[str, Gathered] = {
    "quantized(8)": prsgd.quantized(8),
    "quantized(4)": prsgd.quantized(4),
    "quantized(2)": prsgd.quantized(2),
    'quantized("ternary")': prsgd.quantized("ternary"),
    'quantized("sign")': prsgd.quantized("sign"),
    "sparse(0.01)": prsgd.sparse(0.01),
    "sparse(0.001)": prsgd.sparse(0.001),
}


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def pack(form: Gathered, model: Tensor, point: Tensor, residual: Tensor) -> None:
    """What a worker does before it sends."""
    change = model - point
    if form.keeps_residuals:
        change += residual
    encoded = form.encode(change)
    if form.keeps_residuals:
        form.add(encoded, change, -1.0)


def measure() -> dict[str, tuple[float, float]]:
    """Seconds to pack one change (with what is kept for later, where it is) and to unpack one; forms take turns."""
    change = torch.randn(VALUES)
    total = torch.zeros(VALUES)
    packing: dict[str, list[float]] = {name: [] for name in FORMS}
    unpacking: dict[str, list[float]] = {name: [] for name in FORMS}
    for _ in range(TIMES + 1):
        for name, form in FORMS.items():
            packing[name].append(seconds(partial(pack, form, change, torch.zeros(VALUES), torch.zeros(VALUES))))
            unpacking[name].append(seconds(partial(form.add, form.encode(change), total)))
    return {name: (median(packing[name][1:]), median(unpacking[name][1:])) for name in FORMS}


def half(change: Tensor) -> float:
    """mean(wire=half()): rounding the change, and back."""
    return median(seconds(lambda: change.bfloat16().float()) for _ in range(TIMES))


def main() -> None:
    torch.set_num_threads(1)
    found = measure()
    rounding = half(torch.randn(VALUES))
    print(f"{VALUES / 1e6:g}M numbers, one thread, 1 Gbit/s; ms")
    print(
        f"{'':<21} {'N':>2} {'MB sent':>8} {'float32':>8} {'sent in':>8} {'float32':>8} {'saved':>7} {'packing':>8}"
        "  pays"
    )
    for workers in WORKERS:
        plain = 2 * (workers - 1) / workers * VALUES * 4
        for name, form in FORMS.items():
            sent = (workers - 1) * form.num_bytes(VALUES)
            line(name, workers, sent, plain, found[name][0] + workers * found[name][1])
        line("mean(dtype=bfloat16)", workers, plain / 2, plain, rounding)
        print()


def line(name: str, workers: int, sent: float, plain: float, cost: float) -> None:
    saved = (plain - sent) / BYTES_PER_SECOND
    pays = "yes" if cost < saved / 2 else "by less than half" if cost < saved else "NO"
    print(
        f"{name:<21} {workers:>2} {sent / 1e6:>8.1f} {plain / 1e6:>8.1f} {1e3 * sent / BYTES_PER_SECOND:>8.0f} "
        f"{1e3 * plain / BYTES_PER_SECOND:>8.0f} {1e3 * saved:>7.0f} {1e3 * cost:>8.0f}  {pays}"
    )


if __name__ == "__main__":
    main()
