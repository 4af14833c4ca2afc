"""What fewer bytes cost: an average's own work with 25M numbers, against the time that they save at 1 Gbit/s.

    python bench/compression.py               # all forms, and where the two ways of adding up cross
    python bench/compression.py --only 4      # quantized(4) alone

An average as float32 takes an all-reduce of 2 (N - 1) / N models. In few bits a worker packs its change, and either all
gather all of them (N - 1 sent, N unpacked) or each adds up a part for all (2 (N - 1) / N sent, two unpacked, 1/N packed
again). The work is timed as one worker of N does it, from its snapshot to the target, with nothing under way:
``launch`` and ``wait`` with a communicator that has the others' bytes at once. It is processor time of one thread, so
that other load on the machine disturbs it less; that of ``mean()`` is told beside it. Target: the work takes less than
a third of the time saved.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

import prsgd
from prsgd.averaging.base import Header, Sums
from prsgd.averaging.wires.base import Wire
from prsgd.comm.base import Combine, Done, Work, hosted_range
from prsgd.comm.links import bytes_of_combination, bytes_of_sum

VALUES, TIMES = 25_000_000, 5
BYTES_PER_SECOND = 1e9 / 8
WORKERS = (2, 4, 8, 16)
CROSSING = (2, 3, 4, 5, 6, 8)
FORMS: dict[str, Wire | None] = {
    "mean()": None,
    "half()": prsgd.half(),
    "quantized(8)": prsgd.quantized(8),
    "quantized(4)": prsgd.quantized(4),
    "quantized(2)": prsgd.quantized(2),
    'quantized("sign")': prsgd.quantized("sign"),
    "sparse(0.01)": prsgd.sparse(0.01),
    "sparse(0.001)": prsgd.sparse(0.001),
}


class OneOf(prsgd.Communicator):
    """Worker 0 of N, whose peers have sent what it sends itself."""

    timeout_seconds = 1.0

    def __init__(self, num_workers: int) -> None:
        self.num_workers, self.workers = num_workers, range(1)

    def all_reduce(self, flat: Tensor) -> Work[Tensor]:
        return Done(flat, bytes_sent=bytes_of_sum("all-reduce", self.num_workers, flat.nbytes)[0])

    def all_gather(self, payload: Tensor) -> Work[Tensor]:
        others = self.num_workers - 1
        return Done(payload.expand(self.num_workers, -1), bytes_sent=others * payload.nbytes, hops=others)

    def all_combine(self, lines: Tensor, beside: Tensor, combine: Combine, *, out: Tensor) -> Work[Tensor]:
        own = hosted_range(len(out), self.num_workers, 0)
        everybody = beside.expand(self.num_workers, -1)
        rows = lines[:, : own.stop].expand(self.num_workers, -1, -1)
        made = combine(rows, everybody, self.workers)
        for part in out.split(len(made)):
            part.copy_(made[: len(part)])
        sent = bytes_of_combination(self.num_workers, lines.nbytes, out.nbytes, beside.nbytes)
        return Done(everybody, bytes_sent=sent, hops=2)

    exchange = broadcast = close = None  # type: ignore[assignment]  # nobody asks for them here


class Case:
    """One form for so many workers: what it sends, and its seconds of work."""

    def __init__(self, wire: Wire | None, workers: int, model: Tensor) -> None:
        self.averaging, self.comm, self.model = prsgd.mean(wire=wire), OneOf(workers), model
        self.memory = self.averaging.init(torch.zeros_like(model), 1)
        empty = model.new_zeros(0)
        self.header = Header(
            Sums(workers=1), empty, empty.view(1, 0), counts=(True,), bad=(False,), steps=(1,), samples=(1,)
        )
        self.seconds: list[float] = []
        self.bytes_sent = 0

    def run(self, flat: Tensor) -> None:
        header = replace(self.header, flat=flat) if self.averaging.wire is None else self.header
        began = time.thread_time()
        landing = self.averaging.launch(self.memory, self.comm, self.model.unsqueeze(0), header).wait()
        self.seconds.append(time.thread_time() - began)
        self.bytes_sent = landing.bytes_sent

    @property
    def work(self) -> float:
        return median(self.seconds[1:])  # the first one warms up

    @property
    def sent_seconds(self) -> float:
        return self.bytes_sent / BYTES_PER_SECOND


def measured(cases: Iterable[Case], times: int) -> None:
    """In turns, so that what disturbs one disturbs all."""
    cases = list(cases)
    tail = cases[0].header.tail().numel()
    flat = torch.zeros(len(cases[0].model) + tail)
    for _ in range(times + 1):
        for case in cases:
            case.run(flat)


def table(forms: dict[str, Wire | None], model: Tensor, times: int) -> None:
    cases = {(name, n): Case(wire, n, model) for n in WORKERS for name, wire in forms.items()}
    measured(cases.values(), times)
    print(f"{len(model) / 1e6:g}M numbers, one thread, 1 Gbit/s; ms")
    print(
        f"{'':<20} {'N':>2} {'MB sent':>8} {'sent in':>8} {'saved':>7} {'work':>6} {'of saved':>9}  less than a third"
    )
    for (name, n), case in cases.items():
        plain = cases["mean()", n].sent_seconds
        saved = plain - case.sent_seconds
        share = "" if case.averaging.wire is None else f"{case.work / saved:>9.2f}" if saved > 0 else f"{'-':>9}"
        verdict = "" if not share else "yes" if 0 < 3 * case.work < saved else "NO"
        line = f"{name:<20} {n:>2} {case.bytes_sent / 1e6:>8.1f} {1e3 * case.sent_seconds:>8.0f} {1e3 * saved:>7.0f}"
        print(f"{line} {1e3 * case.work:>6.0f} {share:>9}  {verdict}".rstrip())
        if name == list(forms)[-1]:
            print()


def crossing(wire: Any, model: Tensor, times: int) -> None:
    """From how many workers on each adding up a part is faster than all gathering all: bytes and work together."""
    ways = ("gather", "scatter")
    cases = {(way, n): Case(replace(wire, way=way), n, model) for n in CROSSING for way in ways}
    measured(cases.values(), times)
    print(f"quantized({wire.bits!r}), both ways: sent in + work, ms")
    print(f"{'N':>2} {'gather':>20} {'scatter':>20}  faster   chosen")
    for n in CROSSING:
        parts = [(cases[way, n].sent_seconds, cases[way, n].work) for way in ways]
        shown = " ".join(f"{1e3 * sent:>6.0f} +{1e3 * work:>4.0f} ={1e3 * (sent + work):>5.0f}" for sent, work in parts)
        chosen = ways[wire.scatters(n, len(model))]
        print(f"{n:>2} {shown}  {ways[sum(parts[1]) < sum(parts[0])]:<8} {chosen}")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", help="of all forms only quantized(...) of this: 8, 4, 2 or sign")
    parser.add_argument("--values", type=int, default=VALUES)
    parser.add_argument("--times", type=int, default=TIMES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = torch.randn(options.values)
    shown = (f"quantized({options.only})", f'quantized("{options.only}")')
    forms = {name: wire for name, wire in FORMS.items() if not options.only or wire is None or name in shown}
    table(forms, model, options.times)
    for wire in (prsgd.quantized(4), prsgd.quantized("sign")):
        if options.only in (None, str(wire.bits)):
            crossing(wire, model, options.times)


if __name__ == "__main__":
    main()
