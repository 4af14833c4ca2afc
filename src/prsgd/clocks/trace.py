"""What every worker did when: steps, waits and averages, in a ring buffer that is cheap enough to leave on.

    step     computing: a gradient and its update
    blocked  at an average: waiting for the others, for the transfer, copying
    flight   of an average, from a worker's launch to its arrival: hidden while the worker computes
    pause    not training: evaluation, a checkpoint

``split`` tells the two parts of what is blocked apart: an average begins when the last worker has launched it.
"""

from __future__ import annotations

import json
import platform
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from prsgd import _json, files

SPANS = 40_000
"""Kept of a run: the newest."""
KINDS = ("step", "blocked", "wait", "average", "flight", "pause")


@dataclass(frozen=True)
class Span:
    """Something that a worker did."""

    worker: int
    kind: str
    begin: float
    """Seconds."""
    end: float
    number: int
    """The step, or the round."""


class Trace:
    """The newest spans. An entry is of one worker, or of several at once: then its times are sequences too.

    >>> trace = Trace()
    >>> trace.add("step", 0, 0.0, 1.0, 1)
    >>> trace.add("step", (0, 1), (1.0, 0.0), (2.0, 3.0), (2, 1))
    >>> [(span.worker, span.begin, span.end) for span in trace.spans()]
    [(0, 0.0, 1.0), (1, 0.0, 3.0), (0, 1.0, 2.0)]
    >>> trace.seconds["step"]
    5.0
    """

    def __init__(self, spans: int = SPANS) -> None:
        self._entries: deque[tuple[str, Any, Any, Any, Any]] = deque()
        self._most, self._held = spans, 0
        self.seconds = dict.fromkeys(KINDS, 0.0)
        """By kind, of all workers together: also of spans that are no longer kept."""

    def add(self, kind: str, worker: Any, begin: Any, end: Any, number: Any) -> None:
        self._entries.append((kind, worker, begin, end, number))
        if isinstance(worker, int):
            self._held += 1
            self.seconds[kind] += end - begin
        else:
            self._held += len(worker)
            self.seconds[kind] += float(sum(end) - sum(begin))
        while self._held > self._most:
            gone = self._entries.popleft()[1]
            self._held -= 1 if isinstance(gone, int) else len(gone)

    def save(self, path: str | Path) -> None:
        """As a file that Perfetto, chrome://tracing and ``read`` open."""
        Path(path).write_text(json.dumps(to_chrome(self.spans())), encoding="utf-8")

    def spans(self) -> list[Span]:
        """One by one, in order of their beginning; neighbours that are one thing are joined."""
        found: dict[int, list[Span]] = {}
        for span in self._each():
            of_worker = found.setdefault(span.worker, [])
            last = of_worker[-1] if of_worker else None
            if last is not None and (last.kind, last.number, last.end) == (span.kind, span.number, span.begin):
                of_worker[-1] = replace(last, end=span.end)
            else:
                of_worker.append(span)
        return sorted((span for of_worker in found.values() for span in of_worker), key=lambda s: (s.begin, s.worker))

    def _each(self) -> Iterator[Span]:
        for kind, workers, begins, ends, number in self._entries:
            if isinstance(workers, int):
                yield Span(workers, kind, float(begins), float(ends), number)
            else:
                numbers = [number] * len(workers) if isinstance(number, int) else number
                for worker, begin, end, own in zip(workers, begins, ends, numbers):
                    yield Span(int(worker), kind, float(begin), float(end), int(own))


def split(spans: Sequence[Span]) -> list[Span]:
    """What is blocked as "wait", until the last worker has launched the average, and "average", from then on.

    A flight begins then too: before, nothing is on its way.

    >>> blocked = [Span(0, "blocked", 1.0, 4.0, 1), Span(1, "blocked", 3.0, 4.0, 1)]
    >>> flights = [Span(0, "flight", 1.0, 4.0, 1), Span(1, "flight", 3.0, 4.0, 1)]
    >>> [(s.worker, s.kind, s.begin, s.end) for s in split(blocked + flights) if s.kind != "flight"]
    [(0, 'wait', 1.0, 3.0), (0, 'average', 3.0, 4.0), (1, 'average', 3.0, 4.0)]
    """
    launched: dict[int, float] = {}
    for span in spans:
        if span.kind == "flight":
            launched[span.number] = max(launched.get(span.number, span.begin), span.begin)
    found = []
    for span in spans:
        if span.kind == "flight":
            found.append(replace(span, begin=min(launched[span.number], span.end)))
            continue
        if span.kind != "blocked":
            found.append(span)
            continue
        turn = min(max(launched.get(span.number, span.begin), span.begin), span.end)
        if turn > span.begin:
            found.append(replace(span, kind="wait", end=turn))
        if span.end > turn:
            found.append(replace(span, kind="average", begin=turn))
    return found


@dataclass(frozen=True)
class Share:
    """How one worker spent its time, in seconds; pauses are left out."""

    worker: int
    computing: float
    waiting: float
    communicating: float

    @property
    def idle(self) -> float:
        """The share of the time in which it did not compute."""
        total = self.computing + self.waiting + self.communicating
        return 1 - self.computing / total if total else 0.0


def shares(spans: Sequence[Span]) -> list[Share]:
    """One for each worker, of ``split`` spans.

    >>> shares([Span(0, "step", 0.0, 3.0, 1), Span(0, "wait", 3.0, 4.0, 1)])[0].idle
    0.25
    """
    found: dict[int, dict[str, float]] = {}
    for span in spans:
        kinds = found.setdefault(span.worker, {"step": 0.0, "wait": 0.0, "average": 0.0})
        if span.kind in kinds:
            kinds[span.kind] += span.end - span.begin
    return [Share(worker, k["step"], k["wait"], k["average"]) for worker, k in sorted(found.items())]


def to_chrome(spans: Iterable[Span]) -> dict[str, Any]:
    """The Trace Event Format that Perfetto and chrome://tracing open; flights have a row of their own below."""
    found = sorted(spans, key=lambda span: (span.worker, span.begin))
    names = [
        {"ph": "M", "name": "process_name", "pid": worker, "tid": 0, "args": {"name": f"worker {worker}"}}
        for worker in sorted({span.worker for span in found})
    ]
    events = [
        {
            "name": f"{span.kind} {span.number}",
            "cat": span.kind,
            "ph": "X",
            "ts": round(span.begin * 1e6, 3),
            "dur": round((span.end - span.begin) * 1e6, 3),
            "pid": span.worker,
            "tid": 1 if span.kind == "flight" else 0,
            "args": {"number": span.number},
        }
        for span in found
    ]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms", "otherData": {"host": platform.node()}}


def from_chrome(content: Any) -> list[Span]:
    """Back from ``to_chrome``; a ValueError if it is something else.

    >>> from_chrome(to_chrome([Span(3, "step", 1.0, 2.5, 7)]))
    [Span(worker=3, kind='step', begin=1.0, end=2.5, number=7)]
    """
    try:
        events = [event for event in content["traceEvents"] if event["ph"] == "X"]
        spans = [
            Span(
                int(event["pid"]),
                str(event["cat"]),
                event["ts"] / 1e6,
                (event["ts"] + event["dur"]) / 1e6,
                int(event["args"]["number"]),
            )
            for event in events
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a trace of prsgd: {error!r}") from None
    if any(span.kind not in KINDS for span in spans):
        raise ValueError("not a trace of prsgd: unknown kinds of spans")
    return sorted(spans, key=lambda span: (span.begin, span.worker))


def read(folder: Path) -> list[Span]:
    """The spans of all processes of a run, from its trace-*.json; times begin at 0.

    Machines have clocks of their own: those of others are moved so that averages arrive everywhere at once.
    """
    found: list[tuple[str, list[Span]]] = []
    for path in sorted(folder.glob(files.TRACES)):
        try:
            content = _json.parse(path.read_text())
            found.append((str(content.get("otherData", {}).get("host")), from_chrome(content)))
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path}: {error}") from None
    spans = [span for host, own in found for span in (own if host == found[0][0] else aligned(own, found[0][1]))]
    first = min((span.begin for span in spans), default=0.0)
    return sorted((_moved(span, -first) for span in spans), key=lambda span: (span.begin, span.worker))


def aligned(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Moved so that the flights end, in the middle of the differences, when those of ``others`` do.

    >>> theirs = [Span(0, "flight", 1.0, 2.0, 1), Span(0, "flight", 5.0, 6.0, 2)]
    >>> ours = [Span(1, "flight", 101.5, 102.0, 1), Span(1, "step", 102.0, 103.0, 9)]
    >>> [(span.begin, span.end) for span in aligned(ours, theirs)]
    [(1.5, 2.0), (2.0, 3.0)]
    """
    ends = {span.number: span.end for span in others if span.kind == "flight"}
    apart = [ends[span.number] - span.end for span in spans if span.kind == "flight" and span.number in ends]
    return [_moved(span, median(apart)) for span in spans] if apart else list(spans)


def _moved(span: Span, seconds: float) -> Span:
    return replace(span, begin=span.begin + seconds, end=span.end + seconds)
