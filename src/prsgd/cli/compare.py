"""``prsgd compare``: several methods or periods side by side, and a report."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import textwrap
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prsgd import files, tasks
from prsgd._check import shown
from prsgd.cli.options import RUN, add_place_options, add_run_options, merged, new_folder
from prsgd.cli.parser import Parser, fail, refusing

if TYPE_CHECKING:
    from prsgd.lab.config import Config

PERIODS = [1, 4, 8, 16, 32]
SEEDS = [3]
MOST_SEEDS = 1000
CLUSTER = "lan-1g"
"""For all methods, some of which need to know how long a step takes."""


def add(parser: Parser) -> None:
    add_run_options(parser, several=True)
    parser.add_argument(
        "--seeds", type=int, nargs="+", metavar="S", help="one number: how many (3); several: these seeds"
    )
    where = add_place_options(parser)
    where.add_argument("--jobs", type=int, metavar="J", help="runs at a time (as many as the cores take)")


def run(args: argparse.Namespace) -> int:
    with refusing("compare"):
        configs, folder, at_once = _ask(args)
    from prsgd.cli.display import Display, number_of
    from prsgd.cli.running import STOPPED, failing, interruptible
    from prsgd.lab.compare import compare
    from prsgd.lab.folder import note_failure
    from prsgd.lab.pool import Failure

    names = [f"{c.label}, seed {c.seed}" for c in configs]
    metric = tasks.find(configs[0].task, configs[0].task_sha256).metric
    print(f"{_what(configs)}: {number_of(len(configs), 'run')} in {folder}", file=sys.stderr)
    with interruptible() as asked, failing("compare", folder), Display(names, metric) as display:

        def finished(number: int, result: Any) -> None:
            if isinstance(result, Failure):
                if result.trace:
                    note_failure(folder / configs[number].folder_name, result.trace)
                display.failed(number, f"{result.kind}: {result.message}")
            elif result is not None:
                display.finished(number, result)

        results = compare(
            configs, folder, at_once=at_once, started=display.starting, observe=display.show, finished=finished,
            should_stop=asked, tensorboard=args.tensorboard,
        )  # fmt: skip
    if any(result is None for result in results):
        print(f"stopped; continue with: prsgd compare --resume {folder}", file=sys.stderr)
        return STOPPED
    bad = [name for name, result in zip(names, results) if isinstance(result, Failure)]
    if len(bad) == len(results):
        fail("compare", f"no run came to its end; see above, and {folder}", code=1)
    with failing("compare", folder):
        told = _report(folder, args.json, bad)
    print(told)
    if bad:
        fail("compare", f"{number_of(len(bad), 'run')} failed: {'; '.join(bad)}", code=1)
    return 0


def _report(folder: Path, as_json: bool, bad: list[str]) -> str:
    """Write it; returns what is printed of it."""
    print("writing the report ...", file=sys.stderr)
    from prsgd.report import page, read, series, verdict
    from prsgd.report.table import text_table

    groups = series.group(read.read([folder]))
    place = page.write([folder])
    sentence = verdict.verdict(groups)
    if as_json:
        runs = [
            {
                "folder": str(p.parent),
                "config": json.loads((p.parent / files.CONFIG).read_bytes()),
                **json.loads(p.read_bytes()),
            }
            for p in sorted(folder.glob(f"*/{files.SUMMARY}"))
        ]
        table = [dataclasses.asdict(row) for row in series.rows(groups)]
        found = {"folder": str(folder), "report": str(place), "verdict": sentence, "table": table, "runs": runs}
        found["failed"] = bad
        return json.dumps(found)
    return f"\n{text_table(groups)}\n\n{textwrap.fill(sentence, 80)}\n\nreport: {place}"


def _ask(args: argparse.Namespace) -> tuple[list[Config], Path, int]:
    """The runs, their folder and how many at a time. All that can be wrong is found here."""
    from prsgd._check import whole_number
    from prsgd.lab import events
    from prsgd.lab.checks import check, check_checkpoints, warn_about
    from prsgd.lab.folder import claim, finished_run, read_comparison, write_comparison
    from prsgd.lab.processes import plain_warnings

    given = merged(args, (*RUN, "seeds", "jobs"))
    if given.get("method") in ("all", ["all"]) and given.get("cluster") is None and given.get("processes", 1) == 1:
        given["cluster"] = CLUSTER
        print(
            f"time is modelled on the cluster {CLUSTER}: pr-sgd-timed needs one (--cluster for another)",
            file=sys.stderr,
        )
    jobs = given.pop("jobs", None)
    at_once = None if jobs is None else whole_number("jobs", jobs, at_least=1)
    if args.tensorboard:
        events.check()
    if args.resume is not None:
        if args.out is not None or given:
            raise ValueError("resume continues a comparison as it was begun: no other option but jobs goes with it")
        configs = read_comparison(args.resume)
        folder = args.resume
    else:
        configs = variants(given)
        folder = args.out or new_folder(f"compare-{tasks.short(configs[0].task)}")
    plain_warnings()
    if at_once is None:
        at_once = max(1, (os.cpu_count() or 1) // max(c.processes for c in configs))
    for config in {dataclasses.replace(c, seed=0, method="pr-sgd", period=1, overlap=0): c for c in configs}.values():
        check(config)
    warn_about(configs)
    if args.resume is not None:
        for config in configs:
            check_checkpoints(config, folder / config.folder_name)
            finished_run(folder / config.folder_name)
    claim(folder, marker=files.COMPARISON, resume=args.resume is not None, overwrite=args.overwrite)
    write_comparison(folder, configs)
    return configs, folder, at_once


def variants(given: dict[str, Any]) -> list[Config]:
    """Every method with every period and overlap, for every seed; methods without a period once."""
    from prsgd.lab import methods
    from prsgd.lab.config import Config

    values = {key: value if isinstance(value, list) else [value] for key, value in given.items()}
    names = values.pop("method", ["pr-sgd"])
    if names == ["all"]:
        [own] = values.get("optimizer", [None])
        [task] = values.get("task", ["digits"])
        names = methods.of_optimizer(own or tasks.find(task).defaults.get("optimizer", "sgd"))
    elif "all" in names:
        raise ValueError(f"method all stands alone, got {', '.join(map(shown, names))}")
    periods = values.pop("period", None)
    overlaps = values.pop("overlap", [None])
    seeds = values.pop("seeds", SEEDS)
    if len(seeds) == 1:
        how_many = seeds[0]
        if type(how_many) is not int or not 1 <= how_many <= MOST_SEEDS:  # True is an int too, and no number
            raise ValueError(
                f"seeds must be how many, from 1 to {MOST_SEEDS:,}, or a list of seeds, got {shown(how_many)}"
            )
        seeds = list(range(how_many))
    for key, several in values.items():
        if len(several) != 1:
            raise ValueError(f"{key} takes one value, got {shown(several)}")
    rest = {key: several[0] for key, several in values.items()}
    for key, choices in (("method", names), ("overlap", overlaps), ("seeds", seeds), ("period", periods)):
        if choices is not None and not choices:
            raise ValueError(f"{key} must have at least one value, got none")
    if periods is not None and not any(methods.find(name).period for name in names):
        raise ValueError(f"method {' and '.join(names)} has no period, got {shown(periods[0])}")
    for key, value in rest.items():
        if not any(methods.find(name).takes(key) for name in names):
            raise ValueError(f"method {' and '.join(names)} has no {key}, got {shown(value)}")
    found: dict[Config, None] = {}
    for name, overlap, seed in product(names, overlaps, seeds):
        own = {key: value for key, value in rest.items() if methods.find(name).takes(key)}
        usual = PERIODS if len(names) == 1 else [None]
        for period in (periods or usual) if methods.find(name).period else [None]:
            config = Config.from_dict({**own, "method": name, "overlap": overlap, "period": period, "seed": seed})
            found[config.resolve()] = None
    order = {label: i for i, label in enumerate(dict.fromkeys(c.label for c in found))}
    return sorted(found, key=lambda c: (c.seed, order[c.label]))


def _what(configs: list[Config]) -> str:
    from prsgd.cli.display import number_of

    one = configs[0]
    length = number_of(one.steps, "step") if one.epochs is None else number_of(one.epochs, "epoch")
    workers = number_of(one.workers, "worker")
    return f"{tasks.short(one.task)}, {one.model}, {workers}, batch {one.batch_size} each, {length}"
