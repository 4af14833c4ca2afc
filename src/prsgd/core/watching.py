"""``watch``: the numbers of a run to TensorBoard, Weights & Biases, MLflow or a log, average by average."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from prsgd._check import function_of, takes
from prsgd._warn import warn
from prsgd.core.local_sgd import LocalSGD, require_run
from prsgd.core.overview import percent
from prsgd.records import Record

Function = Callable[[dict[str, float], int], Any]
"""Of values by name, and the step."""


@runtime_checkable
class ScalarWriter(Protocol):
    """TensorBoard's SummaryWriter, and what looks like it."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> Any: ...


def watch(
    local: LocalSGD, to: ScalarWriter | Function | None = None, *, lines: Callable[[str], Any] | None = None
) -> None:
    """Tell of every average of ``local`` as it becomes complete, which is one average later, or at the end.

    ``to`` is a ``SummaryWriter`` of TensorBoard, or a function of values by name and the step, which are Weights &
    Biases' ``run.log`` and ``mlflow.log_metrics`` as they are. ``lines`` gets a line of text instead: ``print``,
    ``logging.info``. Of several processes only that of the first worker tells, so all may call it alike; for every
    process's own numbers there is ``local.add_listener``. A run does not end because ``to`` fails: it is told no more,
    with a warning.

    >>> import torch, prsgd
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> seen = {}
    >>> with prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(8)) as local:
    ...     prsgd.watch(local, lambda values, step: seen.update({step: values}))
    ...     for _ in range(20):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(2, 4)).square().mean().backward()
    ...         optimizer.step()
    >>> {step: values["prsgd/period"] for step, values in seen.items()}
    {8: 8, 16: 8, 20: 4}
    """
    require_run(local)
    if isinstance(to, type):
        raise ValueError(f"to must be a writer or a function, got the class {to.__name__}: make one, {to.__name__}()")
    if to is None and lines is None:
        raise ValueError("watch must be given where to tell: a writer or a function as to, or lines=print")
    if to is not None and not isinstance(to, ScalarWriter) and not callable(to):
        raise ValueError(
            f"to must be a SummaryWriter, or a function of values by name and the step, got {type(to).__name__}"
        )
    if to is not None and not isinstance(to, ScalarWriter) and not takes(to, {}, 0):
        raise ValueError("to must take two arguments, the values by name and the step, as in lambda values, step: ...")
    if lines is not None:
        function_of("lines", lines, "a text")
    if to is not None:
        local.add_listener(_Listener(local, _numbers_to(local, to)))
    if lines is not None:
        local.add_listener(_Listener(local, lambda record: lines(line(local, record))))


class _Listener:
    """Tells, in the process of the first worker that takes part, for as long as that works."""

    def __init__(self, local: LocalSGD, tell: Callable[[Record], Any]) -> None:
        self._local, self._tell, self._failed = local, tell, False

    def __call__(self, record: Record) -> None:
        first = min(record.members or (0,))
        if self._failed or self._local.comm.workers.start != first or self._local.host.team.place:
            return
        try:
            self._tell(record)
        except Exception as error:
            self._failed = True
            why = " ".join(f"{type(error).__name__}: {error}".split())
            warn(f"watch() ends with round {record.round}: {why}", RuntimeWarning)


def _numbers_to(local: LocalSGD, to: ScalarWriter | Function) -> Callable[[Record], Any]:
    if not isinstance(to, ScalarWriter):
        return lambda record: to(told(local, record), record.step)

    def write(record: Record) -> None:
        for name, value in told(local, record).items():
            to.add_scalar(name, value, record.step)

    return write


def told(local: LocalSGD, record: Record) -> dict[str, float]:
    """What logs show of a run when ``record`` has become complete; what nobody knows is left out."""
    fragment = "" if record.fragment is None else f"/fragment-{record.fragment}"
    found: dict[str, float | None] = {
        "prsgd/rounds": local.totals.rounds,
        "prsgd/bytes_sent": local.totals.bytes_sent,
        "prsgd/wait_seconds": local.totals.wait_seconds,
        "prsgd/period": record.period,
        "prsgd/overlap": record.overlap,
        "prsgd/lr": record.lr,
        "prsgd/loss": record.loss,
        f"prsgd/drift{fragment}": record.drift,
    }
    return {name: value for name, value in found.items() if value is not None}


def line(local: LocalSGD, record: Record) -> str:
    """The same for people, in one line."""
    drift = "" if record.fragment is None else f" of fragment {record.fragment}"
    parts = [
        *([] if record.loss is None else [f"loss {record.loss:.4g}"]),
        *([] if record.drift is None else [f"drift{drift} {record.drift:.3g}"]),
        f"period {record.period}",
        *([f"overlap {record.overlap}"] if record.overlap else []),
        f"{local.totals.bytes_sent / 1e6:,.3g} MB sent",
        f"waiting {percent(local.summary().waiting)}",
    ]
    return f"round {record.round}, step {record.step}: {', '.join(parts)}"
