"""A model's buffers: what an average makes of them, whatever the way of averaging.

All buffers are averaged, saved with the model or not, so that all workers end with the same ones:

- BatchNorm, and other norms with running statistics: means are averaged, variances pooled about the pooled mean, and
  the count of batches is the largest. A worker with a statistic that is not finite is bad, as one with a parameter.
- Other buffers: see ``other_buffers.py``. In short, the mean change is added to floating ones, integers without a
  dimension are the largest, other integers and booleans are worker 0's.

A buffer has to keep its shape, since the sizes of what travels are agreed on when a run starts. One that does not is an
error, unless it is not saved with the model (``persistent=False``): that is a cache, and each worker keeps its own.
Sparse and quantized tensors are left alone, and so is what a module registers later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from prsgd.replicas.other_buffers import Home, OtherBuffers, found, home_of, is_dense, places, wrong_shape


class Buffers:
    """The hosted workers' buffers. What travels is a sum of floating numbers, of a size that only their kinds decide:

    [batches of worker 0 | ... of worker N-1 | means | variances about c | other buffers | how many workers count]

    Pooled variances are mean_i [var_i + (mu_i - mu)^2], mu = mean_i mu_i. One collective cannot know mu beforehand, so
    var_i + (mu_i - c)^2 travels, for a centre c that all workers share (the last pooled mean, close to every mu_i, so
    that little cancels), and then mean_i [var_i + (mu_i - mu)^2] = mean_i [var_i + (mu_i - c)^2] - (mu - c)^2.
    """

    def __init__(self, models: Sequence[nn.Module], workers: range, num_workers: int) -> None:
        self._workers, self._num_workers = workers, num_workers
        self._norms: list[list[Home]] = []  # all means, then all variances
        self._batches: list[list[Home]] = []
        others = []
        for model in models:
            norms = [
                (n, m) for n, m in model.named_modules() if isinstance(m, _NormBase) and m.running_mean is not None
            ]
            self._norms.append([home_of(m, key, n) for key in ("running_mean", "running_var") for n, m in norms])
            key = "num_batches_tracked"
            self._batches.append([home_of(m, key, n) for n, m in norms if m._buffers.get(key) is not None])
            known = {(id(home.buffers), home.key) for home in (*self._norms[-1], *self._batches[-1])}
            others.append([h for h in _homes(model) if (id(h.buffers), h.key) not in known])
        self._sizes = [home.shape.numel() for home in self._norms[0]]
        self._num_means, self._num_batches = sum(self._sizes) // 2, len(self._batches[0])
        self._others = OtherBuffers(others, workers, num_workers) if others[0] else None
        self.width, self.sum_width = 2 * self._num_means, num_workers * self._num_batches
        self._agreed_sizes = self.width, self._num_batches
        if self._others:
            self.width += self._others.width
            self.sum_width += self._others.integer_sum_width
            self._agreed_sizes = (
                self._agreed_sizes[0] + self._others.num_floats,
                self._agreed_sizes[1] + self._others.num_integers,
            )
        self.sum_width += self.width + 1 if self.sum_width + self.width else 0
        self._adopted = torch.empty(0)  # [means | variances | other floats] that all workers last took over
        self._counted = torch.empty(0)  # [batches | other integers]

    def settle(self, dtype: torch.dtype, device: torch.device) -> None:
        """All workers hold the same buffers now: remember them."""
        self._adopted = torch.cat([torch.zeros(0, dtype=dtype, device=device), *self._statistics(0)]).to(dtype)
        self._counted = self._batches_of(0, device)
        if self._others:
            floats, integers = self._others.settled(dtype, device)
            self._adopted = torch.cat([self._adopted.to(floats.dtype), floats])
            self._counted = torch.cat([self._counted, integers])

    def pack(self, i: int, out: Tensor) -> None:
        """out <- worker i's means, variances about the centre, and changes of other floats: finite, or it is bad."""
        split = 2 * self._num_means
        if split:
            both = out[:split] if self._others else out
            torch.cat(self._statistics(i), out=both)
            means, variances = both.split(self._num_means)
            variances.add_((means - self._adopted[: self._num_means]).square_())
        if self._others:
            self._others.pack(i, out[split:], self._adopted[split:])

    def sums(self, rows: Tensor, counts: Sequence[bool]) -> Tensor:
        """What the hosted workers add to the sum: the integers of all, the packed ``rows`` of those that count."""
        if not self.sum_width:
            return rows.new_zeros(0)
        parts = []
        if self._num_batches:
            batches = rows.new_zeros(self._num_workers, self._num_batches)
            agreed = self._counted[: self._num_batches] if self._others else self._counted
            for i, worker in enumerate(self._workers):
                # Above what all last took over: small numbers, exact in float32.
                batches[worker] = self._batches_of(i, rows.device) - agreed
            parts.append(batches.view(-1))
        counted = rows[list(counts)] if not all(counts) else rows
        parts.append(counted[0] if counted.shape[0] == 1 else counted.sum(dim=0))
        if self._others:
            parts.append(self._others.integer_sums(self._counted[self._num_batches :], rows))
        return torch.cat([*parts, rows.new_full((1,), counted.shape[0])])

    def pooled(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """(statistics, integers) of all workers; where nobody counted, the statistics that all last took over."""
        if not self.sum_width:
            return self._adopted, self._counted
        start = self._num_workers * self._num_batches
        split = start + 2 * self._num_means
        agreed = self._counted[: self._num_batches] if self._others else self._counted
        integers = sums[:start].view(self._num_workers, self._num_batches).amax(dim=0).long() + agreed
        if self._others:
            theirs = self._others.pooled_integers(sums[start + self.width : -1], self._counted[self._num_batches :])
            integers = torch.cat([integers, theirs])
        count = sums[-1]
        if not count:
            return self._adopted, integers
        means, variances = (sums[start:split] / count).split(self._num_means) if self._num_means else (sums[:0],) * 2
        centre = self._adopted[: self._num_means]
        parts = [means, (variances - (means - centre) ** 2).clamp_min_(0)]
        if self._others:
            agreed = self._adopted[2 * self._num_means :]
            parts.append(self._others.pooled_floats(sums[split : start + self.width], count, agreed))
        return torch.cat(parts), integers

    def write(self, i: int, pooled: tuple[Tensor, Tensor]) -> None:
        """Give worker i the buffers of all."""
        if self._num_workers == 1:  # which are its own, but for rounding
            return
        stats, integers = pooled
        batches = integers
        if self._others:
            split = 2 * self._num_means
            self._others.write(i, stats[split:], integers[self._num_batches :])
            stats, batches = stats[:split], integers[: self._num_batches]
        if self._sizes:
            torch._foreach_copy_(self._statistics(i), torch.split_with_sizes(stats, self._sizes))
        if self._num_batches and not torch.equal(self._batches_of(i, batches.device), batches):
            torch._foreach_copy_(_tensors(self._batches[i]), batches.unbind(0))

    def adopt(self, pooled: tuple[Tensor, Tensor]) -> None:
        """All workers have taken it over."""
        self._adopted, self._counted = pooled

    def tensors(self, i: int) -> list[Tensor]:
        """All that ``write`` changes."""
        homes = [*self._norms[i], *self._batches[i], *(self._others.homes[i] if self._others else ())]
        tensors = [found(home, self._workers[i]) for home in homes]
        return [places(tensor, tensor) for tensor in tensors if tensor is not None]

    def not_finite(self, i: int) -> str | None:
        """The name of the first buffer for which worker i is bad."""
        for home, tensor in zip(self._norms[i], self._statistics(i)):
            if not torch.isfinite(tensor).all():
                return home.name
        return self._others.not_finite(i, self._adopted[2 * self._num_means :]) if self._others else None

    def state_dict(self) -> dict[str, Tensor]:
        return {"adopted": self._adopted.clone(), "counted": self._counted.clone()}

    def state_kinds(self, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what ``state_dict`` holds, for rows of ``dtype``."""
        floats, integers = self._agreed_sizes
        if self._others:
            dtype = self._others.float_dtype(dtype)
        return {"adopted": ((floats,), dtype), "counted": ((integers,), torch.long)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Of the kinds that ``state_kinds`` tells."""
        self._adopted, self._counted = state["adopted"].clone(), state["counted"].clone()

    def _statistics(self, i: int) -> list[Tensor]:
        """Worker i's running means, then its running variances."""
        tensors = _tensors(self._norms[i])
        sizes = [-1 if t is None else t.numel() for t in tensors]
        if sizes != self._sizes:
            changed = (home for home, now, first in zip(self._norms[i], sizes, self._sizes) if now != first)
            raise wrong_shape(next(changed), self._workers[i])
        return tensors

    def _batches_of(self, i: int, device: torch.device) -> Tensor:
        if not self._num_batches:
            return torch.empty(0, dtype=torch.long, device=device)
        return torch.stack(_tensors(self._batches[i]))


def is_own(tensor: Tensor) -> bool:
    """Does it have a place in memory for each number? An expanded one has not, and cannot be written as it is."""
    return is_dense(tensor) and (0 not in tensor.stride() or tensor.numel() < 2)


def _tensors(homes: Sequence[Home]) -> list[Tensor]:
    return [home.buffers[home.key] for home in homes]  # type: ignore[misc]  # None if a user took it away


def _homes(model: nn.Module) -> list[Home]:
    named = (name.rpartition(".") for name, buffer in model.named_buffers() if is_dense(buffer))
    return [home_of(model.get_submodule(owner), key, owner) for owner, _, key in named]
