"""``prsgd train``: one run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from prsgd import files, tasks
from prsgd._check import whole_number
from prsgd._warn import warn
from prsgd.cli.options import RUN, add_place_options, add_run_options, merged, new_folder
from prsgd.cli.parser import Parser, refusing
from prsgd.comm import job

if TYPE_CHECKING:
    from prsgd.lab.config import Config
    from prsgd.records import Summary


def add(parser: Parser) -> None:
    add_run_options(parser, several=False)
    parser.add_argument("--seed", "--seeds", dest="seed", type=int, metavar="S", help="of weights and data order (0)")
    where = add_place_options(parser)
    where.add_argument(
        "--max-restarts", type=int, default=0, metavar="R",
        help="start --processes again, from the last checkpoint, if one fails (0 times)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    with refusing("train"):
        config, folder, begun = _ask(args)
    from prsgd.cli.display import Display
    from prsgd.cli.running import STOPPED, failing, interruptible
    from prsgd.lab.folder import finished_run
    from prsgd.lab.processes import train
    from prsgd.lab.progress import Stopped

    first = job.is_first()
    summary = finished_run(folder) if begun else None
    if summary is not None:
        print(f"{folder} was finished already", file=sys.stderr)
        return _tell(config, folder, summary, args.json) if first else 0
    names, metric = [config.label], tasks.find(config.task, config.task_sha256).metric
    if first:
        print(f"{_what(config)}\n{'continuing' if begun else 'in'} {folder}", file=sys.stderr)
    try:
        with interruptible() as asked, failing("train", folder), Display(names, metric) as display:
            if first:
                display.starting(0)
            summary = train(
                config, folder, observe=lambda progress: display.show(0, progress), should_stop=asked,
                tensorboard=args.tensorboard, max_restarts=args.max_restarts,
            )  # fmt: skip
    except Stopped as stopped:
        if first:
            print(f"stopped after step {stopped.step}; continue with: prsgd train --resume {folder}", file=sys.stderr)
        return STOPPED
    return _tell(config, folder, summary, args.json) if first else 0


def _tell(config: Config, folder: Path, summary: Summary, as_json: bool) -> int:
    from prsgd.cli.display import duration

    if as_json:
        print(json.dumps({"folder": str(folder), "config": dataclasses.asdict(config), **dataclasses.asdict(summary)}))
    else:
        print(f"done in {duration(summary.seconds)} of training: {_result(summary)}")
        if summary.modelled_seconds is not None:
            print(f"on the cluster: {duration(summary.modelled_seconds)}")
        print(f"the model: {folder / files.MODEL}\nfigures: prsgd report {folder}")
        if summary.train_loss > summary.first_train_loss:
            print("the loss is above that of the model it began with: lower the lr?")
    return 0


def _ask(args: argparse.Namespace) -> tuple[Config, Path, bool]:
    """What is to be trained, where, and whether it was begun before. All that can be wrong is found here."""
    import torch

    from prsgd.lab import events
    from prsgd.lab.checks import check, check_checkpoints, warn_about
    from prsgd.lab.config import Config
    from prsgd.lab.folder import claim, finished_run, prepare, read_config, same
    from prsgd.lab.processes import join_torchrun, plain_warnings

    torch.set_num_threads(1)
    plain_warnings()
    given = merged(args, (*RUN, "seed", "seeds"))
    if "seeds" in given:
        given["seed"] = given.pop("seeds")
    if args.tensorboard:
        events.check()
    whole_number("max_restarts", args.max_restarts, at_least=0)
    ours = job.find()
    if ours is not None and ours.restarts and args.out is not None and (args.out / files.CONFIG).exists():
        args.resume, args.out, args.overwrite = args.out, None, False  # what torchrun has started again goes on
    if ours is not None and ours.restarts and args.out is None and args.resume is None and job.is_first():
        warn("torchrun has started this run again, which begins anew: with --out it would go on")
    if args.resume is not None:
        if args.out is not None:
            raise ValueError("out and resume are two ways to name the folder: give one of them")
        config = read_config(args.resume)
        same(config, given, args.resume)
        folder = args.resume
        check_checkpoints(config, folder)
    else:
        config = Config.from_dict(given).resolve()
        folder = args.out or new_folder(f"{tasks.short(config.task)}-{config.folder_name}")
    if ours is not None:  # torchrun has a process count of its own
        config = dataclasses.replace(config, processes=ours.size).resolve()
    if args.max_restarts and (ours is not None or config.processes == 1):
        what = "torchrun has a --max-restarts of its own" if ours is not None else "with --processes 2 or more"
        raise ValueError(f"max_restarts starts processes again that prsgd train has started itself: {what}")
    check(config)
    warn_about([config])
    if args.resume is not None:
        finished_run(folder)
    if ours is not None:
        folder = join_torchrun(folder)
    first = job.is_first()
    if first:
        claim(folder, marker=files.CONFIG, resume=args.resume is not None, overwrite=args.overwrite)
        if args.resume is None:
            prepare(config, folder)
        elif read_config(folder) != config:
            raise ValueError(f"{folder} was begun with {read_config(folder).processes} processes")
    return config, folder, args.resume is not None


def _what(config: Config) -> str:
    from prsgd.cli.display import number_of

    length = number_of(config.steps, "step") if config.epochs is None else number_of(config.epochs, "epoch")
    return (
        f"{tasks.short(config.task)}, {config.model}: {config.label}, {config.workers} workers, "
        f"batch {config.batch_size} each, {length}"
    )


def _result(summary: Summary) -> str:
    from prsgd.cli.display import reached

    score = f", {reached(summary)}" if reached(summary) else ""
    return (
        f"training loss {summary.train_loss:.4f}{score},\n{summary.epochs:.4g} epochs, {summary.rounds:,} rounds, "
        f"{summary.bytes_sent / 1e6:,.2f} MB sent per worker"
    )
