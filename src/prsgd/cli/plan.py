"""``prsgd plan``: how often to average, before anything is trained."""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prsgd.cli.parser import Parser, path, refusing

if TYPE_CHECKING:
    from prsgd.theory.bounds import Problem
    from prsgd.theory.plan import Option, Plan

PARAMETERS = "25M"
STEP_TIME = "100ms"
BANDWIDTH = "1Gbit"
PLOTS = (".png", ".svg", ".pdf")


def add(parser: Parser) -> None:
    run = parser.add_argument_group("the run")
    run.add_argument("--workers", type=int, required=True, metavar="N", help="how many")
    run.add_argument(
        "--steps", metavar="T", help="of each worker, such as 100k; or --epochs and --samples; or --budget"
    )
    run.add_argument("--epochs", type=int, metavar="E", help="passes over the data, all workers together")
    run.add_argument("--samples", metavar="M", help="training samples, such as 50k")
    run.add_argument("--batch-size", type=int, metavar="B", help="of each worker (32, or the probe's)")
    run.add_argument("--budget", metavar="TIME", help="how long the run may take, such as 8h: as many steps as fit")
    cost = parser.add_argument_group("what it costs")
    cost.add_argument("--parameters", metavar="P", help=f"of the model, such as 270k or 25M ({PARAMETERS})")
    cost.add_argument("--step-time", metavar="TIME", help=f"of one worker's step, such as 20ms ({STEP_TIME})")
    cost.add_argument("--bandwidth", metavar="RATE", help=f"of a worker's link, as 100Mbit ({BANDWIDTH})")
    cost.add_argument("--latency", metavar="TIME", help="of a message (0ms)")
    cost.add_argument("--shape", help="of an average: ring, tree or parameter-server (ring)")
    cost.add_argument("--cluster", metavar="NAME", help="step time and link of a preset, or of calibrate's file")
    what = parser.add_argument_group("the problem's constants, if they are known; all four or none")
    what.add_argument("--probe", type=path, metavar="FILE", help="what `prsgd probe --json` printed")
    what.add_argument("--smoothness", type=float, metavar="L", help="largest curvature on the path of training")
    what.add_argument("--noise", type=float, metavar="SIGMA2", help="variance of a worker's mini-batch gradient")
    what.add_argument("--second-moment", type=float, metavar="G2", help="largest mean squared norm of such a gradient")
    what.add_argument("--gap", type=float, metavar="F", help="f(x0) - f*: the first loss, for cross-entropy")
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="the plan for programs")
    out.add_argument("--plot", type=path, metavar="FILE", help="a picture of it, as PNG, SVG or PDF")


def run(args: argparse.Namespace) -> int:
    with refusing("plan"):
        from prsgd import cluster as clusters
        from prsgd import units
        from prsgd._check import whole_number
        from prsgd.comm.links import Link
        from prsgd.theory.plan import MOST_WORKERS, make_plan

        whole_number("workers", args.workers, at_least=1, at_most=MOST_WORKERS)
        _check_plot(args.plot)
        probed = {} if args.probe is None else _read_probe(args.probe)
        cluster = None if args.cluster is None else clusters.load(args.cluster, args.workers)
        step_seconds = probed.get("step_seconds", units.seconds("step_time", STEP_TIME))
        if cluster is not None:
            step_seconds = cluster.slowest_step_seconds
        if args.step_time is not None:
            step_seconds = units.seconds("step_time", args.step_time, above_zero=True)
        usual = Link(units.bytes_per_second("bandwidth", BANDWIDTH)) if cluster is None else cluster.link
        parameters = args.parameters if args.parameters is not None else str(probed.get("parameters", PARAMETERS))
        link = Link(
            usual.bytes_per_second if args.bandwidth is None else units.bytes_per_second("bandwidth", args.bandwidth),
            usual.latency_seconds if args.latency is None else units.seconds("latency", args.latency),
            usual.shape if args.shape is None else args.shape,
        )
        plan = make_plan(
            workers=args.workers,
            steps=_steps(args, probed),
            budget_seconds=None if args.budget is None else units.seconds("budget", args.budget, above_zero=True),
            model_bytes=4 * units.count("parameters", parameters),
            step_seconds=step_seconds,
            link=link,
            average_seconds=None if args.bandwidth or cluster is not None else probed.get("average_seconds"),
            problem=_problem(args, probed),
        )
        if args.plot is not None:
            from prsgd.report.plan import draw_plan

            draw_plan(plan, args.plot)
    known = [
        ("parameters", PARAMETERS, args.parameters or probed),
        ("step time", STEP_TIME, args.step_time or probed or cluster),
        ("bandwidth", BANDWIDTH, args.bandwidth or cluster or "average_seconds" in probed),
    ]
    assumed = {name: value for name, value, given in known if not given}
    if args.json:
        from prsgd.theory.seen import seen

        empirical = dataclasses.asdict(seen(plan.chosen.steps))
        print(json.dumps({**_for_programs(plan), "assumed": assumed, "empirical": empirical}))
        return 0
    print(text(plan, assumed))
    return 0


def _for_programs(plan: Plan) -> dict[str, Any]:
    found = {**dataclasses.asdict(plan), "is_vacuous": plan.is_vacuous}
    for option, made in ((plan.chosen, found["chosen"]), *zip(plan.options, found["options"])):
        if option.bound is not None:
            made["bound"] |= {"total": option.bound.total, "dominant": option.bound.dominant}
    return found


def text(plan: Plan, assumed: dict[str, str]) -> str:
    """The plan for a terminal of 80 columns: one row a period, and what differs by overlap side by side."""
    from prsgd.cli.display import duration, many, number_of
    from prsgd.theory.seen import words

    within = plan.budget_seconds is not None
    lines = [f"{number_of(plan.workers, 'worker')}, {number_of(plan.steps, 'step')} each"]
    if plan.budget_seconds is not None:
        lines = [f"{number_of(plan.workers, 'worker')}, each row a run of {duration(plan.budget_seconds)}"]
        if plan.steps is not None:
            lines[0] += f", the least that {number_of(plan.steps, 'step')} need{'s' if plan.steps == 1 else ''}"
    lines = textwrap.wrap(lines[0], 80)
    if assumed:
        lines.append("assumed: " + ", ".join(f"{name} {value}" for name, value in assumed.items()))
    overlaps = sorted({option.overlap for option in plan.options})
    what = "bound" if plan.problem is not None else "steps" if within else "time"
    giga = max(option.bytes_sent for option in plan.options) >= 1e12
    fixed = ["period", *(["steps"] if what == "bound" else []), "rounds", "GB sent" if giga else "MB sent"]
    rows = [[*fixed, *(f"overlap {overlap}  " for overlap in overlaps)]]
    for period in sorted({option.period for option in plan.options}):
        options = {option.overlap: option for option in plan.options if option.period == period}
        best = plan.chosen if plan.chosen.period == period else min(options.values(), key=_rank)
        cells = [str(period), *([many(best.steps)] if what == "bound" else [])]
        cells += [many(best.rounds), many(round(best.bytes_sent / (1e9 if giga else 1e6)))]
        rows.append(cells + [_cell(options.get(overlap), what, plan) for overlap in overlaps])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    named = {"bound": "Theorem 1's bound", "steps": "steps", "time": "time"}[what]
    lines += ["", " " * (sum(widths[: len(fixed)]) + 2 * len(fixed)) + f"{named}, with"]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    lines.append("* covered by Corollary 1   < chosen" + ("   rounds and bytes of the best overlap" if within else ""))
    lines += ["", *(textwrap.fill(reason, 80) for reason in plan.reasons)]
    if plan.workers > 1 and plan.problem is None and plan.chosen.period < 64:
        lines += ["", textwrap.fill(words(plan.chosen.steps), 80)]
    return "\n".join(lines)


def _rank(option: Option) -> tuple[float, float]:
    return (option.bound.total if option.bound is not None else 0.0, option.seconds_per_step)


def _cell(option: Option | None, what: str, plan: Plan) -> str:
    from prsgd.cli.display import duration, many

    if option is None:
        return "-  "
    shown = {
        "bound": lambda: f"{option.bound.total:.3g}" if option.bound is not None else "",
        "steps": lambda: many(option.steps),
        "time": lambda: duration(option.seconds),
    }[what]()
    return shown + (" *" if option.guaranteed else "  ")[1:] + ("<" if option is plan.chosen else " ")


def _steps(args: argparse.Namespace, probed: dict[str, Any]) -> int | None:
    """T as given; None with a budget."""
    from prsgd import units
    from prsgd._check import whole_number

    ways = [args.steps, args.epochs if args.epochs is not None else args.samples, args.budget]
    if sum(way is not None for way in ways) > 1:
        raise ValueError("steps, epochs and budget are ways to say how long: give one of them")
    batch_size = probed.get("batch_size", 32) if args.batch_size is None else args.batch_size
    whole_number("batch_size", batch_size, at_least=1)
    if args.budget is not None:
        return None
    if args.steps is not None:
        return units.count("steps", args.steps)
    if args.epochs is None or args.samples is None:
        raise ValueError("how long? give --steps, or --epochs with --samples, or --budget")
    epochs = whole_number("epochs", args.epochs, at_least=1, at_most=units.MOST)
    per_epoch: int = units.count("samples", args.samples) // (args.workers * batch_size)
    if not per_epoch:
        raise ValueError(f"samples must be at least workers x batch_size, got {args.samples}")
    if epochs * per_epoch > units.MOST:
        raise ValueError(
            f"epochs x samples must make at most {units.MOST:,} steps, got {epochs:,} epochs of {per_epoch:,} steps"
        )
    return epochs * per_epoch


def _check_plot(place: Path | None) -> None:
    """Matplotlib would put an ending behind a name that has none, and draw beside the folder that it names."""
    if place is not None and (place.suffix.lower() not in PLOTS or place.is_dir()):
        endings = f"{', '.join(PLOTS[:-1])} or {PLOTS[-1]}"
        raise ValueError(f"plot must be a file that ends in {endings}, got {str(place)!r}")


def _problem(args: argparse.Namespace, probed: dict[str, Any]) -> Problem | None:
    from prsgd._check import within
    from prsgd.theory.bounds import Problem
    from prsgd.theory.plan import LEAST_SMOOTHNESS, MOST_CONSTANT

    given = {
        "smoothness": args.smoothness,
        "noise": args.noise,
        "grad_second_moment": args.second_moment,
        "gap": args.gap,
    }
    if probed:
        given = {name: probed[name] if value is None else value for name, value in given.items()}
        if args.second_moment is None:  # both are estimates
            given["grad_second_moment"] = max(given["grad_second_moment"], given["noise"])
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing:
        options = [f"--{name.removeprefix('grad_').replace('_', '-')}" for name in missing]
        raise ValueError(f"the bound needs all four constants; missing: {', '.join(options)}; `prsgd probe` finds them")
    for name, value in given.items():
        within(name.removeprefix("grad_"), value, LEAST_SMOOTHNESS if name == "smoothness" else 0.0, MOST_CONSTANT)
    if given["noise"] > given["grad_second_moment"]:
        raise ValueError(
            f"second_moment must be at least the noise, which is a part of it: got {given['grad_second_moment']:g} "
            f"and {given['noise']:g}"
        )
    return Problem(**given)


def _read_probe(file: Path) -> dict[str, Any]:
    """The numbers of it that a plan uses, checked."""
    from prsgd import _json, units
    from prsgd._check import whole_number, within
    from prsgd.theory.bounds import Problem
    from prsgd.theory.plan import MOST_CONSTANT

    try:
        content = _json.parse(file.read_bytes())
        found = {
            field.name: within(field.name, content[field.name]["value"], 0.0, MOST_CONSTANT)
            for field in dataclasses.fields(Problem)
        }
        least, most = units.LEAST_SECONDS, units.MOST_SECONDS
        found["step_seconds"] = within("step_seconds", content["step_seconds"], least, most)
        found["parameters"] = whole_number("parameters", content["parameters"], at_least=1, at_most=units.MOST)
        if content.get("batch_size") is not None:
            found["batch_size"] = whole_number("batch_size", content["batch_size"], at_least=1, at_most=units.MOST)
        if content.get("average_seconds") is not None:
            found["average_seconds"] = within("average_seconds", content["average_seconds"], 0.0, most)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f": {error}" if isinstance(error, ValueError) and "must be" in str(error) else ""
        raise ValueError(f"{file}: not what `prsgd probe --json` prints{why}") from None
    return found
