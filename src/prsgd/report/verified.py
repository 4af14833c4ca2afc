"""The page of ``prsgd verify``: what the paper proves, beside what was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from prsgd.report.curves import Chart, Curve
from prsgd.report.figures import draw_charts
from prsgd.report.page import chart_data, figure_of, render
from prsgd.theory.verify import (
    EPSILON,
    FIXED_STEPS,
    Claim,
    Effort,
    by_workers,
    excess_losses,
    horizon,
    is_covered,
    largest_drifts,
)

_PERIODS = (1, 4, 16, 64)
_CAPTIONS = {
    "speedup": (
        "Linear speed-up",
        f"T is how long a run must be for its mean squared gradient to come down to {EPSILON}, with the lr that "
        "Corollary 1 gives for that T. The speed-up of N workers is T of one worker in T of N; 100 % means that twice "
        "the workers need half the steps. A ring marks a run whose period Corollary 1 covers: the rarer the averages, "
        "the fewer the workers that they serve.",
    ),
    "one-shot": (
        "Why one average at the end is not enough",
        f"Runs of {FIXED_STEPS} steps with Corollary 1's lr for so many. With averages on the way, more workers make "
        "the gradient at the consensus smaller; without any, larger.",
    ),
    "two-wells": (
        "Workers that end in different wells",
        "The loss above the best that there is, in a single worker's, on a function with two wells in each coordinate "
        "and the start between them. Workers that are averaged often go down together; the mean of models that went "
        "down different sides lies on the ridge. The last point of the curve is averaged once, at the end.",
    ),
    "drift": (
        "The drift beside Lemma 1's bound",
        "The largest drift of a run in its bound, 4 lr² (I + d - 1)² G². The bound takes all gradients of a round to "
        "point the same way, so it is the looser the longer the rounds are.",
    ),
    "communication": (
        "Rounds to the same quality",
        f"How many averages 8 workers need for a mean squared gradient of {EPSILON}. The dotted line is what they "
        "would need if rarer averages cost no steps.",
    ),
}


def write(claims: Sequence[Claim], effort: Effort, out: Path) -> Path:
    """Make verify.html in the folder ``out``, with verify.json and figures/ beside it; returns its path."""
    out.mkdir(parents=True, exist_ok=True)
    found = charts(effort)
    draw_charts(found, out)
    content = [{**asdict(claim), "holds": claim.holds} for claim in claims]
    (out / "verify.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    path = out / "verify.html"
    missed = [claim.name for claim in claims if not claim.holds]
    verdict = f"All {len(claims)} claims hold where they were measured."
    if missed:
        verdict = f"{len(claims) - len(missed)} of {len(claims)} claims hold; not: {'; '.join(missed)}."
    page = render(
        "verify.html.j2",
        chart_data(found),
        title="The paper's claims, measured",
        verdict=verdict,
        claims=claims,
        charts=[figure_of(chart, out, *_CAPTIONS[chart.key]) for chart in found],
    )
    path.write_text(page, encoding="utf-8")
    return path


def charts(effort: Effort) -> list[Chart]:
    """The figures, of what ``verify`` has measured with this effort."""
    return [_speedup(effort), _one_shot(effort), _two_wells(effort), _drift(effort), _communication(effort)]


def _speedup(effort: Effort) -> Chart:
    workers = tuple(effort.speedup_workers)
    alone = horizon(1, 1, effort.speedup_seeds)
    curves, rings = [], []
    for style, period in enumerate(_PERIODS):
        shares = [100 * alone / (n * horizon(n, period, effort.speedup_seeds)) for n in workers]
        curves.append(_line(f"period {period}", style, workers, shares))
        rings += [(float(n), share) for n, share in zip(workers, shares) if is_covered(n, period, effort)]
    title, y_label = "Share of a linear speed-up", "speed-up / workers (%)"
    return Chart("speedup", title, "workers", y_label, True, False, 0.0, (), tuple(curves), tuple(rings))


def _one_shot(effort: Effort) -> Chart:
    workers = tuple(effort.speedup_workers)
    named = {"once, at the end": None, "period 1": 1, "period 16": 16}
    curves = tuple(
        _line(name, style, workers, [by_workers(n, period, effort.speedup_seeds) for n in workers])
        for (name, period), style in zip(named.items(), (1, 0, 2))
    )
    title = f"Mean squared gradient of {FIXED_STEPS} steps"
    return Chart("one-shot", title, "workers", "mean squared gradient", True, True, None, (), curves)


def _two_wells(effort: Effort) -> Chart:
    found = excess_losses(effort.seeds, effort.steps)
    places = [effort.steps if period is None else period for period in found]
    curve = _line("8 workers", 0, places, list(found.values()))
    alone = _line("one worker alone", 6, [1, effort.steps], [1.0, 1.0])
    title, y_label = "Two wells a coordinate", "excess loss (one alone: 1)"
    return Chart("two-wells", title, "period", y_label, True, True, None, (), (curve, alone))


def _drift(effort: Effort) -> Chart:
    found = largest_drifts(effort.seeds)
    curves = []
    for style, overlap in enumerate(sorted({overlap for _, overlap in found})):
        points = [
            (period, drift / bound) for (period, d), (drift, bound) in found.items() if d == overlap and bound > 0
        ]
        curves.append(_line(f"overlap {overlap}", style, *zip(*points)))
    return Chart("drift", "Largest drift, in Lemma 1's bound", "period", "share", True, True, None, (), tuple(curves))


def _communication(effort: Effort) -> Chart:
    rounds = [horizon(8, period, effort.speedup_seeds) / period for period in _PERIODS]
    curves = (
        _line("8 workers", 0, _PERIODS, rounds),
        _line("as many steps as period 1", 2, _PERIODS, [rounds[0] / period for period in _PERIODS]),
    )
    return Chart("communication", "Averages to the same quality", "period", "rounds", True, True, None, (), curves)


def _line(name: str, style: int, x: Sequence[float], y: Sequence[float]) -> Curve:
    values = tuple(map(float, y))
    return Curve(name, style, tuple(map(float, x)), values, values, values)
