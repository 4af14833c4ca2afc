"""``prsgd.task``: a task of the user's own, of a model, data and a loss; and what is tried before it is run."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset, IterableDataset

from prsgd._check import one_of, positive, whole_number
from prsgd.metrics import ACCURACY, ERROR, SCORE, Metric
from prsgd.tasks.base import Augment, Data, Task, right_answers

MOST_CLASSES = 1000
"""Among labels: whole numbers of which there are more are no classes to deal samples out by."""

Function = Callable[[Any, Any], Any]
"""Of a batch's output and its y."""


def task(
    *,
    model: Callable[[], nn.Module] | Mapping[str, Callable[[], nn.Module]],
    train: Any,
    test: Any,
    loss: Function,
    metric: Function | Literal["auto", "accuracy"] | None = "auto",
    higher_is_better: bool = True,
    augment: Augment | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    optimizer: str | None = None,
) -> Task:
    """A task of your own for the command line: ``prsgd compare --task mytask.py``, where the file has a line like
    ``task = prsgd.task(model=..., train=..., test=..., loss=...)``.

    - ``model``: what makes it, a class or a function without arguments; or several by name, for ``--model``.
    - ``train``, ``test``: pairs (x, y) of tensors or arrays with the samples in front, or a Dataset of such pairs.
    - ``loss``: of the model's output for a batch and that batch's y, the mean over the samples, as one number.
    - ``metric``: what models are judged by on the test set beside their loss: "accuracy", a function like the loss, or
      None. Unless given it is the accuracy if y are class labels, and nothing else if not.
      ``higher_is_better`` is about a function.
    - ``augment``: a random change of a training batch, from x and a ``torch.Generator``.
    - ``epochs``, ``batch_size``, ``lr`` and ``optimizer`` ("sgd" or "adamw") are what is used unless the command says
      otherwise; an lr goes with that optimizer.

    >>> import torch, prsgd
    >>> x = torch.linspace(-1, 1, 64).unsqueeze(1)
    >>> line = prsgd.task(
    ...     model=lambda: torch.nn.Linear(1, 1), train=(x, 2 * x), test=(x, 2 * x), loss=torch.nn.functional.mse_loss
    ... )
    >>> line.summary, line.metric
    ('your own: 64 train, 64 test', None)
    """
    train_x, train_y = _samples("train", train)
    test_x, test_y = _samples("test", test)
    if not callable(loss):
        raise ValueError(f"loss must be a function of the model's output and y, got {_kind(loss)}")
    if augment is not None and not callable(augment):
        raise ValueError(f"augment must be a function of x and a torch.Generator, got {_kind(augment)}")
    groups, names = _groups(train_y)
    judged, score = _judged_by(metric, higher_is_better, has_classes=bool(names))
    data = Data(
        train_x, train_y, test_x, test_y,
        groups=groups, group_names=names or ("all",), group_word="class" if names else "sample",
    )  # fmt: skip
    return Task(
        name="own",
        summary=f"your own: {len(train_x):,} train, {len(test_x):,} test",
        models=_models(model),
        load=lambda: data,
        loss_fn=loss,
        metric=judged,
        score_fn=score,
        augment=augment,
        defaults=_defaults(epochs, batch_size, lr, optimizer),
    )


def _models(model: Any) -> dict[str, Callable[[], nn.Module]]:
    found = dict(model) if isinstance(model, Mapping) else {_name(model): model}
    for name, make in found.items():
        if isinstance(make, nn.Module) or not callable(make) or not isinstance(name, str):
            raise ValueError(
                f"model must be a class or a function without arguments that makes one, got {_kind(make)}: each run "
                "begins with weights of its own"
            )
    if not found:
        raise ValueError("model must be at least one, got none")
    return found


def _name(make: Any) -> str:
    named = isinstance(make, type | FunctionType) and make.__name__.isidentifier()
    return str(make.__name__) if named else "model"


def _samples(name: str, value: Any) -> tuple[Tensor, Tensor]:
    """x and y, as tensors of one length."""
    if isinstance(value, Dataset):
        value = _collected(name, value)
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"{name} must be a pair (x, y), or a Dataset of such pairs, got {_kind(value)}")
    x, y = (_tensor(f"{name}'s {which}", part) for which, part in zip("xy", value))
    if len(x) != len(y):
        raise ValueError(f"{name} must have as many x as y, got {len(x):,} and {len(y):,}")
    if not len(x):
        raise ValueError(f"{name} must have at least one sample, got none")
    return x, y


def _collected(name: str, samples: Dataset[Any]) -> Any:
    """Of a Dataset: its xs and its ys."""
    if isinstance(samples, IterableDataset):
        raise ValueError(f"{name} must have a length, got an IterableDataset: collect its samples as tensors (x, y)")
    each = [samples[i] for i in range(len(samples))]  # type: ignore[arg-type]  # a Dataset with an index has a length
    if not each:
        raise ValueError(f"{name} must have at least one sample, got none")
    for sample in each:
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise ValueError(f"{name} must be a Dataset of pairs (x, y), got one of {_kind(sample)}")
    try:
        return tuple(torch.stack([torch.as_tensor(part) for part in parts]) for parts in zip(*each))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be a Dataset of tensors or numbers of one shape: {error}") from None


def _tensor(name: str, value: Any) -> Tensor:
    try:
        found = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be numbers, as a tensor or an array, got {_kind(value)}: {error}") from None
    if not found.dim():
        raise ValueError(f"{name} must have the samples in front, got one number")
    return found


def _groups(y: Tensor) -> tuple[Tensor, tuple[str, ...]]:
    """Which class each sample is of, and what the classes are called; without classes all are of one, with no name."""
    if y.dim() == 1 and not y.is_floating_point() and not y.is_complex():
        classes, found = y.unique(return_inverse=True)
        if len(classes) <= MOST_CLASSES:
            return found, tuple(map(str, classes.tolist()))
    return torch.zeros(len(y), dtype=torch.int64), ()


def _judged_by(metric: Any, higher_is_better: bool, *, has_classes: bool) -> tuple[Metric | None, Function]:
    """The metric, and its sum over the samples of a batch."""
    if metric is None or (metric == "auto" and not has_classes):
        return None, right_answers
    if isinstance(metric, str):
        one_of("metric", metric, ("auto", "accuracy"))
        return ACCURACY, right_answers
    if not callable(metric):
        raise ValueError(f'metric must be "accuracy", a function of the model\'s output and y, or None, got {metric!r}')
    return SCORE if higher_is_better else ERROR, lambda out, y: _one_number(metric(out, y)) * len(y)


def _one_number(value: Any) -> Any:
    """As it is, or a ValueError."""
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"it must give one number, got {_kind(value)}") from None
    return value


def _defaults(epochs: Any, batch_size: Any, lr: Any, optimizer: Any) -> dict[str, Any]:
    given = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "optimizer": optimizer}
    for name in ("epochs", "batch_size"):
        if given[name] is not None:
            whole_number(name, given[name], at_least=1)
    if lr is not None:
        positive("lr", lr)
    if optimizer is not None:
        one_of("optimizer", optimizer, ("sgd", "adamw"))
    return {name: value for name, value in given.items() if value is not None}


def try_out(task: Task, *, model: str, batch_size: int) -> None:
    """Raise a ValueError that names the part unless a first batch goes all the way through it."""
    data = task.load()
    x, y = data.train_x[:batch_size], data.train_y[:batch_size]
    with torch.random.fork_rng(devices=[]):
        if task.augment is not None:
            with _named("augment", x):
                changed = task.augment(x, torch.Generator().manual_seed(0))
                if not isinstance(changed, Tensor) or len(changed) != len(x):
                    raise ValueError(f"it must give {len(x)} samples for {len(x)}, got {_kind(changed)}")
                x = changed
        with _named("prepare", x):
            x = task.prepare(x)
        with _named(f"model {model}"):
            net = task.models[model]()
            if not isinstance(net, nn.Module) or not any(p.requires_grad for p in net.parameters()):
                raise ValueError(f"it must make a torch.nn.Module with parameters that train, got {_kind(net)}")
            lazy = next((name for name, p in net.named_parameters() if is_lazy(p)), None)
            if lazy is not None:
                raise ValueError(f"its parameter {lazy!r} has no shape yet: give the layer its number of inputs")
        with _named(f"model {model}", x):
            out = net(x)
        _try_loss(task, out, y)
        net.eval()
        with torch.no_grad():
            for part, all_x, all_y in (("train", data.train_x, data.train_y), ("test", data.test_x, data.test_y)):
                x, y = _telling(all_x, all_y, batch_size)
                x = task.prepare(x)
                with _named(f"model {model} on {part}", x):
                    out = net(x)
                with _named(f"loss on {part}", y):
                    _one_number(task.loss_fn(out, y))
            if task.metric is not None:
                with _named("metric", y):
                    _try_metric(task, out, y)


def _telling(x: Tensor, y: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The first samples, and of those with whole numbers as labels the smallest and the largest, which a model may not
    have."""
    chosen = list(range(min(number, len(x))))
    if y.dim() == 1 and not y.is_floating_point() and not y.is_complex():
        labels = y.long()  # of booleans nothing is the smallest
        chosen += [int(labels.argmin()), int(labels.argmax())]
    return x[chosen], y[chosen]


def _try_loss(task: Task, out: Any, y: Tensor) -> None:
    with _named("loss", y):
        loss = task.loss_fn(out, y)
        if not isinstance(loss, Tensor) or loss.dim():
            hint = "" if not isinstance(loss, Tensor) else ": take its mean()"
            raise ValueError(f"it must give one number as a tensor, got {_kind(loss)}{hint}")
        if not loss.requires_grad:
            raise ValueError("it must depend on the model's parameters, got a number that does not")
        if not math.isfinite(float(loss.detach())):
            raise ValueError(f"it must be finite for a model that is not trained yet, got {float(loss.detach())}")
        loss.backward()


def _try_metric(task: Task, out: Any, y: Tensor) -> None:
    if task.metric is ACCURACY and (not isinstance(out, Tensor) or out.dim() != 2 or out.shape[1] < 2 or y.dim() != 1):
        raise ValueError(
            f"accuracy needs a number for each class (n, classes) from the model, got {_kind(out)}: give metric=None, "
            "or a function of your own"
        )
    float(task.score_fn(out, y))


@contextmanager
def _named(part: str, given: Tensor | None = None) -> Iterator[None]:
    """Whatever is raised inside is this part's fault.

    Where an output (n, 1) meets a y (n,), torch's losses pair each output with every y, from which nothing is learned,
    and only warn.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Using a target size", UserWarning)
            yield
    except Exception as error:
        of = "" if given is None else f" of {_kind(given)}"
        kind = "" if type(error) in (ValueError, UserWarning) else f"{type(error).__name__}: "
        raise ValueError(f"{part}{of}: {kind}{error}") from error


def _kind(value: Any) -> str:
    """What a value is, in a few words.

    >>> _kind(torch.zeros(2, 3)), _kind([1])
    ('float32 (2, 3)', 'list')
    """
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return type(value).__name__


def digest(data: Data) -> str:
    """SHA-256 of what is trained on and tested with, to know again."""
    found = hashlib.sha256()
    for part in (data.train_x, data.train_y, data.test_x, data.test_y):
        found.update(_kind(part).encode())
        found.update(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
