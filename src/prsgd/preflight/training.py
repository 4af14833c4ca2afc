"""What needs the user's own objects: is the model in a wrapper, do the workers get different data?"""

from __future__ import annotations

import copy
import gc
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from prsgd.comm.base import Communicator
from prsgd.core.local_sgd import LocalSGD, require_run
from prsgd.errors import PeerError
from prsgd.preflight.finding import Finding, table
from prsgd.preflight.job import Versions, compare, versions
from prsgd.replicas.fleet import Fleet
from prsgd.replicas.names import plain
from prsgd.saving.random_numbers import random_state, restore_random_state

BATCHES = 2
"""That are compared: of one small batch another worker may have the same by chance."""
_NONE = bytes(32)
"""In the place of a digest: the batches were not looked at."""
_FAILED = -2
"""In the place of an epoch's batches: the loader raised."""
_VERSION_BYTES = 32


def doctor(local: LocalSGD, loader: Iterable[Any] | None = None) -> list[Finding]:
    """Look at a run before it is trained, print a line for each thing that was looked at, and return these lines.

    All workers call it, before the loop; worker 0 prints. ``loader`` is what the loop goes through in an epoch: its
    first two batches are read, in this process, and compared with the other workers'. The model, random numbers and
    the order of the data stay as they are. Found are

    - the model in a ``DistributedDataParallel`` that sends gradients to the other workers at every step,
    - workers that begin with the same batches,
    - BatchNorm in a model that is sharded, or that waits for the other workers,
    - an lr scheduler where epochs differ in length by worker,
    - other versions of torch, prsgd and Python.

    >>> import torch, prsgd
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> local = prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(8))
    >>> lines = prsgd.doctor(local, torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=8))
    ok       model     no DistributedDataParallel, no BatchNorm that is in the way
    ok       batches   8 an epoch; there is one worker
    >>> [line.level for line in lines]
    ['ok', 'ok']
    """
    require_run(local)
    if isinstance(local.model, Fleet):
        raise ValueError("local must be of a model of your own: a Fleet's workers are in one process, and share no DDP")
    if local.comm.is_elastic:
        raise ValueError("local must have workers that start together, not TorchFT, whose workers come and go")
    try:
        digest, batches = (_NONE, -1) if loader is None else (_first_batches(loader), _length(loader))
    except Exception:
        _exchange(local, _NONE, _FAILED)  # for which the others wait
        raise
    told = _exchange(local, digest, batches)
    failed = [worker for worker, one in zip(local.comm.members, told) if one[1] == _FAILED]
    if failed:
        raise PeerError(f"worker {failed[0]} could not read its loader, and says there why")
    findings = [*_wrappers(local.model, local.comm), *_norms(local.model, local)]
    findings = findings or [Finding("ok", "model", "no DistributedDataParallel, no BatchNorm that is in the way")]
    if loader is not None:
        findings += _data(local, told)
    if local.comm.num_workers > 1:
        findings += compare([one[2] for one in told])
    if local.comm.workers.start == 0 and local.host.team.place == 0:
        print(table(findings), flush=True)
    return findings


_Told = tuple[bytes, int, Versions]
"""A worker's first batches as a digest, how many it has in an epoch (-1: not known), and its versions."""


def _exchange(local: LocalSGD, digest: bytes, batches: int) -> list[_Told]:
    """What each worker tells, as bytes: of a fixed number, since sizes that differ would end a process inside gloo."""
    ours = versions()
    texts = [text.encode()[:_VERSION_BYTES].ljust(_VERSION_BYTES) for text in (ours.prsgd, ours.torch, ours.python)]
    mine = torch.frombuffer(
        bytearray(b"".join([digest, batches.to_bytes(8, "big", signed=True), *texts])), dtype=torch.uint8
    )
    rows = local.comm.all_gather(mine[None].to(local.host.rows.device)).wait().cpu()
    return [_read(bytes(row.tolist())) for row in rows]


def _read(told: bytes) -> _Told:
    texts = [told[place : place + _VERSION_BYTES].decode().strip() for place in range(40, len(told), _VERSION_BYTES)]
    return told[:32], int.from_bytes(told[32:40], "big", signed=True), Versions(*texts)


def _wrappers(model: nn.Module, comm: Communicator) -> Iterator[Finding]:
    """A DistributedDataParallel around a model whose module was given to LocalSGD is known to the interpreter alone."""
    own = {id(p) for p in model.parameters()}
    gc.collect()  # one that was dropped refers to itself, and would be seen
    for wrapper in [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]:
        shares = any(id(p) in own for p in wrapper.parameters())
        if shares and wrapper.require_backward_grad_sync and _others(wrapper.process_group, comm):
            yield Finding(
                "warning", "model",
                "it is in a DistributedDataParallel too, which sends gradients to the other workers at every step",
                "call the module without it in your loop, or train, and call doctor, inside `with ddp.no_sync():`",
            )  # fmt: skip


def _norms(model: nn.Module, local: LocalSGD) -> Iterator[Finding]:
    """Of each kind one line, for the first layer that is in the way."""
    layers = [(plain(n), m) for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training]
    waiting = [n for n, m in layers if isinstance(m, nn.SyncBatchNorm) and _others(m.process_group, local.comm)]
    if waiting:
        yield Finding(
            "warning", "model", f"SyncBatchNorm {waiting[0]!r} waits for the other workers in every step",
            "use BatchNorm, whose statistics are averaged with the model, or SyncBatchNorm over a worker's processes",
        )  # fmt: skip
    others = [n for n, m in layers if not isinstance(m, nn.SyncBatchNorm)]
    if others and local.host.team.has_shards:
        yield Finding(
            "warning", "model",
            f"BatchNorm {others[0]!r} goes by each process's own batch, of which a worker with shards has "
            f"{local.host.team.size}",
            "use LayerNorm or GroupNorm, or on GPUs SyncBatchNorm over mesh['dp_shard'].get_group()",
        )  # fmt: skip


def _others(group: dist.ProcessGroup | None, comm: Communicator) -> set[int]:
    """The other workers' ranks that a wrapper's group reaches."""
    if not comm.ranks:
        return set()
    return set(dist.get_process_group_ranks(group or dist.group.WORLD)) & set(comm.ranks) - {dist.get_rank()}


def _data(local: LocalSGD, told: Sequence[_Told]) -> Iterator[Finding]:
    lengths = [batches for _, batches, _ in told]
    number = f"{min(lengths)} to {max(lengths)}" if len(set(lengths)) > 1 else str(lengths[0])
    number = "" if -1 in lengths else f"{number} an epoch; "
    digests = [digest for digest, _, _ in told]
    alike = [[w for w, other in zip(local.comm.members, digests) if other == digest] for digest in digests]
    largest = max(alike, key=len)
    if _NONE in digests:
        yield Finding("note", "batches", f"{number}not compared: the loader's class makes them its own way")
    elif len(largest) > 1:
        who = "all workers" if len(largest) == len(told) else f"workers {', '.join(map(str, largest))}"
        yield Finding(
            "warning", "batches", f"{who} begin with the same ones",
            "give each its own part: DataLoader(data, sampler=DistributedSampler(data), ...), or another seed",
        )  # fmt: skip
    else:
        alone = "there is one worker" if len(told) == 1 else "each worker begins with its own"
        yield Finding("ok", "batches", f"{number}{alone}")
    if len(set(lengths)) > 1 and any("initial_lr" in group for o in local.optimizers for group in o.param_groups):
        yield Finding(
            "note", "epochs",
            "they differ in length by worker: an lr scheduler that steps at their ends would do so in different rounds",
            "put `with local.epoch():` around an epoch's batches, and step the scheduler after it",
        )  # fmt: skip


def _length(loader: Any) -> int:
    try:
        return len(loader)
    except TypeError:  # of an IterableDataset, or a generator's
        return -1


def _first_batches(loader: Iterable[Any]) -> bytes:
    """A digest of them, or ``_NONE``; whatever draws random numbers draws the same ones afterwards."""
    if isinstance(loader, Iterator):
        raise ValueError("loader must be what a loop goes through, not an iterator, whose first batches would be lost")
    if isinstance(loader, str | bytes | Path) or not _can_be_gone_through(loader):
        raise ValueError(f"loader must be what a loop goes through, such as a DataLoader, got {type(loader).__name__}")
    if isinstance(loader, DataLoader):
        if type(loader).__iter__ is not DataLoader.__iter__:  # its batches may come from another process
            return _NONE
        loader = _twin(loader)
    before = random_state()
    try:
        batches = list(itertools.islice(loader, BATCHES))
    finally:
        restore_random_state(before)
    if not batches:
        raise ValueError("loader must have a batch, it is empty")
    digest = hashlib.sha256()
    for leaf in tree_leaves(batches):
        digest.update(_bytes(leaf))
    return digest.digest()


def _can_be_gone_through(loader: object) -> bool:
    """By ``for batch in loader``, which is not tried: it may start processes."""
    return isinstance(loader, Iterable) or hasattr(type(loader), "__getitem__")


def _twin(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader of the same batches that starts no processes, and whose samplers' random numbers are its own."""
    shared = {id(loader.dataset): loader.dataset}
    generator = copy.deepcopy(loader.generator, memo := dict(shared))
    settings: dict[str, Any] = {"collate_fn": loader.collate_fn, "generator": generator}
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        settings |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_sampler is not None:
        settings["batch_sampler"] = copy.deepcopy(loader.batch_sampler, memo)
    else:
        settings |= {"batch_size": None, "sampler": copy.deepcopy(loader.sampler, memo)}
    return DataLoader(loader.dataset, **settings)


def _bytes(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor):
        whole = leaf.detach().cpu().contiguous()
        return f"{whole.dtype}{list(whole.shape)}".encode() + whole.view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, np.ndarray):
        return leaf.tobytes()
    return repr(leaf).encode()
