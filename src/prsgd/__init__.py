"""Parallel Restarted SGD: train one PyTorch model on many workers that average their models now and then."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prsgd.averaging.base import Averaging, Header, Landing
    from prsgd.averaging.easgd import easgd
    from prsgd.averaging.gossip import gossip
    from prsgd.averaging.mean import mean
    from prsgd.averaging.outer import outer
    from prsgd.averaging.steady import steady
    from prsgd.averaging.weights import Brought, Weights
    from prsgd.averaging.wires.base import Wire
    from prsgd.averaging.wires.half import half
    from prsgd.averaging.wires.quantized import quantized
    from prsgd.averaging.wires.sparse import sparse
    from prsgd.comm.base import Communicator, Done, Then, Work
    from prsgd.comm.in_process import InProcess
    from prsgd.comm.joining import init
    from prsgd.comm.launching import launch
    from prsgd.comm.torch_distributed import TorchDistributed
    from prsgd.comm.torch_ft import TorchFT
    from prsgd.core.local_sgd import LocalSGD
    from prsgd.core.several import epoch, finish, together
    from prsgd.core.watching import watch
    from prsgd.errors import (
        AverageTimeout,
        CheckpointError,
        DivergedError,
        LaunchError,
        MismatchError,
        PeerError,
        PrsgdError,
        UsageError,
    )
    from prsgd.preflight.training import doctor
    from prsgd.records import Record
    from prsgd.replicas.fleet import Fleet
    from prsgd.saving.checkpoints import load, save
    from prsgd.saving.resumable import resumable
    from prsgd.schedules.auto import auto
    from prsgd.schedules.base import Now, Round, Schedule
    from prsgd.schedules.changing import post_local, quadratic
    from prsgd.schedules.fixed import every, once, per_worker
    from prsgd.schedules.growing import growing
    from prsgd.schedules.speed import measured, timed
    from prsgd.tasks.own import task
    from prsgd.theory.probe import probe

__version__ = "0.1.0"

# Loaded when first used (PEP 562): torch takes seconds to import, and `prsgd --help` does not need it.
_HOME = {
    "AverageTimeout": "errors",
    "Averaging": "averaging.base",
    "Brought": "averaging.weights",
    "CheckpointError": "errors",
    "Communicator": "comm.base",
    "DivergedError": "errors",
    "Done": "comm.base",
    "Fleet": "replicas.fleet",
    "Header": "averaging.base",
    "InProcess": "comm.in_process",
    "Landing": "averaging.base",
    "LaunchError": "errors",
    "LocalSGD": "core.local_sgd",
    "MismatchError": "errors",
    "Now": "schedules.base",
    "PeerError": "errors",
    "PrsgdError": "errors",
    "Record": "records",
    "Round": "schedules.base",
    "Schedule": "schedules.base",
    "Then": "comm.base",
    "TorchDistributed": "comm.torch_distributed",
    "TorchFT": "comm.torch_ft",
    "UsageError": "errors",
    "Weights": "averaging.weights",
    "Wire": "averaging.wires.base",
    "Work": "comm.base",
    "auto": "schedules.auto",
    "doctor": "preflight.training",
    "easgd": "averaging.easgd",
    "epoch": "core.several",
    "every": "schedules.fixed",
    "finish": "core.several",
    "gossip": "averaging.gossip",
    "growing": "schedules.growing",
    "half": "averaging.wires.half",
    "init": "comm.joining",
    "launch": "comm.launching",
    "load": "saving.checkpoints",
    "mean": "averaging.mean",
    "measured": "schedules.speed",
    "once": "schedules.fixed",
    "outer": "averaging.outer",
    "per_worker": "schedules.fixed",
    "post_local": "schedules.changing",
    "probe": "theory.probe",
    "quadratic": "schedules.changing",
    "quantized": "averaging.wires.quantized",
    "resumable": "saving.resumable",
    "save": "saving.checkpoints",
    "sparse": "averaging.wires.sparse",
    "steady": "averaging.steady",
    "task": "tasks.own",
    "timed": "schedules.speed",
    "together": "core.several",
    "watch": "core.watching",
}

__all__ = [
    "AverageTimeout",
    "Averaging",
    "Brought",
    "CheckpointError",
    "Communicator",
    "DivergedError",
    "Done",
    "Fleet",
    "Header",
    "InProcess",
    "Landing",
    "LaunchError",
    "LocalSGD",
    "MismatchError",
    "Now",
    "PeerError",
    "PrsgdError",
    "Record",
    "Round",
    "Schedule",
    "Then",
    "TorchDistributed",
    "TorchFT",
    "UsageError",
    "Weights",
    "Wire",
    "Work",
    "auto",
    "doctor",
    "easgd",
    "epoch",
    "every",
    "finish",
    "gossip",
    "growing",
    "half",
    "init",
    "launch",
    "load",
    "mean",
    "measured",
    "once",
    "outer",
    "per_worker",
    "post_local",
    "probe",
    "quadratic",
    "quantized",
    "resumable",
    "save",
    "sparse",
    "steady",
    "task",
    "timed",
    "together",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'prsgd' has no attribute {name!r}")
    value = getattr(import_module(f"prsgd.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
