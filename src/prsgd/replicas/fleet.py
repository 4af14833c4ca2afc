"""Many workers in one process: each hosted worker has a module of its own whose parameters are views of its row."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from prsgd._check import one_of, whole_number
from prsgd._warn import warn
from prsgd.comm.base import Communicator
from prsgd.comm.joining import current
from prsgd.errors import UsageError
from prsgd.replicas.rows import trainable
from prsgd.replicas.vectorized import CannotCompile, CannotVectorize, IsSlower, LossFn, Vectorized, suits


class Fleet:
    """N workers, all in this process or some in each process of a torch.distributed job.

    Any ``nn.Module`` works: each hosted worker gets a copy with the same weights, its own buffers and its own random
    numbers, which depend on ``seed`` and the worker's id and not on where it lives. One ordinary optimizer over
    ``parameters()`` steps all of them; a worker that has to wait gets no gradient, so its momentum and weight decay
    stand still.

    ``mode`` is how ``backward`` runs: "loop" over the modules, or "vmap", all at once, which is faster for many small
    models; "auto" chooses vmap for 8 or more hosted workers without convolutions and random layers. ``compile=True``
    gives that vmap to torch.compile: seconds at the first step, then up to twice as fast for few small models,
    and little for large ones; pass the same ``loss_fn`` at every step. Steps in which some workers wait run as without.

    Put the model on its device and into its dtype first: moving a module later takes it off its row, which the next
    average reports.

    >>> import torch, prsgd
    >>> fleet = prsgd.Fleet(torch.nn.Linear(4, 2), num_workers=3)
    >>> optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    >>> x, y = torch.randn(3, 8, 4), torch.randint(2, (3, 8))  # worker, sample, ...
    >>> with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2)) as local:
    ...     for _ in range(6):
    ...         optimizer.zero_grad()
    ...         losses = fleet.backward(torch.nn.functional.cross_entropy, x, y)
    ...         optimizer.step()
    >>> losses.shape, len(local.records), bool((fleet.rows == fleet.rows[0]).all())
    (torch.Size([3]), 3, True)
    """

    def __init__(
        self,
        model: nn.Module,
        num_workers: int,
        *,
        seed: int = 0,
        comm: Communicator | None = None,
        mode: str = "auto",
        compile: bool = False,
    ) -> None:
        num_workers = whole_number("num_workers", num_workers, at_least=1)
        self.comm = comm if comm is not None else current(num_workers)
        if self.comm.num_workers != num_workers:
            raise ValueError(
                f"num_workers must be that of comm, {self.comm.num_workers}, got {num_workers} (a communicator for "
                f"more workers than processes: TorchDistributed(num_workers={num_workers}))"
            )
        self.num_workers, self.workers = num_workers, self.comm.workers
        one_of("mode", mode, ("auto", "loop", "vmap"))
        trainable(model)  # what cannot travel is refused here: some of it cannot be copied either
        self.modules = tuple(copy.deepcopy(model) for _ in self.workers)
        self._named = [trainable(module) for module in self.modules]
        self.rows = self._move_into_rows()
        """(n, P): row i is the model of hosted worker i."""
        if mode == "auto":
            self.mode = "vmap" if suits(model, len(self.workers)) or (compile and suits(model)) else "loop"
        else:
            self.mode = mode
        """How ``backward`` runs: "loop" or "vmap". The two differ in the last bit, so a checkpoint holds it."""
        if compile and self.mode == "loop":
            why = "" if mode == "loop" else ", and this model's layers (convolutions, random ones) run in a loop"
            raise ValueError(f"compile=True is for mode='vmap'{why}: leave it off")
        self.compile = compile
        """Is vmap compiled? That too is in a checkpoint."""
        self._chosen_by_us = mode == "auto"
        self._vectorized = self._vectorize()
        self._channels_last = any(isinstance(m, nn.Conv2d) for m in model.modules())  # faster on such inputs
        self.idle: set[int] = set()
        """Workers that wait for others in this round; kept by LocalSGD."""
        self.stopped: set[int] = set()
        self.on_stop: Callable[[], None] | None = None
        self.shows_consensus = False
        """Does the first hosted module hold the average of all, inside ``consensus()``?"""
        self._random = [_first_random_state(seed, worker, self.rows.device) for worker in self.workers]

    @property
    def active(self) -> tuple[int, ...]:
        """The hosted workers that take the next step: those that neither wait nor were stopped."""
        return tuple(w for w in self.workers if w not in self.idle and w not in self.stopped)

    def parameters(self) -> Iterator[Parameter]:
        """All hosted modules' own parameters, worker by worker: what an optimizer takes."""
        for module in self.modules:
            yield from module.parameters()

    def backward(self, loss_fn: LossFn, x: Tensor | Sequence[Any], y: Tensor | Sequence[Any]) -> Tensor:
        """``loss_fn(module(x_i), y_i).backward()`` for each active worker; returns the losses (n,), NaN where inactive.

        ``x`` and ``y`` have one entry per hosted worker, in the order of ``workers``; those of inactive workers are
        not looked at.
        """
        n = len(self.workers)
        for name, batch in (("x", x), ("y", y)):
            if len(batch) != n:
                raise ValueError(f"{name} must have one entry per hosted worker: {n}, got {len(batch)}")
        places = [w - self.workers.start for w in self.active]
        losses = self.rows.new_full((n,), float("nan"))
        if places:
            found = self._backward_vmap(loss_fn, x, y, places) if self._vectorized is not None else None
            if found is None:
                found = self._backward_loop(loss_fn, x, y, places)
            losses[places] = found.to(losses.dtype)
        return losses

    def _vectorize(self) -> Vectorized | None:
        if self.mode == "loop":
            return None
        if_faster = self._chosen_by_us and not self.compile
        named = [{name: p for name, p in m.named_parameters() if p.requires_grad} for m in self.modules]
        return Vectorized(self.modules, named, self.rows, self.compile, if_faster)

    def _backward_loop(self, loss_fn: LossFn, x: Any, y: Any, places: Sequence[int]) -> Tensor:
        losses = []
        for i in places:
            inputs = x[i]
            if self._channels_last and isinstance(inputs, Tensor) and inputs.dim() == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            with self.random(self.workers[i]):
                loss = loss_fn(self.modules[i](inputs), y[i])
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    def _backward_vmap(self, loss_fn: LossFn, x: Any, y: Any, places: Sequence[int]) -> Tensor | None:
        """None: vmap cannot do this and the loop is to do it, which is said if it was not the user's choice."""
        assert self._vectorized is not None
        try:
            return self._vectorized.backward(loss_fn, x, y, places)
        except CannotCompile as problem:
            raise ValueError(f"compile=True cannot run this model and loss, leave it off: {problem}") from problem
        except CannotVectorize as problem:
            if not self._chosen_by_us:
                raise ValueError(f'mode="vmap" cannot run this model and loss, use mode="loop": {problem}') from problem
            self.mode, self.compile, self._vectorized = "loop", False, None
            if isinstance(problem, IsSlower):
                return None
            warn(f"the fleet runs its workers in a loop, since vmap cannot: {problem}")
            return None

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale each active worker's gradient to at most ``max_norm``; returns the norms (n,), NaN where inactive."""
        norms = self.rows.new_full((len(self.workers),), float("nan"))
        for worker in self.active:
            i = worker - self.workers.start
            norms[i] = nn.utils.clip_grad_norm_(self._named[i].values(), max_norm)
        return norms

    def stop(self, worker: int) -> None:
        """Say that a hosted worker has no more data: it takes no further step and follows the others' averages."""
        if worker not in self.workers:
            raise ValueError(f"worker must be hosted here, one of {list(self.workers)}, got {worker!r}")
        self.stopped.add(worker)
        if self.on_stop is not None:
            self.on_stop()

    @contextmanager
    def random(self, worker: int) -> Iterator[None]:
        """Draw torch's random numbers from this worker's own stream, and leave the process's as they were."""
        i = worker - self.workers.start
        outside = random_state(self.rows.device)
        set_random_state(self._random[i], self.rows.device)
        try:
            yield
        finally:
            self._random[i] = random_state(self.rows.device)
            set_random_state(outside, self.rows.device)

    def named_parameters(self, worker: int) -> Mapping[str, Parameter]:
        """The parameters of a hosted worker that train, by name."""
        return self._named[worker - self.workers.start]

    def check_rows(self) -> None:
        """Raise a UsageError if a module was moved off its row (``.to()``, ``.double()``, ``p.data = ...``)."""
        size = self.rows.element_size()
        for i, named in enumerate(self._named):
            place = self.rows.data_ptr() + i * self.rows.stride(0) * size
            for name, p in named.items():
                if p.data_ptr() != place or p.dtype != self.rows.dtype:
                    raise UsageError(
                        f"parameter {name!r} of worker {self.workers[i]} was moved off the fleet's rows: "
                        "put the model on its device and into its dtype and layout before making the Fleet"
                    )
                place += p.numel() * size

    def state_dict(self) -> dict[str, Any]:
        """All hosted workers: models, random numbers, who has stopped. Plain numbers, strings and tensors."""
        if self.shows_consensus:
            raise UsageError("fleet.state_dict() inside consensus(): the first module is not its worker's own there")
        return {
            "mode": self.mode,
            "compile": self.compile,
            "workers": list(self.workers),
            "stopped": sorted(self.stopped),
            "random": [[t.clone() for t in state] for state in self._random],
            "modules": [{k: v.detach().clone() for k, v in m.state_dict().items()} for m in self.modules],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, which was saved with the same workers in this process."""
        if state["workers"] != list(self.workers):
            raise ValueError(f"state must be of workers {list(self.workers)}, got {state['workers']}")
        self.mode = one_of("mode", state["mode"], ("loop", "vmap"))
        self.compile = state.get("compile", False)
        self._vectorized = self._vectorize()
        self.stopped = set(state["stopped"])
        self._random = [[t.clone() for t in s] for s in state["random"]]
        for module, saved in zip(self.modules, state["modules"]):
            module.load_state_dict(saved)

    def _move_into_rows(self) -> Tensor:
        """Make every parameter that trains a view of its worker's row."""
        first = self._named[0]
        kinds = {(p.dtype, p.device) for p in first.values()}
        if len(kinds) > 1:
            listed = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            raise ValueError(f"a fleet's parameters must have one dtype and device, got {listed}")
        width = sum(p.numel() for p in first.values())
        (dtype, device) = kinds.pop()
        rows = torch.empty(len(self.modules), width, dtype=dtype, device=device)
        for row, named in zip(rows, self._named):
            for place, p in zip(row.split([p.numel() for p in named.values()]), named.values()):
                view = place.as_strided(p.shape, _dense_strides(p), place.storage_offset())
                view.copy_(p.detach())
                p.data = view
        return rows


def _dense_strides(p: Tensor) -> tuple[int, ...]:
    """A parameter's own strides if it fills its memory without gaps (channels_last stays so), else contiguous ones."""
    return torch.empty_like(p, memory_format=torch.preserve_format).stride()


def _first_random_state(seed: int, worker: int, device: torch.device) -> list[Tensor]:
    number = int.from_bytes(hashlib.sha256(f"{seed}/{worker}".encode()).digest()[:8], "big") >> 1
    return [torch.Generator(d).manual_seed(number).get_state() for d in _random_devices(device)]


def _random_devices(device: torch.device) -> list[torch.device]:
    return [torch.device("cpu")] if device.type == "cpu" else [torch.device("cpu"), device]


def random_state(device: torch.device) -> list[Tensor]:
    """Of torch's random numbers on the CPU, and on the device if it is another."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def set_random_state(states: list[Tensor], device: torch.device) -> None:
    """Go on from what ``random_state`` gave."""
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)
