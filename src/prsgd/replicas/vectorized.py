"""All hosted workers' losses and gradients at once, by ``torch.func.vmap`` over the fleet's rows.

Worth it for many small models, where a loop spends its time starting kernels; convolutions lose by it. The results are
those of the loop to rounding, BatchNorm statistics included.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import Parameter

from prsgd._warn import warn

FEWEST = 8
"""Hosted workers from which vmap is chosen: for fewer there is little to gain, and the loop gives the last bit of
the run with a process for each worker."""

MANY = 4
"""Compiled loss functions after which another is probably a lambda made at every step."""

LossFn = Callable[[Any, Any], Tensor]


Program = Callable[..., tuple[dict[str, Tensor], tuple[Tensor, dict[str, Tensor]]]]
"""(parameters, state, x, y), all with the workers in front -> gradients, losses, and buffers that were replaced."""


class CannotVectorize(Exception):  # noqa: N818 - not an error: the loop takes over
    """vmap does not take this model, loss or batch."""


class IsSlower(CannotVectorize):
    """vmap takes it, but as a slow loop of its own: it has no rule for an operation, such as attention on a CPU."""


class CannotCompile(Exception):  # noqa: N818 - like the one above
    """torch.compile fails where vmap alone does not."""


def suits(model: nn.Module, num_hosted: int = FEWEST) -> bool:
    """Is vmap the better choice? By structure: not for convolutions, recurrences or random layers."""
    slow = (_ConvNd, _DropoutNd, nn.RNNBase, nn.RReLU, nn.MultiheadAttention)
    return num_hosted >= FEWEST and not any(isinstance(m, slow) for m in model.modules())


class Vectorized:
    """A fleet's modules seen as one: parameter k of all workers is a view (n, ...) of the rows.

    Only the first module's Python code runs. What it keeps beside parameters and registered buffers, and hooks, would
    be the first worker's alone: such models are refused.

    ``compiled``: steps that all hosted workers take run as one program made by torch.compile for each loss function.
    ``if_faster``: what vmap would loop over itself, which torch warns of, is refused as ``IsSlower``.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        named: Sequence[Mapping[str, Parameter]],
        rows: Tensor,
        compiled: bool,
        if_faster: bool = False,
    ) -> None:
        self._modules, self._named, self._if_faster = modules, named, if_faster
        self._compiled: dict[int, tuple[LossFn, Program]] | None = {} if compiled else None
        first = named[0]
        parts = rows.split([p.numel() for p in first.values()], dim=1)
        self._parameters = {
            name: part.as_strided((len(rows), *p.shape), (rows.stride(0), *p.stride()), part.storage_offset())
            for (name, p), part in zip(first.items(), parts)
        }
        self._buffers = {name: self._stack(name) for name, _ in modules[0].named_buffers()}
        self._frozen = {name: self._stack(name) for name, _ in modules[0].named_parameters() if name not in first}
        self._parts = [list(module.modules()) for module in modules]
        self._proven = False
        """Has it run once, and left the first module's attributes alone?"""

    def backward(self, loss_fn: LossFn, x: Any, y: Any, places: Sequence[int]) -> Tensor:
        """Add the gradients of the workers at ``places`` to their parameters' ``.grad``; returns their losses."""
        everyone = len(places) == len(self._modules)
        chosen = slice(None) if everyone else list(places)
        xs, ys = (self._batch(batch, places) for batch in (x, y))
        self._check_alike()
        for stacks in (self._buffers, self._frozen):
            self._follow(stacks)
        parameters = {k: v[chosen] for k, v in self._parameters.items()}
        before = {k: v[chosen].clone() for k, v in self._buffers.items()}
        buffers = self._buffers if everyone else {k: v.clone() for k, v in before.items()}
        frozen = {k: v[chosen] for k, v in self._frozen.items()}

        program = self._program(loss_fn)
        run = program if self._compiled is None or not everyone else self._compile(loss_fn, program)
        attributes = None if self._proven else _Attributes(self._modules[0])
        try:
            with nullcontext() if self._proven or not self._if_faster else _refusing_loops():
                gradients, (losses, replaced) = run(parameters, {**buffers, **frozen}, xs, ys)
            if attributes is not None:
                attributes.check()
        except Exception as error:  # of any kind: whatever vmap has no rule for
            for name, value in before.items():
                self._buffers[name][chosen] = value
            if attributes is not None:
                attributes.restore()
            for place, x_i, y_i in zip(places, xs, ys):
                self._ordinary_gradients(loss_fn, x_i, y_i, place)  # shows the user's own mistakes as they are
            if run is not program:
                problem = _problem(program, parameters, {**before, **frozen}, xs, ys)
                if problem is None:
                    raise CannotCompile(_first_line(error)) from error
                error = problem
            if attributes is not None:
                attributes.restore()
            if self._if_faster and _LOOPS in str(error):
                raise IsSlower(_first_line(error)) from error
            raise CannotVectorize(_first_line(error)) from error
        self._proven = True
        for name, value in {**({} if everyone else buffers), **replaced}.items():
            self._buffers[name][chosen] = value.detach()
        self._set_gradients(gradients, self._unused(gradients, loss_fn, xs[0], ys[0], places[0]), places, (xs, ys))
        found: Tensor = losses.detach()
        return found

    def _set_gradients(
        self, gradients: Mapping[str, Tensor], unused: set[str], places: Sequence[int], batches: Sequence[Tensor]
    ) -> None:
        """Each worker's part becomes its ``.grad`` or is added to it.

        What is in-place for one must not touch another: two parameters can have one tensor as their gradient, and one
        that was only summed has a gradient with a single number behind it.
        """
        taken = {tensor.untyped_storage().data_ptr() for tensor in batches}
        for name, gradient in gradients.items():
            if name in unused:
                continue
            place = gradient.untyped_storage().data_ptr()
            if place in taken or any(size > 1 and not step for size, step in zip(gradient.shape, gradient.stride())):
                gradient = gradient.clone(memory_format=torch.contiguous_format)
            taken.add(place)
            for place, part in zip(places, gradient.unbind(0)):
                p = self._named[place][name]
                if not p.requires_grad:  # frozen since
                    continue
                if p.grad is None:
                    p.grad = part
                else:
                    p.grad += part

    def _program(self, loss_fn: LossFn) -> Program:
        model, names = self._modules[0], list(self._buffers)

        def loss(
            parameters: dict[str, Tensor], state: dict[str, Tensor], x: Any, y: Any
        ) -> tuple[Tensor, dict[str, Tensor]]:
            everything = {**parameters, **state}
            value = loss_fn(functional_call(model, everything, (x,)), y)
            # functional_call puts back what forward assigned: a buffer that is another tensor now was replaced.
            return value, {name: everything[name] for name in names if everything[name] is not state[name]}

        program: Program = vmap(grad_and_value(loss, has_aux=True))
        return program

    def _compile(self, loss_fn: LossFn, program: Program) -> Program:
        assert self._compiled is not None
        key = id(loss_fn)  # kept alive below; it need not be hashable
        if key not in self._compiled:
            if len(self._compiled) == MANY:
                warn(
                    f"compile=True: {MANY + 1} different loss functions, each compiled anew: pass the same object at "
                    "every step, not a new lambda",
                )
            apart = {"isolate_recompiles": True}  # newer torch: else all fleets of a process share one limit of 8
            known = "isolate_recompiles" in inspect.signature(torch.compile).parameters
            compiled = torch.compile(program, **(apart if known else {}))  # type: ignore[call-overload]
            self._compiled[key] = (loss_fn, compiled)
        return self._compiled[key][1]

    def _batch(self, batch: Any, places: Sequence[int]) -> Tensor:
        if isinstance(batch, Tensor):
            return batch if len(places) == len(batch) else batch[list(places)]
        entries = [batch[i] for i in places]
        if not all(isinstance(e, Tensor) and e.shape == entries[0].shape for e in entries):
            raise CannotVectorize("the workers' batches are not tensors of one shape")
        return torch.stack(entries)

    def _unused(self, gradients: Mapping[str, Tensor], loss_fn: LossFn, x: Tensor, y: Tensor, place: int) -> set[str]:
        """Parameters that the loss does not depend on: the loop leaves their ``.grad`` None, vmap makes it zero.

        A gradient that is zero throughout is rare otherwise, so only then one worker's ordinary pass decides.
        """
        suspects = {name for name, g in gradients.items() if not g[0].any() and not g.any()}
        if not suspects:
            return suspects
        ordinary = self._ordinary_gradients(loss_fn, x, y, place)
        return {name for name in suspects if ordinary[name] is None}

    def _ordinary_gradients(self, loss_fn: LossFn, x: Tensor, y: Tensor, place: int) -> dict[str, Tensor | None]:
        """Of the worker at ``place``, without vmap and without a trace."""
        model = self._modules[0]
        leaves = {k: v[place].detach().clone().requires_grad_() for k, v in self._parameters.items()}
        state = {k: v[place].clone() for k, v in {**self._buffers, **self._frozen}.items()}
        with torch.random.fork_rng(devices=[]):
            loss = loss_fn(functional_call(model, {**leaves, **state}, (x,)), y)
            found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        return dict(zip(leaves, found))

    def _check_alike(self) -> None:
        """One module's code can stand for all only if they are in the same modes and nobody listens."""
        first, *others = ([m.training for m in parts] for parts in self._parts)
        if any(flags != first for flags in others):
            raise CannotVectorize("some workers' modules are in training mode and others are not")
        if any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for parts in self._parts for m in parts):
            raise CannotVectorize("a module has hooks, which would see all workers as one")
        if any(p._backward_hooks for named in self._named for p in named.values()):
            raise CannotVectorize("a parameter has hooks, which would not be called")

    def _stack(self, name: str) -> Tensor:
        """All workers' tensors of a name in one, of which each module's own becomes a view."""
        owner, _, leaf = name.rpartition(".")
        modules = [module.get_submodule(owner) for module in self._modules]
        stacked = torch.stack([_held(m, leaf).detach() for m in modules])
        for m, part in zip(modules, stacked.unbind(0)):
            if leaf in m._buffers:
                m._buffers[leaf] = part
            else:
                _held(m, leaf).data = part
        return stacked

    def _follow(self, stacks: dict[str, Tensor]) -> None:
        """Take in tensors that were replaced from outside, as by ``module.running_mean = ...``."""
        for name, stacked in stacks.items():
            owner, _, leaf = name.rpartition(".")
            place, size = stacked.data_ptr(), _bytes(stacked[0])
            if any(
                _held(m.get_submodule(owner), leaf).data_ptr() != place + i * size for i, m in enumerate(self._modules)
            ):
                stacks[name] = self._stack(name)


class _Attributes:
    """What a model's modules hold beside parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._held = [(m, dict(vars(m)), dict(m._buffers)) for m in model.modules()]

    def check(self) -> None:
        """Raise if forward has changed any: in vmap it is the first worker's module alone that runs."""
        for module, held, buffers in self._held:
            now = vars(module)
            changed = [k for k in now if k not in held or now[k] is not held[k]]
            changed += [k for k, value in module._buffers.items() if value is not None and buffers.get(k) is None]
            if changed:
                raise CannotVectorize(
                    f"forward sets {type(module).__name__}.{changed[0]}, which is no registered tensor buffer, so "
                    "there would be one for all workers"
                )

    def restore(self) -> None:
        for module, held, buffers in self._held:
            for key in set(vars(module)) - set(held):
                del vars(module)[key]
            vars(module).update(held)
            for key, value in module._buffers.items():
                if value is not None and buffers.get(key) is None:
                    module._buffers[key] = None


def _held(module: nn.Module, leaf: str) -> Tensor:
    found = module._buffers.get(leaf)
    held = found if found is not None else module._parameters[leaf]
    assert held is not None
    return held


_LOOPS = "There is a performance drop because we have not yet implemented the batching rule"
"""What torch warns of, as of 2.13, where vmap goes through the workers one by one."""


@contextmanager
def _refusing_loops() -> Iterator[None]:
    """In here that warning is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=_LOOPS)
        yield


def _problem(
    program: Program, parameters: Any, state: Mapping[str, Tensor], xs: Tensor, ys: Tensor
) -> Exception | None:
    """What vmap alone says of it."""
    try:
        program(parameters, {k: v.clone() for k, v in state.items()}, xs, ys)
    except Exception as error:  # of any kind, as above
        return error
    return None


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else repr(error)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
