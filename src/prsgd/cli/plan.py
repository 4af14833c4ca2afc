"""``prsgd plan``: how often to average, before anything is trained."""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

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
    run.add_argument("--steps", type=int, metavar="T", help="of each worker; or --epochs, --samples and --batch-size")
    run.add_argument("--epochs", type=int, metavar="E", help="passes over the data, all workers together")
    run.add_argument("--samples", type=int, metavar="M", help="training samples")
    run.add_argument("--batch-size", type=int, default=32, metavar="B", help="of each worker (32)")
    cost = parser.add_argument_group("what it costs")
    cost.add_argument("--parameters", metavar="P", help=f"of the model, such as 270k or 25M ({PARAMETERS})")
    cost.add_argument("--step-time", metavar="TIME", help=f"of one worker's step, such as 20ms ({STEP_TIME})")
    cost.add_argument("--bandwidth", default="1Gbit", metavar="RATE", help="of a worker's link, as 100Mbit (1Gbit)")
    cost.add_argument("--latency", default="0ms", metavar="TIME", help="of a message (0ms)")
    cost.add_argument("--shape", default="all-reduce", help="of an average: all-reduce or parameter-server")
    cost.add_argument("--budget", metavar="TIME", help="how long the run may take, such as 8h")
    what = parser.add_argument_group("the problem's constants, if they are known; all four or none")
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
        from prsgd.theory.plan import Link, make_plan

        steps = _steps(args)
        parameters = units.count("parameters", args.parameters or PARAMETERS)
        link = Link(
            units.bytes_per_second("bandwidth", args.bandwidth), units.seconds("latency", args.latency), args.shape
        )
        plan = make_plan(
            workers=args.workers,
            steps=steps,
            model_bytes=4 * parameters,
            step_seconds=units.seconds("step_time", args.step_time or STEP_TIME),
            link=link,
            problem=_problem(args),
            budget_seconds=None if args.budget is None else units.seconds("budget", args.budget),
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
        if given is None
    ]
    print(text(plan, assumed))
    return 0


def text(plan: Plan, assumed: list[str]) -> str:
    """The plan for a terminal of 80 columns."""
    from prsgd.cli.display import duration

    lines = [f"{plan.workers} workers, {plan.steps:,} steps each"]
    if assumed:
        lines.append(f"assumed: {', '.join(assumed)}")
    has_bound = plan.chosen.bound is not None
    heads = ["period", "overlap", "rounds", "MB sent", "time", "guaranteed", *(["bound"] if has_bound else [])]
    rows = [heads]
    for option in _shown(plan):
        mark = " <-" if option is plan.chosen else ""
        cells = [str(option.period), str(option.overlap), f"{option.rounds:,}", f"{option.bytes_sent / 1e6:,.0f}"]
        cells += [duration(option.seconds), "yes" if option.guaranteed else "no"]
        cells += [f"{option.bound.total:.3g}"] if option.bound is not None else []
        cells[-1] += mark
        rows.append(cells)
    widths = [max(len(row[i].removesuffix(" <-")) for row in rows) for i in range(len(heads))]
    lines.append("")
    for row in rows:
        padded = [cell.rjust(w + (3 if cell.endswith(" <-") else 0)) for cell, w in zip(row, widths)]
        lines.append("  ".join(padded))
    lines += ["", *(textwrap.fill(reason, 80) for reason in plan.reasons)]
    if plan.is_vacuous and plan.workers > 1:
        lines += ["", textwrap.fill(ADVICE, 80)]
    return "\n".join(lines)


def _shown(plan: Plan) -> list[Option]:
    """Each period once, with the overlap that is fastest; and the chosen one."""
    best: dict[int, Option] = {}
    for option in plan.options:
        known = best.get(option.period)
        if known is None or option.seconds < known.seconds * (1 - 1e-9) or option is plan.chosen:
            best[option.period] = option
        if known is plan.chosen:
            best[option.period] = known
    return list(best.values())


def _steps(args: argparse.Namespace) -> int:
    from prsgd._check import whole_number

    if args.steps is not None:
        if args.epochs is not None or args.samples is not None:
            raise ValueError("steps and epochs are two ways to say how long: give one of them")
        return whole_number("steps", args.steps, at_least=1)
    if args.epochs is None or args.samples is None:
        raise ValueError("how long? give --steps, or --epochs with --samples")
    epochs = whole_number("epochs", args.epochs, at_least=1)
    per_epoch = whole_number("samples", args.samples, at_least=1) // (
        whole_number("workers", args.workers, at_least=1) * whole_number("batch_size", args.batch_size, at_least=1)
    )
    if not per_epoch:
        raise ValueError(f"samples must be at least workers x batch_size, got {args.samples}")
    return epochs * per_epoch


def _problem(args: argparse.Namespace) -> Problem | None:
    from prsgd.theory.bounds import Problem

    given = {
        "smoothness": args.smoothness,
        "noise": args.noise,
        "grad_second_moment": args.second_moment,
        "gap": args.gap,
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise ValueError(f"the bound needs all four constants, {', '.join(missing)} missing")
    return Problem(**given)
