"""Several runs in one loop, such as a GAN's two networks with an optimizer each: they start and end together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial

from prsgd.core.local_sgd import LocalSGD


def finish(*runs: LocalSGD) -> None:
    """End several runs at once: each answers the other workers' averages until all workers are done with all runs.

    One ``run.finish()`` after another would wait for ever if workers have different numbers of batches: a worker that
    ends the first run would not answer the second one's averages meanwhile.

    >>> import torch, prsgd
    >>> nets = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    >>> runs = [
    ...     prsgd.LocalSGD(net, torch.optim.SGD(net.parameters(), lr=0.1), schedule=prsgd.every(4)) for net in nets
    ... ]
    >>> starting = [run.start() for run in runs]
    >>> finish(*runs)
    """
    _at_once("finish", runs, [run.finish for run in _checked("finish", runs)])


@contextmanager
def epoch(*runs: LocalSGD) -> Iterator[None]:
    """``with run.epoch():`` of several runs at once, for loops in which each worker's epoch may have another length.

    One ``run.epoch()`` inside another would wait for ever, as one ``finish()`` after another would.

    >>> import torch, prsgd
    >>> nets = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    >>> optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    >>> runs = [prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(4)) for net, optimizer in zip(nets, optimizers)]
    >>> with prsgd.together(*runs):
    ...     for _ in range(2):
    ...         with epoch(*runs):
    ...             for _ in range(6):  # as many as this worker has
    ...                 nets[0](nets[1](torch.ones(1, 1))).sum().backward()
    ...                 for optimizer in optimizers:
    ...                     optimizer.step()
    >>> [[record.step for record in run.records] for run in runs]
    [[4, 6, 10, 12], [4, 6, 10, 12]]
    """
    ends = [run.epoch() for run in _checked("epoch", runs)]
    for end in ends:
        end.__enter__()
    yield
    _at_once("epoch", runs, [partial(end.__exit__, None, None, None) for end in ends])


def _checked(call: str, runs: Sequence[LocalSGD]) -> Sequence[LocalSGD]:
    if not runs or not all(isinstance(run, LocalSGD) for run in runs):
        given = ", ".join(type(run).__name__ for run in runs) or "none"
        raise ValueError(f"{call}() takes runs of LocalSGD, got {given}")
    if len(set(map(id, runs))) < len(runs):
        raise ValueError(f"{call}() takes each run once, got one of them twice")
    remote = [run for run in runs if len(run.comm.workers) < run.comm.num_workers]
    if len({id(run.comm) for run in remote}) < len(remote):
        raise ValueError(
            "runs that end together need a communicator each, since their averages may come in another order in "
            "another process: give each its own comm, or none"
        )
    return runs


def _at_once(call: str, runs: Sequence[LocalSGD], ends: Sequence[Callable[[], object]]) -> None:
    """Call all of them, each in a thread of its own; if one fails, or somebody interrupts, all runs are abandoned."""
    with ThreadPoolExecutor(len(runs), thread_name_prefix=f"prsgd-{call}") as pool:
        try:  # from here on: an interrupt while the threads start would leave them waiting, and the pool for them
            futures = [pool.submit(end) for end in ends]
            wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future.done():
                    future.result()
        except BaseException:
            for run in runs:
                run.abandon()  # so that nobody waits for what cannot come
            raise


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
    _checked("together", runs)
    try:
        for run in runs:
            run.start()
        yield runs
    except BaseException:
        for run in runs:
            run.abandon()
        raise
    finish(*runs)
