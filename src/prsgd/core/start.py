"""What happens when a run starts: the workers make sure that they fit together, and start from one model.

Everything travels as tensors: object collectives would unpickle what a peer sent, and a mismatch of sizes inside gloo
ends the process where nobody can catch it. So sizes are compared before anything whose size depends on them is sent.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from prsgd.comm.base import Communicator
from prsgd.errors import MismatchError
from prsgd.replicas.buffers import is_own
from prsgd.replicas.fleet import Fleet
from prsgd.replicas.rows import NOT_AVERAGED_YET, Rows, trainable


def hosted(model: nn.Module | Fleet, comm: Communicator) -> tuple[tuple[nn.Module, ...], Rows]:
    """The hosted workers' modules and their parameters as rows, or a ValueError."""
    for module in model.modules if isinstance(model, Fleet) else (model,):
        if isinstance(module, nn.Module):
            _check_wrappers(module, comm)
    if isinstance(model, Fleet):
        models = model.modules
        rows = Rows([model.named_parameters(w) for w in model.workers], model.rows)
    elif isinstance(model, nn.Module):
        models, rows = (model,), Rows([trainable(model)], None)
    else:
        raise ValueError(f"model must be an nn.Module or a Fleet, got a {type(model).__name__}")
    if len(comm.workers) != len(models):
        raise ValueError(
            f"comm hosts {len(comm.workers)} workers in this process, the model is {len(models)}; a Fleet hosts several"
        )
    return models, rows


def _check_wrappers(model: nn.Module, comm: Communicator) -> None:
    """Raise a ValueError if the model, or a part of it, is in a wrapper that does not go with local steps."""
    # A model can only be in that wrapper if its module was imported, which takes more than a second.
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    for name, module in model.named_modules():
        if isinstance(module, sharded):
            raise ValueError(
                f"model {f'has its {name!r}' if name else 'is'} in FullyShardedDataParallel, and {NOT_AVERAGED_YET}"
            )
        if isinstance(module, DistributedDataParallel) and comm.ranks:
            others = set(dist.get_process_group_ranks(module.process_group)) & set(comm.ranks) - {dist.get_rank()}
            if others:
                raise ValueError(
                    f"model must not {f'have its {name!r}' if name else 'be'} in DistributedDataParallel, which sends "
                    f"every step's gradients to other workers (ranks {sorted(others)}): pass the module without it, "
                    f"{'.'.join(filter(None, ('model', name, 'module')))}"
                )


def agree(comm: Communicator, entries: Sequence[str], device: torch.device) -> None:
    """Raise a MismatchError in every process, naming the first entry that differs, unless all have the same list."""
    # First that all count the same workers: what a process gathers depends on it.
    number = comm.num_workers
    numbers = torch.tensor([1, number, number**2], dtype=torch.int64, device=device)
    processes, total, squares = comm.all_reduce(numbers).wait().tolist()
    if processes * squares != total**2:
        raise MismatchError(f"num_workers must be the same in every process, it is {number} in that of {comm.workers}")
    text = "\n".join(entries).encode()
    digest = hashlib.sha256(text).digest()
    mine = torch.frombuffer(bytearray(digest + len(text).to_bytes(8, "big")), dtype=torch.uint8).to(device)
    all_of_them = comm.all_gather(mine.repeat(len(comm.workers), 1)).wait().cpu()
    if (all_of_them == all_of_them[0]).all():
        return
    sizes = [int.from_bytes(bytes(row[32:].tolist()), "big") for row in all_of_them]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = comm.all_gather(padded.to(device).repeat(len(comm.workers), 1)).wait().cpu()
    lists = [bytes(row[:size].tolist()).decode().split("\n") for row, size in zip(texts, sizes)]
    for worker, theirs in enumerate(lists):
        if theirs != lists[0]:
            raise MismatchError(_difference(worker, theirs, lists[0]))


def _difference(worker: int, theirs: list[str], first: list[str]) -> str:
    for there, here in zip(theirs, first):
        if there != here:
            return f"the workers' models must be alike: worker {worker} has {there}, worker 0 has {here}"
    longer, who, other = (theirs, worker, 0) if len(theirs) > len(first) else (first, 0, worker)
    extra = longer[min(len(theirs), len(first))]
    return f"the workers' models must be alike: worker {who} has {extra}, worker {other} has nothing in its place"


def start_from_worker_0(comm: Communicator, models: Sequence[nn.Module]) -> None:
    """Give every hosted worker the parameters and buffers of worker 0, to the last bit."""
    if comm.num_workers == 1:
        return
    flat = torch.cat([_bytes(t) for t in _state(models[0])])
    comm.broadcast(flat).wait()
    for model in models:
        place = 0
        for tensor in _state(model):
            size = tensor.numel() * tensor.element_size()
            tensor.copy_(flat[place : place + size].clone().view(tensor.dtype).view(tensor.shape))
            place += size


def describe(model: nn.Module, *, as_it_lies: bool) -> list[str]:
    """One line for each tensor of a model; ``as_it_lies``: with its layout in memory, as a fleet's rows travel."""
    lines = []
    for name, p in model.named_parameters():
        layout = f" strides {list(p.stride())}" if as_it_lies and not p.is_contiguous() else ""
        lines.append(f"parameter {name!r} {_shape(p)}{layout}{'' if p.requires_grad else ' frozen'}")
    return lines + [f"buffer {name!r} {_shape(b)}" for name, b in model.named_buffers()]


def _shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def unwrapped(optimizer: Any) -> Any:
    """The optimizer whose step is the step: of a proxy, such as accelerate's, the one that it holds and steps."""
    while not _takes_hooks(optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if isinstance(inner, Optimizer) and hasattr(optimizer, "zero_grad"):  # an lr scheduler holds one too
            optimizer = inner
        elif isinstance(optimizer, Optimizer):
            kind = type(optimizer).__name__
            raise ValueError(
                f"optimizer must be a torch.optim.Optimizer, {kind} has no hooks and no .optimizer with them"
            )
        else:
            break
    return optimizer


def _takes_hooks(optimizer: Any) -> bool:
    """Is it an optimizer of torch's own kind? A proxy may be one by class, but its constructor never ran."""
    if not isinstance(optimizer, Optimizer):
        return False
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:
        return False
    return True


def owners(optimizers: Sequence[Optimizer], rows: Rows) -> dict[Optimizer, list[int]]:
    """Which hosted workers' parameters each optimizer has, or a ValueError."""
    if not optimizers or not all(isinstance(o, Optimizer) for o in optimizers):
        raise ValueError(f"optimizer must be a torch.optim.Optimizer or a list of them, got {optimizers!r}")
    home = {id(p): i for i, named in enumerate(rows.workers) for p in named.values()}
    owned = {o: [p for group in o.param_groups for p in group["params"] if p.requires_grad] for o in optimizers}
    everything = {id(p) for ps in owned.values() for p in ps}
    for named in rows.workers:
        for name, p in named.items():
            if id(p) not in everything:
                raise ValueError(
                    f"optimizer must own the model's parameters, {name!r} is in none: make the optimizer from "
                    "model.parameters() (fleet.parameters()), or freeze the parameter with requires_grad_(False)"
                )
    for params in owned.values():
        if any(id(p) not in home for p in params):
            shape = next(list(p.shape) for p in params if id(p) not in home)
            raise ValueError(
                f"optimizer must own only the model's parameters, one of shape {shape} is not in the model and would "
                "never be averaged: put both into one module, or give that parameter an optimizer of its own"
            )
    return {o: sorted({home[id(p)] for p in params}) for o, params in owned.items()}


def _state(model: nn.Module) -> list[Tensor]:
    tensors = (t.detach() for t in [*model.parameters(), *model.buffers()])
    return [t for t in tensors if is_own(t)]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
