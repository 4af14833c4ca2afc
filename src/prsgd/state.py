"""The travelling state of the hosted workers: parameters as flat rows, and what is averaged beside them.

A user's own model stays where it is: its tensors are copied into a row and back. A fleet's parameters already are
views of its rows. Either way only parameters that train travel.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import Parameter, is_lazy
from torch.optim import Optimizer

CHUNK = 1 << 18
"""Numbers handled at a time: 1 MB of float32 stays in a core's cache between the passes over it."""


def trainable(model: nn.Module) -> dict[str, Parameter]:
    """The parameters that travel, or a ValueError that names the first that cannot."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise ValueError(f"model must have a parameter with requires_grad, {type(model).__name__} has none")
    for name, p in found.items():
        if is_lazy(p):
            raise ValueError(f"parameter {name!r} has no shape yet: run the model once before averaging it")
        if p.layout != torch.strided or p.is_complex():
            kind = "complex" if p.is_complex() else "sparse"
            raise ValueError(f"parameters must be dense and real, {name!r} is {kind} ({p.dtype}, {p.layout})")
    return found


def sum_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype to sum in: the widest of the tensors', and at least float32."""
    return reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)


class Rows:
    """The hosted workers' parameters as rows of P numbers, read and written a cache-sized group of tensors at a time."""

    def __init__(self, workers: Sequence[Mapping[str, Parameter]], matrix: Tensor | None) -> None:
        self.workers = [dict(w) for w in workers]
        self.matrix = matrix  # a fleet's rows; None: a user's own model, its tensors left where they are
        first = list(self.workers[0].values())
        self.width = sum(p.numel() for p in first)
        self.dtype, self.device = sum_dtype(first), first[0].device
        self._meta = [(p.shape, p.dtype, p.device) for p in first]
        if matrix is None:
            self._pointers = [p.data_ptr() for p in first]
            self._groups = [_groups(first)]
        else:
            self._groups = [_groups([row]) for row in matrix]

    def refresh(self) -> None:
        """Follow a user's model whose tensors were replaced (``p.data = ...``) by others of the same kind."""
        if self.matrix is not None:
            return
        named = self.workers[0]
        if [p.data_ptr() for p in named.values()] == self._pointers:
            return
        for (name, p), meta in zip(named.items(), self._meta):
            if (p.shape, p.dtype, p.device) != meta:
                was, now = (f"{list(s)} {d} on {v}" for s, d, v in (meta, (p.shape, p.dtype, p.device)))
                raise ValueError(f"parameter {name!r} was {was} when training started and is {now}")
        self._pointers = [p.data_ptr() for p in named.values()]
        self._groups = [_groups(list(named.values()))]

    def pack(self, i: int, out: Tensor) -> None:
        """out <- x_i"""
        for pieces, sizes, start, stop in self._groups[i]:
            torch._foreach_copy_(_views(out[start:stop], pieces, sizes), pieces)

    def add(self, i: int, delta: Tensor) -> None:
        """x_i <- x_i + delta"""
        for pieces, sizes, start, stop in self._groups[i]:
            torch._foreach_add_(pieces, _views(delta[start:stop], pieces, sizes))

    def replace(self, i: int, row: Tensor) -> float:
        """x_i <- row; returns how far it moved, squared."""
        squares = []
        for pieces, sizes, start, stop in self._groups[i]:
            views = _views(row[start:stop], pieces, sizes)
            squares += torch._foreach_norm(torch._foreach_sub(pieces, views))
            torch._foreach_copy_(pieces, views)
        return float(torch.stack(squares).double().square().sum())


def subtract_from(target: Tensor, row: Tensor) -> float:
    """row <- target - row; returns its squared length."""
    squares = []
    for start in range(0, row.numel(), CHUNK):
        part = row[start : start + CHUNK]
        torch.sub(target[start : start + CHUNK], part, out=part)
        squares.append(torch.linalg.vector_norm(part))
    return float(torch.stack(squares).double().square().sum())


def finite_rows(rows: Tensor) -> list[bool]:
    """Which rows have no NaN and no infinity. One sum per row tells, unless it overflows; only then is each number read."""
    sums = rows.sum(dim=1, dtype=sum_dtype([rows])).isfinite().tolist()
    return [ok or bool(torch.isfinite(row).all()) for ok, row in zip(sums, rows)]


Group = tuple[list[Tensor], list[int], int, int]


def _groups(tensors: Sequence[Tensor]) -> list[Group]:
    """Pieces of the tensors with their sizes and their place [start, stop) in the row, about CHUNK numbers a group."""
    pieces: list[Tensor] = []
    for t in tensors:
        t = t.detach()
        pieces += (
            t.view(-1).split(CHUNK) if t.is_contiguous() else [t]
        )  # others keep their shape: a row has logical order
    groups: list[Group] = []
    batch: list[Tensor] = []
    start = size = 0
    for piece in pieces:
        if batch and size + piece.numel() > CHUNK:
            groups.append((batch, [p.numel() for p in batch], start, start + size))
            batch, start, size = [], start + size, 0
        batch.append(piece)
        size += piece.numel()
    groups.append((batch, [p.numel() for p in batch], start, start + size))
    return groups


def _views(row: Tensor, pieces: Sequence[Tensor], sizes: list[int]) -> list[Tensor]:
    return [v if p.dim() == 1 else v.view(p.shape) for v, p in zip(row.split(sizes), pieces)]


class Extras:
    """BatchNorm statistics, other floating buffers and, where asked, optimizer state: averaged beside the parameters.

    BatchNorm means are averaged and variances pooled about the pooled mean: mean_i [var_i + (mu_i - mu)^2], with mu
    the mean of the mu_i. One collective cannot know mu beforehand, so var_i + (mu_i - c)^2 travels, for a centre c that
    all workers share (the last pooled mean, close to every mu_i, so that little cancels), and then
    mean_i [var_i + (mu_i - mu)^2] = mean_i [var_i + (mu_i - c)^2] - (mu - c)^2.

    A row is [means | variances about c | other buffers | optimizer state]; integer counters travel apart, as a maximum.
    """

    def __init__(
        self, models: Sequence[nn.Module], slots: Sequence[Sequence[tuple[Optimizer, Parameter, str]]]
    ) -> None:
        self._means: list[list[Tensor]] = []
        self._variances: list[list[Tensor]] = []
        self._others: list[list[Tensor]] = []
        self._counters: list[list[Tensor]] = []
        for model in models:
            norms = [m for m in model.modules() if isinstance(m, _NormBase) and m.running_mean is not None]
            means = [m.running_mean for m in norms if m.running_mean is not None]
            variances = [m.running_var for m in norms if m.running_var is not None]
            pooled = {id(t) for t in means + variances}
            persistent = model.state_dict(keep_vars=True)
            buffers = [b for name, b in model.named_buffers() if name in persistent and id(b) not in pooled]
            self._means.append(means)
            self._variances.append(variances)
            self._others.append([b for b in buffers if b.is_floating_point()])
            self._counters.append([b for b in buffers if b.dim() == 0 and b.dtype == torch.long])
        self._slots = slots
        self._sizes = [sum(t.numel() for t in ts[0]) for ts in (self._means, self._variances, self._others)]
        self.num_stats = sum(self._sizes)
        self.width = self.num_stats + sum(p.numel() for _, p, _ in slots[0])
        self.num_counters = len(self._counters[0])
        self._adopted = torch.empty(0)  # [means | variances | others] that all workers last took over
        self._counted = torch.empty(0)  # and their counters

    def settle(self, dtype: torch.dtype, device: torch.device) -> None:
        """All workers hold the same statistics now: remember them."""
        floats = [*self._means[0], *self._variances[0], *self._others[0]]
        self._adopted = torch.cat([torch.zeros(0, device=device), *(t.reshape(-1) for t in floats)]).to(dtype)
        self._counted = torch.stack([*self._counters[0], torch.zeros((), dtype=torch.long, device=device)])[:-1]

    def pack(self, i: int, out: Tensor) -> None:
        """out <- worker i's extras as they travel."""
        means, variances, others, state = out.split([*self._sizes, self.width - self.num_stats])
        for part, tensors in ((means, self._means[i]), (variances, self._variances[i]), (others, self._others[i])):
            _copy_into(part, tensors)
        variances += (means - self._centre()) ** 2
        place = 0
        for optimizer, p, key in self._slots[i]:
            value = optimizer.state.get(p, {}).get(key)
            part = state[place : place + p.numel()].view(p.shape)
            part.zero_() if value is None else part.copy_(value)
            place += p.numel()

    def write_stats(self, i: int, row: Tensor | None) -> None:
        """Give worker i the pooled statistics of a row that landed; None: those that all last took over."""
        stats = self._adopted if row is None else self._pooled(row)
        means, variances, others = stats.split(self._sizes)
        for part, tensors in ((means, self._means[i]), (variances, self._variances[i]), (others, self._others[i])):
            _copy_out(tensors, part)

    def write_counters(self, i: int, counters: Tensor | None) -> None:
        for tensor, value in zip(self._counters[i], self._counted if counters is None else counters):
            tensor.copy_(value)

    def write_optimizer_state(self, i: int, row: Tensor) -> None:
        """Give worker i the averaged optimizer state; one that has not stepped yet has none and stays so."""
        place = self.num_stats
        for optimizer, p, key in self._slots[i]:
            value = optimizer.state.get(p, {}).get(key)
            if value is not None:
                value.copy_(row[place : place + p.numel()].view(p.shape))
            place += p.numel()

    def adopt(self, row: Tensor, counters: Tensor) -> None:
        """All workers have taken over what landed."""
        self._adopted = self._pooled(row)
        self._counted = counters

    def stats(self, i: int) -> tuple[list[Tensor], list[Tensor]]:
        """Worker i's own statistics and counters, copied, for ``restore``."""
        tensors = [*self._means[i], *self._variances[i], *self._others[i], *self._counters[i]]
        return tensors, [t.clone() for t in tensors]

    def slot_values(self, i: int) -> Tensor:
        """Worker i's counters above those all last took over: small numbers, exact in float32."""
        return torch.stack([*self._counters[i], torch.zeros_like(self._counted.sum())])[:-1] - self._counted

    def counters_from(self, slots: Tensor, num_workers: int) -> Tensor:
        """The largest of all workers' counters."""
        return slots.view(num_workers, -1).amax(dim=0).long() + self._counted if self.num_counters else self._counted

    def state_dict(self) -> dict[str, Tensor]:
        return {"adopted": self._adopted.clone(), "counted": self._counted.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._adopted, self._counted = state["adopted"].clone(), state["counted"].clone()

    def _centre(self) -> Tensor:
        return self._adopted[: self._sizes[0]]

    def _pooled(self, row: Tensor) -> Tensor:
        means, variances, others = row[: self.num_stats].split(self._sizes)
        return torch.cat([means, (variances - (means - self._centre()) ** 2).clamp_min_(0), others])


def _copy_into(row: Tensor, tensors: list[Tensor]) -> None:
    if tensors:
        torch._foreach_copy_(
            [v.view(t.shape) for v, t in zip(row.split([t.numel() for t in tensors]), tensors)], tensors
        )


def _copy_out(tensors: list[Tensor], row: Tensor) -> None:
    if tensors:
        torch._foreach_copy_(
            tensors, [v.view(t.shape) for v, t in zip(row.split([t.numel() for t in tensors]), tensors)]
        )


def state_keys(optimizer: Optimizer) -> list[list[str]]:
    """Per parameter group, the names of the optimizer's floating state of a parameter's shape (momentum and the like).

    Found by letting a copy of the optimizer step a stand-in, since the real state is born with the first step and
    workers must agree on what travels before that.
    """
    keys = []
    for group in optimizer.param_groups:
        stand_in = torch.zeros(2, 3, requires_grad=True)
        stand_in.grad = torch.zeros(2, 3)
        trial = copy.copy(optimizer)
        trial.state = defaultdict(dict)
        hyper = {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
        trial.param_groups = [{**hyper, "params": [stand_in]}]
        trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        trial.step()
        state = trial.state[stand_in]
        keys.append(
            [k for k, v in state.items() if isinstance(v, Tensor) and v.shape == (2, 3) and v.is_floating_point()]
        )
    return keys
