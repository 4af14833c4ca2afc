"""``prsgd probe``: the constants of a task, estimated along a short run of training."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import textwrap
from typing import TYPE_CHECKING

from prsgd.cli.parser import Parser, fail, refusing
from prsgd.tasks import MODULES

if TYPE_CHECKING:
    from torch import nn

    from prsgd.lab.config import Config
    from prsgd.tasks.base import Data, Task
    from prsgd.theory.probe import Probed

FEW_SAMPLES = 10_000
"""Up to so many, the noise is computed and not estimated."""
MOST_LOOKS = 1000


def add(parser: Parser) -> None:
    parser.add_argument("--task", default="digits", help=f"{', '.join(MODULES)} (digits), or a file of your own")
    parser.add_argument("--model", help="one of the task's models (its first)")
    parser.add_argument("--batch-size", type=int, metavar="B", help="of one worker")
    parser.add_argument("--steps", type=int, default=200, metavar="T", help="of one worker's training (200)")
    parser.add_argument("--looks", type=int, default=5, metavar="K", help="along the way, the start included (5)")
    parser.add_argument("--lr", type=float, help="of the run (0.1)")
    parser.add_argument("--momentum", type=float, metavar="M", help="of SGD (0.9)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of weights and data order (0)")
    parser.add_argument("--json", action="store_true", help="the largest values along the path, for programs")


def run(args: argparse.Namespace) -> int:
    with refusing("probe"):
        from prsgd._check import whole_number
        from prsgd.lab.checks import check
        from prsgd.lab.config import Config

        whole_number("looks", args.looks, at_least=2, at_most=MOST_LOOKS)
        config = Config(
            task=args.task, model=args.model, workers=1, period=1, steps=args.steps, batch_size=args.batch_size,
            lr=args.lr, momentum=args.momentum, seed=args.seed,
        ).resolve()  # fmt: skip
        check(config)
    try:
        found = _walk(config, args.looks)
    except ValueError as error:  # on the way
        fail("probe", str(error), code=1)
    if args.json:
        fields = dataclasses.asdict(found)
        for estimate in (value for value in fields.values() if isinstance(value, dict)):
            if estimate["high"] == float("inf"):
                estimate["high"] = None  # JSON knows no infinity
        print(json.dumps(fields, allow_nan=False))
        return 0
    print(_text(found))
    return 0


def _walk(config: Config, looks: int) -> Probed:
    """Train one worker, and look at the start, at the end and in between."""
    import torch

    from prsgd import tasks
    from prsgd.lab import feed
    from prsgd.lab.optimizer import optimizer_of
    from prsgd.theory.probe import merged, probe

    torch.set_num_threads(1)
    task = tasks.find(config.task, config.task_sha256)
    data = feed.load(config)
    torch.manual_seed(config.seed)
    model = task.models[config.model or ""]()
    optimizer = optimizer_of(config, model.parameters(), config.lr or 0.1)
    batches = feed.stream(config)
    last = config.steps or 0
    print(f"{'step':>6} {'loss':>9} {'L':>10} {'sigma^2':>10} {'G^2':>10}", file=sys.stderr)
    found: Probed | None = None
    at = {round(last * i / (looks - 1)) for i in range(looks)}
    for step in range(last + 1):
        if step in at:
            here = feed.stream(config, first_epoch=10**6)  # in an order of its own
            now = _with_exact_noise(probe(model, task.loss_fn, here), model, config, task, data)
            found = now if found is None else merged(found, now)
            values = (now.loss, now.smoothness.value, now.noise.value, now.grad_second_moment.value)
            print(f"{step:>6} " + " ".join(f"{v:>{w}.4g}" for v, w in zip(values, (9, 10, 10, 10))), file=sys.stderr)
        if step < last:
            x, y = next(batches)
            optimizer.zero_grad()
            task.loss_fn(model(x), y).backward()
            optimizer.step()
    assert found is not None
    return found


def _with_exact_noise(found: Probed, model: nn.Module, config: Config, task: Task, data: Data) -> Probed:
    """Where the data are few and samples do not know of each other, sigma^2 by one pass over all of them."""
    from torch import nn

    from prsgd.theory.probe import Estimate, exact_noise

    mixing = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    if len(data.train_x) > FEW_SAMPLES or any(isinstance(module, mixing) for module in model.modules()):
        return found
    x = task.prepare(data.train_x)
    value = exact_noise(model, task.loss_fn, x, data.train_y, batch_size=config.batch_size or 1)
    noise = Estimate(value, value, value, f"exact here, over all {len(x):,} samples; elsewhere it differs")
    return dataclasses.replace(found, noise=noise)


def _text(found: Probed) -> str:
    lines = ["", "the largest along the path:"]
    names = {"smoothness": "L", "noise": "sigma^2", "grad_second_moment": "G^2", "gap": "f(x0) - f*"}
    for field, name in names.items():
        estimate = getattr(found, field)
        lines.append(f"{name:>10}  {estimate.value:.4g}  in [{estimate.low:.4g}, {estimate.high:.4g}]")
        lines += [f"            {part}" for part in textwrap.wrap(estimate.says, 66)]
    what = f"the forward and backward pass of {found.batch_size} samples"
    lines.append(f"{'a step':>10}  {found.step_seconds:.3g} s for {what}")
    problem = found.problem
    lines += [
        "",
        "go on with this, or with --json here and --probe FILE there:",
        f"  prsgd plan --workers 8 --steps 100k --parameters {found.parameters} \\",
        f"    --step-time {found.step_seconds * 1e3:.3g}ms --smoothness {problem.smoothness:.4g} \\",
        f"    --noise {problem.noise:.4g} --second-moment {problem.grad_second_moment:.4g} --gap {problem.gap:.4g}",
    ]
    return "\n".join(lines)
