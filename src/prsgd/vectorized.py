"""All hosted workers' losses and gradients at once, by ``torch.func.vmap`` over the fleet's rows.

Worth it for many small models, where a loop spends its time starting kernels; convolutions lose by it. The results are
those of the loop to rounding, BatchNorm statistics included.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import Parameter

FEWEST = 8
"""Hosted workers from which vmap is chosen: for fewer there is little to gain, and the loop gives the last bit of
the run with a process for each worker."""

MANY = 4
"""Compiled loss functions after which another is probably a lambda made at every step."""

LossFn = Callable[[Any, Any], Tensor]


Program = Callable[..., tuple[dict[str, Tensor], Tensor]]
"""(parameters, buffers, x, y), all with the workers in front -> gradients and losses."""


class CannotVectorize(Exception):  # noqa: N818 - not an error: the loop takes over
    """vmap does not take this model, loss or batch."""


class CannotCompile(Exception):  # noqa: N818 - like the one above
    """torch.compile fails where vmap alone does not."""


def suits(model: nn.Module, num_hosted: int = FEWEST) -> bool:
    """Is vmap the better choice? By structure: not for convolutions, recurrences or random layers."""
    slow = (_ConvNd, _DropoutNd, nn.RNNBase, nn.RReLU, nn.MultiheadAttention)
    return num_hosted >= FEWEST and not any(isinstance(m, slow) for m in model.modules())


class Vectorized:
    """A fleet's modules seen as one: parameter k of all workers is a view (n, ...) of the rows.

    ``compiled``: steps that all hosted workers take run as one program made by torch.compile for each loss function.
    """

    def __init__(
        self, modules: Sequence[nn.Module], named: Sequence[Mapping[str, Parameter]], rows: Tensor, compiled: bool
    ) -> None:
        self._modules, self._named = modules, named
        self._compiled: dict[LossFn, Program] | None = {} if compiled else None
        first = named[0]
        parts = rows.split([p.numel() for p in first.values()], dim=1)
        self._parameters = {
            name: part.as_strided((len(rows), *p.shape), (rows.stride(0), *p.stride()), part.storage_offset())
            for (name, p), part in zip(first.items(), parts)
        }
        self._buffers = {name: self._stack(name) for name, _ in modules[0].named_buffers()}
        self._flags = [list(module.modules()) for module in modules]

    def backward(self, loss_fn: LossFn, x: Any, y: Any, places: Sequence[int]) -> Tensor:
        """Add the gradients of the workers at ``places`` to their parameters' ``.grad``; returns their losses."""
        everyone = len(places) == len(self._modules)
        chosen = slice(None) if everyone else list(places)
        xs, ys = (self._batch(batch, places) for batch in (x, y))
        self._check_flags()
        self._check_buffers()
        parameters = {k: v[chosen] for k, v in self._parameters.items()}
        before = {k: v[chosen].clone() for k, v in self._buffers.items()}
        buffers = self._buffers if everyone else {k: v.clone() for k, v in before.items()}

        program = self._program(loss_fn)
        run = program if self._compiled is None or not everyone else self._compile(loss_fn, program)
        try:
            gradients, losses = run(parameters, buffers, xs, ys)
        except Exception as error:  # of any kind: whatever vmap has no rule for
            for name, value in before.items():
                self._buffers[name][chosen] = value
            self._ordinary_gradients(loss_fn, xs[0], ys[0])  # shows the user's own mistakes as they are
            if run is not program and _runs(program, parameters, before, xs, ys):
                raise CannotCompile(_first_line(error)) from error
            raise CannotVectorize(_first_line(error)) from error
        if not everyone:
            for name, value in buffers.items():
                self._buffers[name][chosen] = value
        unused = self._unused(gradients, loss_fn, xs[0], ys[0])
        for name, gradient in gradients.items():
            if name in unused:
                continue
            for place, part in zip(places, gradient.unbind(0)):
                p = self._named[place][name]
                if p.grad is None:
                    p.grad = part
                else:
                    p.grad += part
        found: Tensor = losses.detach()
        return found

    def _program(self, loss_fn: LossFn) -> Program:
        model = self._modules[0]

        def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Any, y: Any) -> Tensor:
            return loss_fn(functional_call(model, {**parameters, **buffers}, (x,)), y)

        program: Program = vmap(grad_and_value(loss))
        return program

    def _compile(self, loss_fn: LossFn, program: Program) -> Program:
        assert self._compiled is not None
        if loss_fn not in self._compiled:
            if len(self._compiled) == MANY:
                warnings.warn(
                    f"compile=True: {MANY + 1} different loss functions, each compiled anew: pass the same object at "
                    "every step, not a new lambda",
                    UserWarning,
                    stacklevel=5,
                )
            apart = {"isolate_recompiles": True}  # newer torch: else all fleets of a process share one limit of 8
            known = "isolate_recompiles" in inspect.signature(torch.compile).parameters
            self._compiled[loss_fn] = torch.compile(program, **(apart if known else {}))  # type: ignore[call-overload]
        return self._compiled[loss_fn]

    def _batch(self, batch: Any, places: Sequence[int]) -> Tensor:
        if isinstance(batch, Tensor):
            return batch if len(places) == len(batch) else batch[list(places)]
        entries = [batch[i] for i in places]
        if not all(isinstance(e, Tensor) and e.shape == entries[0].shape for e in entries):
            raise CannotVectorize("the workers' batches are not tensors of one shape")
        return torch.stack(entries)

    def _unused(self, gradients: Mapping[str, Tensor], loss_fn: LossFn, x: Tensor, y: Tensor) -> set[str]:
        """Parameters that the loss does not depend on: the loop leaves their ``.grad`` None, vmap makes it zero.

        A gradient that is zero throughout is rare otherwise, so only then one worker's ordinary pass decides.
        """
        suspects = {name for name, g in gradients.items() if not g[0].any() and not g.any()}
        if not suspects:
            return suspects
        ordinary = self._ordinary_gradients(loss_fn, x, y)
        return {name for name in suspects if ordinary[name] is None}

    def _ordinary_gradients(self, loss_fn: LossFn, x: Tensor, y: Tensor) -> dict[str, Tensor | None]:
        """Of the first module, without vmap and without a trace."""
        model = self._modules[0]
        leaves = {k: v[0].detach().clone().requires_grad_() for k, v in self._parameters.items()}
        buffers = {k: v.clone() for k, v in model.named_buffers()}
        with torch.random.fork_rng(devices=[]):
            loss = loss_fn(functional_call(model, {**leaves, **buffers}, (x,)), y)
            found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        return dict(zip(leaves, found))

    def _check_flags(self) -> None:
        first, *others = ([m.training for m in modules] for modules in self._flags)
        if any(flags != first for flags in others):
            raise CannotVectorize("some workers' modules are in training mode and others are not")

    def _stack(self, name: str) -> Tensor:
        """All workers' buffers of a name in one tensor, of which each module's own becomes a view."""
        owner, _, leaf = name.rpartition(".")
        modules = [module.get_submodule(owner) for module in self._modules]
        stacked = torch.stack([m._buffers[leaf] for m in modules])  # type: ignore[misc]  # it has this buffer
        for m, part in zip(modules, stacked.unbind(0)):
            m._buffers[leaf] = part
        return stacked

    def _check_buffers(self) -> None:
        """Follow buffers that were replaced, as by ``module.running_mean = ...``."""
        for name, stacked in self._buffers.items():
            place = stacked.data_ptr()
            if any(
                m.get_buffer(name).data_ptr() != place + i * _bytes(stacked[0]) for i, m in enumerate(self._modules)
            ):
                self._buffers[name] = self._stack(name)


def _runs(program: Program, parameters: Any, buffers: Mapping[str, Tensor], xs: Tensor, ys: Tensor) -> bool:
    try:
        program(parameters, {k: v.clone() for k, v in buffers.items()}, xs, ys)
    except Exception:  # whatever it is, it is the same as before
        return False
    return True


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else repr(error)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
