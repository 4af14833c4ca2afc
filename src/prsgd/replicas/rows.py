"""The hosted workers' parameters as flat rows.

A user's own model stays where it is: its tensors are copied into a row and back. A fleet's parameters already are
views of its rows. Either way only parameters that train travel.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter, is_lazy

from prsgd.replicas.names import plain, plainly

PARTS = 64
"""Of what is handled at a time, each with a sum of its own."""
CHUNK = 1 << 19
"""Numbers handled at a time: 2 MB of float32 stay in a core's cache between the passes over them."""


def is_shard(tensor: Tensor) -> bool:
    """Is it a DTensor, of which this process has a part?"""
    # Its module need not be imported to see that nothing is one, which takes more than a second.
    return type(tensor) is not Tensor and isinstance(
        tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    )


def local(tensor: Tensor) -> Tensor:
    """What of it lies in this process: of a DTensor its shard, of any other tensor all."""
    if not is_shard(tensor):
        return tensor
    with torch.no_grad():
        shard: Tensor = tensor.to_local().detach()  # type: ignore[attr-defined]  # of a DTensor
    return shard


def room(tensor: Tensor) -> int:
    """How many numbers the largest shard of it has: the first one, as shards are cut. Of any other tensor, all."""
    if not is_shard(tensor) or not tensor.numel():
        return tensor.numel()
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]  # of a DTensor
    length: int = tensor.shape[placements[0].dim]
    return tensor.numel() // length * -(-length // int(mesh.size()))


def trainable(model: nn.Module, *, may_be_sharded: bool = False) -> dict[str, Parameter]:
    """The parameters that travel, by name, or a ValueError that names the first that cannot."""
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            if is_shard(tensor) and not may_be_sharded:
                raise ValueError(
                    f"{kind} {plain(name)!r} is a shard (DTensor), and a Fleet's models are whole: give LocalSGD the "
                    "sharded model itself, in each of its processes"
                )
    found = plainly((name, p) for name, p in model.named_parameters() if p.requires_grad)
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
    """The hosted workers' parameters as rows of P numbers, read and written a cache-sized group at a time."""

    def __init__(self, workers: Sequence[Mapping[str, Parameter]], matrix: Tensor | None) -> None:
        self.workers = [dict(w) for w in workers]
        self.matrix = matrix  # a fleet's rows; None: tensors that are left where they are, as a user's own model's
        first = list(self.workers[0].values())
        self.width = sum(map(room, first))
        self.dtype, self.device = sum_dtype(first), first[0].device
        self._scratch: Tensor | None = None
        self._meta = [(p.shape, p.dtype, p.device) for p in first]
        self._usual: Tensor | None = None
        self._parts: list[Rows] = []
        if matrix is None:
            tensors = [self._tensors(i) for i in range(len(self.workers))]
            missing = self.width - sum(t.numel() for t in tensors[0])  # where the largest shard is another process's
            with torch.inference_mode(False):
                self._padding = torch.zeros(missing, dtype=self.dtype, device=self.device)
            self._pointers = [t.data_ptr() for t in tensors[0]]
            self._groups = list(map(self._grouped, tensors))
        else:
            self._groups = [_groups([row], self.dtype) for row in matrix]

    def lands_from(self, row: Tensor) -> None:
        """Averages mostly come down from ``row``: it is cut into the shapes of the parameters once."""
        self._usual = row
        for group in self._groups[0] if self.matrix is None else ():
            group.keep_views(group.of(row))

    def part(self, names: Sequence[str]) -> Rows:
        """The parameters of these names alone, which follow the whole; of a fleet, those that follow each other in the
        model lie in its rows, others are gathered."""
        workers = [{name: named[name] for name in names} for named in self.workers]
        sizes = {name: p.numel() for name, p in self.workers[0].items()}
        order = list(sizes)
        first = order.index(names[0])
        matrix = None
        if self.matrix is not None and order[first : first + len(names)] == list(names):
            start = sum(sizes[name] for name in order[:first])
            matrix = self.matrix[:, start : start + sum(sizes[name] for name in names)]
        self._parts.append(Rows(workers, matrix))
        return self._parts[-1]

    @property
    def parts(self) -> Sequence[Rows]:
        """The rows of each fragment, or of the whole where it travels at once."""
        return self._parts or [self]

    def refresh(self) -> None:
        """Follow a user's model whose tensors were replaced (``p.data = ...``) by others of the same kind."""
        if self.matrix is not None:
            return
        for part in self._parts:
            part.refresh()
        named, tensors = self.workers[0], self._tensors(0)
        if [t.data_ptr() for t in tensors] == self._pointers:
            return
        for (name, p), meta in zip(named.items(), self._meta):
            if (p.shape, p.dtype, p.device) != meta:
                was, now = (f"{list(s)} {d} on {v}" for s, d, v in (meta, (p.shape, p.dtype, p.device)))
                raise ValueError(f"parameter {name!r} was {was} when training started and is {now}")
        self._pointers = [t.data_ptr() for t in tensors]
        self._groups = [self._grouped(tensors)]
        if self._usual is not None:
            self.lands_from(self._usual)

    def _tensors(self, i: int) -> list[Tensor]:
        """Of worker i's model, what lies here."""
        return list(map(local, self.workers[i].values()))

    def _grouped(self, tensors: list[Tensor]) -> list[_Group]:
        return _groups([*tensors, self._padding] if self._padding.numel() else tensors, self.dtype)

    def forget_gradient(self, i: int) -> None:
        """As if worker i had not been trained in this step."""
        for p in self.workers[i].values():
            p.grad = None

    def pack(self, i: int, out: Tensor) -> Tensor:
        """out <- x_i; returns the sums of its parts."""
        sums = []
        for group in self._groups[i]:
            part = group.of(out)
            group.gather(part)
            sums.append(sums_of_parts(part))
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def add(self, i: int, delta: Tensor) -> None:
        """x_i <- x_i + delta"""
        for group in self._groups[i]:
            torch._foreach_add_(group.pieces, group.views(group.of(delta)))

    def equal(self, i: int, row: Tensor) -> bool:
        """Is x_i == row, to the last bit?"""
        for group in self._groups[i]:
            old = self._scratch_for(group)
            group.gather(old)
            if not torch.equal(old, group.of(row)):
                return False
        return True

    def digest(self, i: int) -> Tensor:
        """(32,) bytes that tell x_i from every other."""
        found = hashlib.sha256()
        for group in self._groups[i]:
            old = self._scratch_for(group)
            group.gather(old)
            found.update(old.cpu().numpy().data)
        return torch.frombuffer(bytearray(found.digest()), dtype=torch.uint8).to(self.device)

    def replace(self, i: int, row: Tensor) -> float:
        """x_i <- row; returns how far it moved, squared."""
        lengths = []
        for group in self._groups[i]:
            new = group.of(row)
            lengths.append(torch.linalg.vector_norm(group.subtract(new, out=self._scratch_for(group))))
            torch._foreach_copy_(group.pieces, group.views(new))
        return _squared(lengths)

    def _scratch_for(self, group: _Group) -> Tensor:
        size = group.stop - group.start
        if self._scratch is None or self._scratch.numel() < size:
            with torch.inference_mode(False):
                self._scratch = torch.empty(size, dtype=self.dtype, device=self.device)
        return self._scratch if self._scratch.numel() == size else self._scratch[:size]


def sums_of_parts(rows: Tensor) -> Tensor:
    """(..., P) -> (..., about PARTS): what the numbers of each part add up to, which is finite unless one of them is
    not (or the sum overflows). All of them together tell models apart where one sum would not.

    >>> sums_of_parts(torch.arange(5.0))
    tensor([0., 1., 2., 3., 4.])
    """
    size = rows.shape[-1]
    width = max(1, -(-size // PARTS))
    whole = size - size % width
    sums = rows[..., :whole].unflatten(-1, (whole // width, width)).sum(dim=-1)
    return sums if whole == size else torch.cat([sums, rows[..., whole:].sum(dim=-1, keepdim=True)], dim=-1)


def subtract_from(target: Tensor, row: Tensor) -> float:
    """row <- target - row; returns its squared length."""
    lengths = []
    for start in range(0, row.numel(), CHUNK):
        part = row[start : start + CHUNK]
        torch.sub(target[start : start + CHUNK], part, out=part)
        lengths.append(torch.linalg.vector_norm(part))
    return _squared(lengths)


def _squared(lengths: Sequence[Tensor]) -> float:
    """The squared length of a vector whose parts are so long. Nobody waits for a device before the last one."""
    if len(lengths) == 1:
        return (length := float(lengths[0])) * length
    return float(torch.stack(list(lengths)).double().square().sum())


class _Group:
    """Pieces of a worker's tensors that lie one after the other at [start, stop) of its row."""

    def __init__(self, pieces: list[Tensor], start: int, dtype: torch.dtype) -> None:
        self.pieces, self._sizes = pieces, [p.numel() for p in pieces]
        self.start, self.stop = start, start + sum(self._sizes)
        self._flat = all(p.dim() == 1 for p in pieces)
        self._one_dtype = all(p.dtype == dtype for p in pieces)
        self._kept: tuple[int, tuple[Tensor, ...]] = (0, ())

    def of(self, row: Tensor) -> Tensor:
        """Its part of a row."""
        return row if self.start == 0 and self.stop == row.numel() else row[self.start : self.stop]

    def gather(self, out: Tensor) -> None:
        """out <- the pieces"""
        if self._flat and self._one_dtype:
            torch.cat(self.pieces, out=out)  # one kernel, where a copy for each piece costs a microsecond a piece
        else:
            torch._foreach_copy_(self.views(out), self.pieces)

    def subtract(self, part: Tensor, out: Tensor) -> Tensor:
        """out <- the pieces - part"""
        if self._flat and self._one_dtype and len(self.pieces) == 1:
            return torch.sub(self.pieces[0], part, out=out)
        self.gather(out)
        return out.sub_(part)

    def keep_views(self, part: Tensor) -> None:
        """Have the views of this part at hand; a view for each of many small pieces takes as long as copying them."""
        self._kept = part.data_ptr(), self.views(part)

    def views(self, part: Tensor) -> tuple[Tensor, ...]:
        """A part of a row, seen as the pieces."""
        if part.data_ptr() == self._kept[0]:
            return self._kept[1]
        views: tuple[Tensor, ...] = torch.split_with_sizes(part, self._sizes)
        return views if self._flat else tuple(v.view(p.shape) for v, p in zip(views, self.pieces))


def _groups(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[_Group]:
    """The tensors in groups of about CHUNK numbers; large ones are cut."""
    pieces: list[Tensor] = []
    for t in tensors:
        t = t.detach()
        pieces += t.view(-1).split(CHUNK) if t.is_contiguous() else [t]  # a row has logical order
    groups: list[_Group] = []
    batch: list[Tensor] = []
    start = size = 0
    for piece in pieces:
        if batch and size + piece.numel() > CHUNK:
            groups.append(_Group(batch, start, dtype))
            batch, start, size = [], start + size, 0
        batch.append(piece)
        size += piece.numel()
    return [*groups, _Group(batch, start, dtype)]
