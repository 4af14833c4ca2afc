"""``prsgd plan``: how often to average, before anything is trained."""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prsgd.cli.parser import Parser, refusing

if TYPE_CHECKING:
    from prsgd.theory.bounds import Problem
    from prsgd.theory.plan import Option, Plan

PARAMETERS = "25M"
STEP_TIME = "100ms"
ADVICE = (
    "From the literature and our own runs, not from the theorems: the paper trained ResNet-20 on CIFAR-10 with "
    "periods 4 to 32 about as well as with 1, far above the guarantee. Begin with 8, and look at `prsgd compare`."
)


def add(parser: Parser) -> None:
    run = parser.add_argument_group("the run")
    run.add_argument("--workers", type=int, required=True, metavar="N")
    run.add_argument("--steps", type=int, metavar="T", help="of each worker; or --epochs and --samples; or --budget")
    run.add_argument("--epochs", type=int, metavar="E", help="passes over the data, all workers together")
    run.add_argument("--samples", type=int, metavar="M", help="training samples")
    run.add_argument("--batch-size", type=int, default=32, metavar="B", help="of each worker (32)")
    cost = parser.add_argument_group("what it costs")
    cost.add_argument("--parameters", metavar="P", help=f"of the model, such as 270k or 25M ({PARAMETERS})")
    cost.add_argument("--step-time", metavar="TIME", help=f"of one worker's step, such as 20ms ({STEP_TIME})")
    cost.add_argument("--bandwidth", default="1Gbit", metavar="RATE", help="of a worker's link, as 100Mbit (1Gbit)")
    cost.add_argument("--latency", default="0ms", metavar="TIME", help="of a message (0ms)")
    cost.add_argument("--shape", default="ring", help="of an average: ring, tree or parameter-server (ring)")
    cost.add_argument("--budget", metavar="TIME", help="how long the run may take, such as 8h: as many steps as fit")
    what = parser.add_argument_group("the problem's constants, if they are known; all four or none")
    what.add_argument("--probe", type=Path, metavar="FILE", help="what `prsgd probe --json` printed: all of these")
    what.add_argument("--smoothness", type=float, metavar="L")
    what.add_argument("--noise", type=float, metavar="SIGMA2", help="variance of a worker's mini-batch gradient")
    what.add_argument("--second-moment", type=float, metavar="G2", help="largest mean squared norm of such a gradient")
    what.add_argument("--gap", type=float, metavar="F", help="f(x0) - f*: the first loss, for cross-entropy")
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="the plan for programs")
    out.add_argument("--plot", type=Path, metavar="FILE", help="time and bytes for each period, as PNG, SVG or PDF")


def run(args: argparse.Namespace) -> int:
    with refusing("plan"):
        from prsgd import units
        from prsgd.links import Link
        from prsgd.theory.plan import make_plan

        probed = {} if args.probe is None else _read_probe(args.probe)
        step_time = args.step_time or (f"{probed['step_seconds']}s" if probed else STEP_TIME)
        step_seconds = units.seconds("step_time", step_time)
        budget_seconds = None if args.budget is None else units.seconds("budget", args.budget)
        steps = _steps(args, step_seconds, budget_seconds)
        parameters = units.count("parameters", args.parameters or str(probed.get("parameters", PARAMETERS)))
        link = Link(
            units.bytes_per_second("bandwidth", args.bandwidth), units.seconds("latency", args.latency), args.shape
        )
        plan = make_plan(
            workers=args.workers,
            steps=steps,
            model_bytes=4 * parameters,
            step_seconds=step_seconds,
            link=link,
            problem=_problem(args, probed),
            budget_seconds=budget_seconds,
        )
        if args.plot is not None:
            from prsgd.report.plan import draw_plan

            draw_plan(plan, args.plot)
    if args.json:
        print(json.dumps(dataclasses.asdict(plan)))
        return 0
    assumed = [
        f"{name} {value} (--{name.replace(' ', '-')})"
        for name, value, given in (
            ("parameters", PARAMETERS, args.parameters),
            ("step time", STEP_TIME, args.step_time),
        )
        if given is None and not probed
    ]
    print(text(plan, assumed))
    return 0


def text(plan: Plan, assumed: list[str]) -> str:
    """The plan for a terminal of 80 columns: one row a period, and what differs by overlap side by side."""
    from prsgd.cli.display import duration

    within = plan.budget_seconds is not None
    lines = [f"{plan.workers} workers, {plan.steps:,} steps each"]
    if plan.budget_seconds is not None:
        lines = [f"{plan.workers} workers, each row a run of {duration(plan.budget_seconds)}"]
    if assumed:
        lines.append(f"assumed: {', '.join(assumed)}")
    overlaps = sorted({option.overlap for option in plan.options})
    what = "bound" if plan.problem is not None else "steps" if within else "time"
    fixed = ["period", *(["steps"] if what == "bound" else []), "rounds", "MB sent"]
    rows = [[*fixed, *(f"overlap {overlap}" for overlap in overlaps)]]
    for period in sorted({option.period for option in plan.options}):
        options = {option.overlap: option for option in plan.options if option.period == period}
        best = plan.chosen if plan.chosen.period == period else min(options.values(), key=_rank)
        cells = [str(period), *([f"{best.steps:,}"] if what == "bound" else [])]
        cells += [f"{best.rounds:,}", f"{best.bytes_sent / 1e6:,.0f}"]
        rows.append(cells + [_cell(options.get(overlap), what, plan) for overlap in overlaps])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    named = {"bound": "Theorem 1's bound", "steps": "steps", "time": "time"}[what]
    lines += ["", " " * (sum(widths[: len(fixed)]) + 2 * len(fixed)) + f"{named}, with"]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    lines.append("* covered by Corollary 1   < chosen" + ("   rounds and MB of the best overlap" if within else ""))
    lines += ["", *(textwrap.fill(reason, 80) for reason in plan.reasons)]
    if plan.is_vacuous and plan.workers > 1:
        lines += ["", textwrap.fill(ADVICE, 80)]
    return "\n".join(lines)


def _rank(option: Option) -> tuple[float, float]:
    return (option.bound.total if option.bound is not None else 0.0, option.seconds_per_step)


def _cell(option: Option | None, what: str, plan: Plan) -> str:
    from prsgd.cli.display import duration

    if option is None:
        return "-  "
    shown = {
        "bound": lambda: f"{option.bound.total:.3g}" if option.bound is not None else "",
        "steps": lambda: f"{option.steps:,}",
        "time": lambda: duration(option.seconds),
    }[what]()
    return shown + (" *" if option.guaranteed else "  ")[1:] + ("<" if option is plan.chosen else " ")


def _steps(args: argparse.Namespace, step_seconds: float, budget_seconds: float | None) -> int:
    """T: as given, or what a budget holds if averages cost nothing."""
    from prsgd._check import positive, whole_number

    if args.steps is not None:
        if args.epochs is not None or args.samples is not None:
            raise ValueError("steps and epochs are two ways to say how long: give one of them")
        return whole_number("steps", args.steps, at_least=1)
    if args.epochs is None and args.samples is None and budget_seconds is not None:
        return max(1, int(positive("budget", budget_seconds) / positive("step_time", step_seconds)))
    if args.epochs is None or args.samples is None:
        raise ValueError("how long? give --steps, or --epochs with --samples, or --budget")
    epochs = whole_number("epochs", args.epochs, at_least=1)
    per_epoch = whole_number("samples", args.samples, at_least=1) // (
        whole_number("workers", args.workers, at_least=1) * whole_number("batch_size", args.batch_size, at_least=1)
    )
    if not per_epoch:
        raise ValueError(f"samples must be at least workers x batch_size, got {args.samples}")
    return epochs * per_epoch


def _problem(args: argparse.Namespace, probed: dict[str, Any]) -> Problem | None:
    from prsgd.theory.bounds import Problem

    given = {
        "smoothness": args.smoothness,
        "noise": args.noise,
        "grad_second_moment": args.second_moment,
        "gap": args.gap,
    }
    if probed:
        given = {name: probed[name]["value"] if value is None else value for name, value in given.items()}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise ValueError(f"the bound needs all four constants, {', '.join(missing)} missing: `prsgd probe` finds them")
    return Problem(**given)


def _read_probe(path: Path) -> dict[str, Any]:
    from prsgd.theory.bounds import Problem

    try:
        found = json.loads(path.read_text())
        for field in dataclasses.fields(Problem):
            float(found[field.name]["value"])
        float(found["step_seconds"]), int(found["parameters"])
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not what `prsgd probe --json` prints ({error!r})") from None
    return dict(found)
