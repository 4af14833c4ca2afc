"""``prsgd calibrate``: a real group of processes, measured, as a cluster file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prsgd import files
from prsgd.cli.parser import Parser, fail, path, refusing

if TYPE_CHECKING:
    from prsgd.cluster.model import Cluster

MOST_STEPS = 10**9


def add(parser: Parser) -> None:
    parser.add_argument("--processes", type=int, default=2, metavar="P", help="started here (2); or run under torchrun")
    parser.add_argument("--task", default="digits", help="whose steps are timed (digits)")
    parser.add_argument("--model", help="one of the task's models (its first)")
    parser.add_argument("--batch-size", type=int, metavar="B", help="of each worker")
    parser.add_argument("--steps", type=int, default=200, metavar="T", help="to take (200)")
    parser.add_argument(
        "--out", type=path, default=Path(files.CLUSTER), metavar="FILE", help=f"where it is written ({files.CLUSTER})"
    )


def run(args: argparse.Namespace) -> int:
    with refusing("calibrate"):
        from prsgd._check import whole_number
        from prsgd.cluster.model import write
        from prsgd.comm import job
        from prsgd.comm.launching import launch
        from prsgd.errors import LaunchError
        from prsgd.lab.checks import MOST_PROCESSES, check
        from prsgd.lab.config import Config
        from prsgd.lab.processes import last_line

        whole_number("steps", args.steps, at_least=24, at_most=MOST_STEPS)
        processes = whole_number("processes", args.processes, at_least=1, at_most=MOST_PROCESSES)
        given = {"task": args.task, "model": args.model, "batch_size": args.batch_size}
        config = Config(workers=1, period=1, **given).resolve()
        check(config)
        if args.out.is_dir() or not args.out.parent.is_dir():
            raise ValueError(f"out must be a file in a folder that is there, got {args.out}")
        ours = job.find()
    if ours is not None:
        found: Cluster = measure(config, args.steps)
        if not job.is_first():
            return 0
    else:
        try:
            found = launch(measure, processes=processes, args=(config, args.steps))[0]
        except LaunchError as error:
            fail("calibrate", last_line(error), code=1)
    with refusing("calibrate"):
        write(found, args.out)
    print(text(found))
    print(f"\n{args.out}: prsgd compare --cluster {args.out} --workers {len(found.speeds)} ...")
    return 0


def measure(config: Any, steps: int) -> Cluster:
    """In each process of the group."""
    import torch

    import prsgd
    from prsgd import tasks
    from prsgd.cluster.calibration import calibrate
    from prsgd.lab import feed
    from prsgd.lab.optimizer import optimizer_of

    torch.set_num_threads(1)
    task = tasks.find(config.task, config.task_sha256)
    comm = prsgd.init()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    model = task.models[config.model]().to(device)
    optimizer = optimizer_of(config, model.parameters(), config.lr)
    batches = feed.stream(config)

    def step() -> None:
        x, y = (part.to(device) for part in next(batches))
        optimizer.zero_grad()
        task.loss_fn(model(x), y).backward()
        optimizer.step()

    return calibrate(model, optimizer, step, comm, steps=steps, name=f"calibrated-{tasks.short(config.task)}")


def text(cluster: Cluster) -> str:
    lines = [
        f"{len(cluster.speeds)} processes, a step of the slowest takes {cluster.step_seconds * 1e3:.3g} ms",
        f"speeds      {', '.join(f'{speed:.3g}' for speed in cluster.speeds)}",
        f"jitter      {cluster.jitter:.2g}",
        f"latency     {cluster.latency_seconds * 1e3:.3g} ms a message",
        f"bandwidth   {cluster.bytes_per_second / 1e6:,.3g} MB/s",
        f"copying     {cluster.copy_seconds * 1e3:.3g} ms an average",
    ]
    if cluster.jitter > 0.3:
        lines.append("the steps' times vary much: is the machine busy with something else?")
    return "\n".join(lines)
