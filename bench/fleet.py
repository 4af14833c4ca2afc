"""What many workers in one process cost: a fleet against N plain modules with N optimizers, one thread.

    python bench/fleet.py            # about ten minutes, most of it ResNet-20s
    python bench/fleet.py --quick    # does it run?

Both variants take the same step (momentum 0.9, batch 32 a worker) in turns, in one process for each model and N; a
ratio is one of medians. Memory is what the process holds after those steps, beyond what it held before, in models.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from core import in_turns, resident_bytes
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import prsgd
from prsgd.data.shards import Shards
from prsgd.tasks.resnet import resnet

BATCH_SIZE = 32


def linear() -> nn.Module:
    return nn.Linear(784, 10)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 10),
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    pairs: dict[int, int]
    """Pairs of steps for each N."""
    target: float | None
    """Of the ratio at N = 64."""


CASES = (
    Case("linear 784-10", linear, (784,), {8: 200, 64: 60, 256: 20}, 3.0),
    Case("MLP 784-128-10", mlp, (784,), {8: 100, 64: 30, 256: 10, 1024: 3}, 1.8),
    Case("CNN, 5.3k", cnn, (1, 28, 28), {8: 30, 64: 8, 256: 3}, 1.0),
    Case("ResNet-20", resnet, (3, 32, 32), {8: 10, 64: 3, 256: 1}, 1.0),
)


@dataclass(frozen=True)
class Result:
    mode: str
    plain_seconds: float
    fleet_seconds: float
    compiled_seconds: float | None
    """With ``compile=True``, where the fleet runs by vmap."""
    models_held: float
    """Memory of the fleet and its optimizer, in models."""
    fetch_share: float
    """Gathering the batches, as a share of the fleet's step."""


def measure(make: Callable[[], nn.Module], shape: tuple[int, ...], num_workers: int, pairs: int) -> Result:
    torch.manual_seed(0)
    samples = max(20_000, 2 * BATCH_SIZE * num_workers)
    data = Shards(
        torch.randn(samples, *shape), torch.randint(10, (samples,)), num_workers=num_workers, batch_size=BATCH_SIZE
    )
    batches = fetching(data)
    one_step(make(), 2, torch.randn(2, 2, *shape), torch.zeros(2, 2, dtype=torch.long))  # loads the code it needs
    model = make()
    model_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    before = resident_bytes("VmRSS")
    fleet = prsgd.Fleet(model, num_workers)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.01, momentum=0.9, foreach=True)  # many small tensors
    x, y = batches()

    def stepping(fleet: prsgd.Fleet, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            fleet.backward(cross_entropy, x, y)
            optimizer.step()

        return step

    fleet_step = stepping(fleet, optimizer)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(10**9)):
        for _ in range(2 if pairs > 1 else 1):
            fleet_step()
        held = (resident_bytes("VmRSS") - before) / model_bytes
        modules = [make().to(memory_format=torch.channels_last) for _ in range(num_workers)]  # type: ignore[call-overload]  # missing in torch
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in modules]

        def plain_step() -> None:
            for own in optimizers:
                own.zero_grad()
            for module, x_i, y_i in zip(modules, x, y):
                if x_i.dim() == 4:  # as the fleet does, and within the step too
                    x_i = x_i.contiguous(memory_format=torch.channels_last)
                cross_entropy(module(x_i), y_i).backward()
            for own in optimizers:
                own.step()

        if pairs > 1:
            plain_step()
        variants = [plain_step, fleet_step]
        if fleet.mode == "vmap":
            compiled = prsgd.Fleet(model, num_workers, compile=True)
            own_optimizer = torch.optim.SGD(compiled.parameters(), lr=0.01, momentum=0.9, foreach=True)
            variants.append(stepping(compiled, own_optimizer))
            variants[-1]()
            variants[-1]()
        plain, ours, *others = in_turns(variants, pairs, lambda: None)
        [fetched] = in_turns((batches,), max(3, pairs), lambda: None)
    compiled_seconds = median(others[0]) if others else None
    return Result(fleet.mode, median(plain), median(ours), compiled_seconds, held, median(fetched) / median(ours))


def one_step(model: nn.Module, num_workers: int, x: Tensor, y: Tensor) -> None:
    fleet = prsgd.Fleet(model, num_workers)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.01, momentum=0.9, foreach=True)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2)):
        fleet.backward(cross_entropy, x, y)
        optimizer.step()


def fetching(data: Shards) -> Callable[[], tuple[Tensor, Tensor]]:
    """The next batches, epoch after epoch."""
    epochs = (batch for number in range(10**6) for batch in data.epoch(number))
    return lambda: next(epochs)


def rows(quick: bool) -> list[str]:
    lines = []
    for case in CASES:
        cost: dict[int, float] = {}
        for num_workers, pairs in case.pairs.items():
            if quick and num_workers > 8:
                continue
            args = (case.make, case.shape, num_workers, 2 if quick else pairs)
            [result] = prsgd.launch(measure, processes=1, args=args)
            ratio = result.plain_seconds / result.fleet_seconds
            cost[num_workers] = result.fleet_seconds / num_workers
            target = f"{case.target:g}x" if case.target is not None and num_workers == 64 else ""
            compiled = f"{result.fleet_seconds / result.compiled_seconds:.2f}x" if result.compiled_seconds else ""
            lines.append(
                f"| {case.name} | {num_workers} | {result.mode} | {1e3 * result.plain_seconds:.1f} | "
                f"{1e3 * result.fleet_seconds:.1f} | {ratio:.2f}x | {target} | "
                f"{compiled} | {1e6 * cost[num_workers]:.0f} | {result.models_held / num_workers:.2f} | "
                f"{result.fetch_share:.1%} |"
            )
            print(lines[-1], flush=True)
        if len(cost) > 1:
            print(f"  cost per worker, N = 256 against N = 8: {cost[256] / cost[8]:.2f}x (at most 1.5x)", flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="A fleet against plain modules with an optimizer each.")
    parser.add_argument("--quick", action="store_true", help="a smoke run: N = 8, no meaningful numbers")
    args = parser.parse_args()
    print(
        "| model | N | mode | plain, ms | fleet, ms | ratio | target | compiled | us a worker | models held a worker | "
        "fetching |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    rows(args.quick)


if __name__ == "__main__":
    main()
