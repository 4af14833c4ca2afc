"""Several runs in one loop, such as a GAN's two networks with an optimizer each: they start and end together."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager

from prsgd.core.local_sgd import LocalSGD


def finish(*runs: LocalSGD) -> None:
    """End several runs at once: each answers the other workers' averages until all workers are done with all runs.

    One ``run.finish()`` after another would wait for ever if workers have different numbers of batches: a worker that
    ends the first run would not answer the second one's averages meanwhile.
    """
    if not runs or not all(isinstance(run, LocalSGD) for run in runs):
        raise ValueError(f"finish() takes runs of LocalSGD, got {runs!r}")
    remote = [run for run in runs if len(run.comm.workers) < run.comm.num_workers]
    if len({id(run.comm) for run in remote}) < len(remote):
        raise ValueError(
            "runs that end together need a communicator each, since their averages may come in another order in "
            "another process: give each its own comm, or none"
        )
    with ThreadPoolExecutor(len(runs)) as pool:
        futures = [pool.submit(run.finish) for run in runs]
        wait(futures, return_when=FIRST_EXCEPTION)
        failed = next((f for f in futures if f.done() and f.exception() is not None), None)
        if failed is not None:
            for run in runs:
                run.abandon()  # so that nobody waits for what cannot come
    if failed is not None:
        failed.result()


@contextmanager
def together(*runs: LocalSGD) -> Iterator[tuple[LocalSGD, ...]]:
    """Train several runs in one loop: all start, and all end at once, also if workers have unequal numbers of batches.

    >>> import torch, prsgd
    >>> nets = [torch.nn.Linear(2, 1), torch.nn.Linear(1, 2)]
    >>> optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    >>> runs = [prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(4)) for net, optimizer in zip(nets, optimizers)]
    >>> with prsgd.together(*runs) as (critic, generator):
    ...     for _ in range(6):
    ...         for optimizer in optimizers:
    ...             optimizer.zero_grad()
    ...         nets[0](nets[1](torch.ones(1, 1))).sum().backward()
    ...         for optimizer in optimizers:
    ...             optimizer.step()
    >>> critic.round, generator.round
    (2, 2)
    """
    try:
        for run in runs:
            run.start()
        yield runs
    except BaseException:
        for run in runs:
            run.abandon()
        raise
    finish(*runs)
