"""What can go wrong, as one tree.

    PrsgdError
    ├── UsageError       (RuntimeError)     called at the wrong moment: before start, after finish, ...
    ├── MismatchError    (ValueError)       the workers' models or calls do not fit together
    ├── DivergedError    (ArithmeticError)  no worker has a finite model left
    ├── DataError        (ValueError)       a data set is missing, damaged or not what it should be
    ├── CheckpointError  (ValueError)       a checkpoint is damaged or of another run
    ├── LaunchError      (RuntimeError)     a process that launch() started failed
    └── PeerError        (RuntimeError)     another process failed or left
        └── AverageTimeout (TimeoutError)   another process did not come to the average in time

A bad argument is a plain ``ValueError`` that names the argument, the value and what is allowed.
"""

from __future__ import annotations


class PrsgdError(Exception):
    """The root of everything this library raises on its own account, bad arguments excepted.

    >>> try:
    ...     raise PeerError("worker 1 is gone")
    ... except PrsgdError as error:  # or any of the errors below
    ...     print(error)
    worker 1 is gone
    """


class UsageError(PrsgdError, RuntimeError):
    """A call at the wrong moment.

    >>> import torch, prsgd
    >>> model = torch.nn.Linear(1, 1)
    >>> local = prsgd.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule=prsgd.every(4))
    >>> local.finish()
    Traceback (most recent call last):
    prsgd.errors.UsageError: finish() needs start() first
    """


class MismatchError(PrsgdError, ValueError):
    """The workers do not fit together: their parameters differ, or they entered different collectives.

    All workers get it, so all can end in the same way.

    >>> def train():
    ...     raise MismatchError("worker 1 calls consensus() where worker 0 averages")
    >>> try:
    ...     train()
    ... except MismatchError as error:
    ...     print(error)
    worker 1 calls consensus() where worker 0 averages
    """


class DivergedError(PrsgdError, ArithmeticError):
    """Every worker's model is NaN or infinite, so there is nothing to restart from.

    >>> import torch, prsgd
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
    >>> with prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(4)):
    ...     for _ in range(4):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(1, 1)).square().sum().backward()
    ...         optimizer.step()
    Traceback (most recent call last):
    prsgd.errors.DivergedError: round 1: no worker has a finite model left to restart from (1 are not finite); lower \
the lr, or clip gradients
    """


class DataError(PrsgdError, ValueError):
    """A data set is missing, damaged or not what it should be."""


class CheckpointError(PrsgdError, ValueError):
    """A checkpoint is damaged, of a newer format, or of another run.

    >>> import torch, prsgd
    >>> def run(overlap):
    ...     model = torch.nn.Linear(1, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     return prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(4), overlap=overlap)
    >>> with run(overlap=0) as local:
    ...     state = local.state_dict()
    >>> run(overlap=1).load_state_dict(state)
    Traceback (most recent call last):
    prsgd.errors.CheckpointError: the state is of a run with overlap 0, this one has 1
    """


class LaunchError(PrsgdError, RuntimeError):
    """A process that ``launch`` started raised, exited or was killed; the message has its traceback.

    >>> def launched():
    ...     raise LaunchError("process 1 was killed by signal 9")
    >>> try:
    ...     launched()
    ... except LaunchError as error:
    ...     print(error)
    process 1 was killed by signal 9
    """


class PeerError(PrsgdError, RuntimeError):
    """Another process failed or left while this one needed it: save what you have, and end.

    >>> def train():
    ...     raise PeerError("round 12: worker 0 finds that another process has failed or left")
    >>> try:
    ...     train()
    ... except PeerError as error:
    ...     print(f"stopped in {error}")
    stopped in round 12: worker 0 finds that another process has failed or left
    """


class AverageTimeout(PeerError, TimeoutError):  # noqa: N818 - Timeout says it
    """Another process did not come to an average within the time limit, ``LocalSGD(timeout_seconds=...)``.

    >>> issubclass(AverageTimeout, PeerError), issubclass(AverageTimeout, TimeoutError)
    (True, True)
    """
