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
    """The root of everything this library raises on its own account, bad arguments excepted."""


class UsageError(PrsgdError, RuntimeError):
    """A call at the wrong moment."""


class MismatchError(PrsgdError, ValueError):
    """The workers do not fit together: their parameters differ, or they entered different collectives."""


class DivergedError(PrsgdError, ArithmeticError):
    """Every worker's model is NaN or infinite, so there is nothing to restart from."""


class DataError(PrsgdError, ValueError):
    """A data set is missing, damaged or not what it should be."""


class CheckpointError(PrsgdError, ValueError):
    """A checkpoint is damaged, of a newer format, or of another run."""


class LaunchError(PrsgdError, RuntimeError):
    """A process that ``launch`` started raised, exited or was killed; the message has its traceback."""


class PeerError(PrsgdError, RuntimeError):
    """Another process failed or left while this one needed it."""


class AverageTimeout(PeerError, TimeoutError):  # noqa: N818 - Timeout says it
    """Another process did not come to an average within the time limit."""
