"""What happens when a run starts: the workers make sure that they fit together, and start from one model.

Everything travels as tensors: object collectives would unpickle what a peer sent, and a mismatch of sizes inside gloo
ends the process where nobody can catch it. So sizes are compared before anything whose size depends on them is sent.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from prsgd.comm.base import Communicator
from prsgd.comm.team import Lone, Several, Team
from prsgd.core.lanes import Lanes
from prsgd.errors import MismatchError
from prsgd.replicas.buffers import is_own
from prsgd.replicas.fleet import Fleet
from prsgd.replicas.host import Host, OwnModel, WholeFleet
from prsgd.replicas.names import COMPILED, plain, plainly
from prsgd.replicas.rows import is_shard, local
from prsgd.replicas.sharded import REMEDY, ShardedModel, has_shards


def host_of(model: nn.Module | Fleet, comm: Communicator) -> Host:
    """What this process hosts, or a ValueError."""
    for module in model.modules if isinstance(model, Fleet) else (model,):
        if isinstance(module, nn.Module):
            _check_wrappers(module, comm)
    if not isinstance(model, Fleet | nn.Module):
        raise ValueError(f"model must be an nn.Module or a Fleet, got a {type(model).__name__}")
    host = _host(model)
    _check_team(host.team, comm)
    if len(comm.workers) != len(host.modules):
        raise ValueError(
            f"comm hosts {len(comm.workers)} workers in this process, the model is {len(host.modules)}; a Fleet hosts "
            "several"
        )
    return host


def _host(model: nn.Module | Fleet) -> Host:
    if isinstance(model, Fleet):
        return WholeFleet(model)
    return ShardedModel(model) if has_shards(model) else OwnModel(model, _team_of(model))


def _team_of(model: nn.Module) -> Team:
    """Of a model that is whole here: the processes among which DistributedDataParallel shares its gradients."""
    groups = {
        tuple(dist.get_process_group_ranks(module.process_group)): module.process_group
        for module in model.modules()
        if isinstance(module, DistributedDataParallel)
    }
    several = [group for ranks, group in groups.items() if len(ranks) > 1]
    if len(several) > 1:
        listed = ", ".join(str(list(ranks)) for ranks in groups)
        raise ValueError(f"parts of model in DistributedDataParallel must share one process group, they have {listed}")
    return Several(several[0], has_shards=False) if several else Lone()


def _check_team(team: Team, comm: Communicator) -> None:
    """Raise a ValueError if a worker's processes are among those that communicate as workers."""
    if team.size == 1:
        return
    if comm.is_elastic:
        raise ValueError(
            f"with comm=TorchFT() each worker must be one process, and {team.size} are one here: use TorchDistributed"
        )
    own = set(team.comm.ranks)
    if set(comm.ranks) & own - {dist.get_rank()}:
        raise ValueError(
            f"comm must be over one process of each worker, its ranks {list(comm.ranks)} are more, since {sorted(own)} "
            "are one worker together: use comm=prsgd.TorchDistributed(mesh['dp_replicate'].get_group()), or "
            "comm=prsgd.InProcess() for one worker alone"
        )


def _check_wrappers(model: nn.Module, comm: Communicator) -> None:
    """Raise a ValueError if the model, or a part of it, is in a wrapper that does not go with local steps."""
    refuse_flat(model)
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel) and comm.ranks:
            others = set(dist.get_process_group_ranks(module.process_group)) & set(comm.ranks) - {dist.get_rank()}
            if others:
                short = plain(name)
                remedy = f"pass the module without it, {'.'.join(filter(None, ('model', name, 'module')))}"
                raise ValueError(
                    f"model must not {f'have its {short!r}' if short else 'be'} in DistributedDataParallel, which "
                    f"sends every step's gradients to other workers (ranks {sorted(others)}): "
                    f"{'compile the module without it, and pass that' if COMPILED in name.split('.') else remedy}"
                )


def refuse_flat(model: nn.Module) -> None:
    """Raise a ValueError if the model, or a part of it, is in FSDP1."""
    # A model can only be in that wrapper if its module was imported, which takes more than a second.
    flat = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    name = next((plain(name) for name, module in model.named_modules() if isinstance(module, flat)), None)
    if name is not None:
        raise ValueError(
            f"model {f'has its {name!r}' if name else 'is'} in FullyShardedDataParallel, whose flat parameters "
            f"cannot be averaged: use FSDP2, {REMEDY}"
        )


def alike(host: Host, lanes: Lanes, words: Sequence[str]) -> list[str]:
    """What must be the same on all workers, line by line; ``words``: what else must be."""
    return [*describe(host), *words, *(line for lane in lanes for line in lane.snapshots.describe())]


def enter(comm: Communicator, host: Host, lanes: Lanes, entries: Sequence[str], *, fresh: bool) -> None:
    """See that all workers fit together, and that those of a ``fresh`` run begin alike (Alg. 1 line 1: x_i^0 = y-bar).

    ``entries`` must be alike.
    """
    agree(host.team.comm, [*entries, f"worker {comm.workers.start}"], torch.device("cpu"), who="process")
    agree(comm, [*entries, *_place_in(host.team)], host.rows.device)
    if fresh:
        start_from_worker_0(comm, host.modules)
        for lane in lanes:
            lane.begin()


def _place_in(team: Team) -> list[str]:
    """What is alike in those processes that average with each other, and not in those that are a worker together."""
    return [] if team.size == 1 else [f"process {team.place} of {team.size} of each worker"]


def agree(comm: Communicator, entries: Sequence[str], device: torch.device, who: str = "worker") -> None:
    """Raise a MismatchError in every process, naming the first entry that differs, unless all have the same list;
    ``who`` is what communicates."""
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
    for worker, theirs in zip(comm.members, lists):
        if theirs != lists[0]:
            raise MismatchError(difference(f"{who} {worker}", theirs, f"{who} {comm.members[0]}", lists[0]))


def difference(who: str, theirs: list[str], other: str, first: list[str]) -> str:
    """The first of the lines that are not alike, and whose they are."""
    for there, here in zip(theirs, first):
        if there != here:
            return f"the workers' models must be alike: {who} has {there}, {other} has {here}"
    longer, more, less = (theirs, who, other) if len(theirs) > len(first) else (first, other, who)
    extra = longer[min(len(theirs), len(first))]
    return f"the workers' models must be alike: {more} has {extra}, {less} has nothing in its place"


def start_from_worker_0(comm: Communicator, models: Sequence[nn.Module]) -> None:
    """Give every hosted worker the parameters and buffers of worker 0, to the last bit."""
    if comm.num_workers == 1:
        return
    flat = model_bytes(models[0])
    comm.broadcast(flat, comm.members[0]).wait()
    write_model_bytes(models, flat)


def model_bytes(model: nn.Module) -> Tensor:
    """A copy of its parameters and buffers."""
    return torch.cat([_bytes(t) for t in _state(model)])


def write_model_bytes(models: Sequence[nn.Module], flat: Tensor) -> None:
    """Give all of them the parameters and buffers of another."""
    for model in models:
        place = 0
        for tensor in _state(model):
            size = tensor.numel() * tensor.element_size()
            tensor.copy_(flat[place : place + size].clone().view(tensor.dtype).view(tensor.shape))
            place += size


def describe(host: Host) -> list[str]:
    """One line for each tensor of a hosted model; with its layout in memory where rows travel as they lie."""
    lines, model = [], host.modules[0]
    for name, p in plainly(model.named_parameters()).items():
        layout = f" strides {list(p.stride())}" if host.lies_in_rows and not p.is_contiguous() else ""
        split = f" {p.placements}" if is_shard(p) else ""  # type: ignore[attr-defined]  # of a DTensor
        lines.append(f"parameter {name!r} {_shape(p)}{layout}{split}{'' if p.requires_grad else ' frozen'}")
    return lines + [f"buffer {name!r} {_shape(b)}" for name, b in plainly(model.named_buffers()).items()]


def _shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _state(model: nn.Module) -> list[Tensor]:
    tensors = (local(t).detach() for t in [*model.parameters(), *model.buffers()])
    return [t for t in tensors if is_own(t)]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
