"""Where people already train: PyTorch Lightning, transformers' ``Trainer`` and accelerate.

Each file is for one library, imports it, and needs none of the others; nothing imports this folder.

    from prsgd.integrations.lightning import LocalSGDStrategy     Trainer(strategy=LocalSGDStrategy(schedule=...))
    from prsgd.integrations.transformers import local_sgd         local_sgd(trainer, schedule=...); trainer.train()
    from prsgd.integrations.accelerate import LocalSGD            with LocalSGD(accelerator, model, 8) as local_sgd:
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from prsgd.schedules.auto import auto
from prsgd.schedules.base import Schedule
from prsgd.schedules.changing import post_local, quadratic
from prsgd.schedules.fixed import every, once
from prsgd.schedules.growing import growing


def require(package: str, *, at_least: str, below: str) -> None:
    """Raise an ImportError, in one line, unless a version of ``package`` is installed that the glue was tried with.

    >>> require("torch", at_least="1.0", below="1.9")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ImportError: prsgd.integrations needs torch >= 1.0 and < 1.9, and torch ... is installed
    >>> require("no-such-package", at_least="1", below="2")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ImportError: prsgd.integrations needs no-such-package >= 1 and < 2, which is not installed: pip install ...
    """
    needed = f"prsgd.integrations needs {package} >= {at_least} and < {below}"
    try:
        found = version(package)
    except PackageNotFoundError:
        raise ImportError(f"{needed}, which is not installed: pip install 'prsgd[integrations]'") from None
    if not _numbers(at_least) <= _numbers(found) < _numbers(below):
        raise ImportError(f"{needed}, and {package} {found} is installed")


def keeps_step(schedule: Schedule) -> bool:
    """Has each round as many steps on all workers, so that workers at the same step are between the same averages?"""
    return isinstance(schedule, every | once | growing | post_local | quadratic | auto)


def require_schedule(schedule: object) -> None:
    """Raise a ValueError, before anything is set up, unless it is one."""
    if isinstance(schedule, type) or not isinstance(schedule, Schedule):
        raise ValueError(f"schedule must be a schedule such as every(8), got {schedule!r}")


def _numbers(text: str) -> tuple[int, ...]:
    """2.6.1 of 2.6.1.dev3+cpu."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()
