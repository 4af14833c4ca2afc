"""BatchNorm statistics and other buffers of the hosted workers: pooled, whatever the way of averaging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

Home = tuple[nn.Module, str]
"""A buffer's module and its name there."""


class Buffers:
    """Means are averaged, and variances pooled about the pooled mean: mean_i [var_i + (mu_i - mu)^2], mu = mean_i mu_i.

    One collective cannot know mu beforehand, so var_i + (mu_i - c)^2 travels, for a centre c that all workers share
    (the last pooled mean, close to every mu_i, so that little cancels), and then
    mean_i [var_i + (mu_i - mu)^2] = mean_i [var_i + (mu_i - c)^2] - (mu - c)^2.

    Other floating buffers are averaged: their changes since all last agreed travel, so that a constant stays as it is,
    be it a mask of infinities. Integer counters take the largest value. What travels is a sum,
    [counters of worker 0 | ... of worker N-1 | means | variances about c | changes | how many workers count].
    """

    def __init__(self, models: Sequence[nn.Module], workers: range, num_workers: int) -> None:
        self._workers, self._num_workers = workers, num_workers
        # Where the buffers live, not the tensors themselves: a module may be given others.
        self._means: list[list[Home]] = []
        self._variances: list[list[Home]] = []
        self._others: list[list[Home]] = []
        self._counters: list[list[Home]] = []
        for model in models:
            norms = [m for m in model.modules() if isinstance(m, _NormBase) and m.running_mean is not None]
            self._means.append([(m, "running_mean") for m in norms])
            self._variances.append([(m, "running_var") for m in norms])
            pooled = {(id(m), key) for m, key in self._means[-1] + self._variances[-1]}
            persistent = model.state_dict(keep_vars=True)
            homes = [_home(model, name) for name, _ in model.named_buffers() if name in persistent]
            rest = [(m, key) for m, key in homes if (id(m), key) not in pooled and is_own(_tensor((m, key)))]
            self._others.append([home for home in rest if _tensor(home).is_floating_point()])
            self._counters.append(
                [home for home in rest if _tensor(home).dim() == 0 and _tensor(home).dtype == torch.long]
            )
        self._sizes = [
            sum(_tensor(home).numel() for home in homes[0]) for homes in (self._means, self._variances, self._others)
        ]
        self._num_counters = len(self._counters[0])
        self.width = sum(self._sizes)
        self.sum_width = num_workers * self._num_counters + self.width + 1 if self.width + self._num_counters else 0
        self._adopted = torch.empty(0)  # [means | variances | others] that all workers last took over
        self._counted = torch.empty(0)  # and their counters

    def settle(self, dtype: torch.dtype, device: torch.device) -> None:
        """All workers hold the same buffers now: remember them."""
        floats = [_tensor(home) for home in (*self._means[0], *self._variances[0], *self._others[0])]
        self._adopted = torch.cat([torch.zeros(0, device=device), *(t.reshape(-1) for t in floats)]).to(dtype)
        self._counted = _stack(self._counters[0], device)

    def pack(self, i: int, out: Tensor) -> None:
        """out <- worker i's means, variances about the centre, and changes of other buffers."""
        means, variances, others = out.split(self._sizes)
        homes = [*self._means[i], *self._variances[i], *self._others[i]]
        if homes:
            tensors = [t if t.dim() == 1 else t.reshape(-1) for t in map(_tensor, homes)]
            if all(t.dtype == out.dtype for t in tensors):
                torch.cat(tensors, out=out)
            else:
                out.copy_(torch.cat([t.to(out.dtype) for t in tensors]))
        if means.numel():
            variances.add_((means - self._centre()) ** 2)
        if others.numel():
            agreed = self._adopted[self.width - others.numel() :]
            others.copy_(torch.where(others == agreed, 0.0, others - agreed))

    def sums(self, rows: Tensor, counts: Sequence[bool]) -> Tensor:
        """What the hosted workers add to the sum: the counters of all, the packed ``rows`` of those that count."""
        if not self.sum_width:
            return rows.new_zeros(0)
        counters = rows.new_zeros(self._num_workers, self._num_counters)
        for i, worker in enumerate(self._workers if self._num_counters else ()):
            # Above what all last took over: small numbers, exact in float32.
            counters[worker] = _stack(self._counters[i], rows.device) - self._counted
        counted = rows[list(counts)] if not all(counts) else rows
        stats = counted[0] if len(counted) == 1 else counted.sum(dim=0)
        return torch.cat([counters.view(-1), stats, rows.new_tensor([len(counted)])])

    def write(self, i: int, pooled: tuple[Tensor, Tensor]) -> None:
        """Give worker i the buffers of all."""
        stats, counters = pooled
        homes = [*self._means[i], *self._variances[i], *self._others[i]]
        if homes:
            tensors = [_tensor(home) for home in homes]
            parts = torch.split_with_sizes(stats, [t.numel() for t in tensors])
            torch._foreach_copy_(tensors, [v if t.dim() == 1 else v.view(t.shape) for v, t in zip(parts, tensors)])
        own = _stack(self._counters[i], counters.device)
        if not torch.equal(own, counters):
            torch._foreach_copy_([_tensor(home) for home in self._counters[i]], list(counters.unbind(0)))

    def adopt(self, pooled: tuple[Tensor, Tensor]) -> None:
        """All workers have taken it over."""
        self._adopted, self._counted = pooled

    def tensors(self, i: int) -> list[Tensor]:
        """All that ``write`` changes."""
        homes = (*self._means[i], *self._variances[i], *self._others[i], *self._counters[i])
        return [_tensor(home) for home in homes]

    def state_dict(self) -> dict[str, Tensor]:
        return {"adopted": self._adopted.clone(), "counted": self._counted.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._adopted, self._counted = state["adopted"].clone(), state["counted"].clone()

    def _centre(self) -> Tensor:
        return self._adopted[: self._sizes[0]]

    def pooled(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """(statistics, counters) of all workers; where nobody counted, the statistics that all last took over."""
        if not self.sum_width:
            return self._adopted, self._counted
        split = self._num_workers * self._num_counters
        counters = sums[:split].view(self._num_workers, self._num_counters).amax(dim=0).long() + self._counted
        if not sums[-1]:
            return self._adopted, counters
        means, variances, others = (sums[split:-1] / sums[-1]).split(self._sizes)
        agreed = self._adopted[self.width - others.numel() :]
        return torch.cat([means, (variances - (means - self._centre()) ** 2).clamp_min_(0), agreed + others]), counters


def is_own(tensor: Tensor) -> bool:
    """Does it have a place in memory for each number? An expanded one has not, and cannot be written."""
    return 0 not in tensor.stride() or tensor.numel() < 2


def _tensor(home: Home) -> Tensor:
    tensor = home[0]._buffers[home[1]]
    assert tensor is not None
    return tensor


def _home(model: nn.Module, name: str) -> Home:
    owner, _, key = name.rpartition(".")
    return model.get_submodule(owner), key


def _stack(counters: Sequence[Home], device: torch.device) -> Tensor:
    values = [_tensor(home) for home in counters]
    return torch.stack(values) if values else torch.empty(0, dtype=torch.long, device=device)
