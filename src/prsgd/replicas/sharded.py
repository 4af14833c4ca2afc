"""A model that is sharded within its worker by FSDP2 (``fully_shard``): this process has one shard of it.

What lies here of a parameter is the local tensor of a DTensor, empty or shorter in the last processes if its dimension
does not divide. A row has room for the largest shard in every process of a worker, so that all that travels has one
size and is added up in one order: what comes of its sums is the same to the last bit in all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from prsgd.comm.team import Several
from prsgd.replicas.host import Host
from prsgd.replicas.names import plain
from prsgd.replicas.rows import Rows, is_shard, trainable

REMEDY = "fully_shard(model, mesh=mesh['dp_shard']) of a mesh with the dimensions ('dp_replicate', 'dp_shard')"


class ShardedModel(Host):
    """The user's module, one shard of one worker: its tensors are left where they are."""

    lies_in_rows = False

    def __init__(self, model: nn.Module) -> None:
        self.modules = (model,)
        self._split = [module for module in model.modules() if isinstance(module, _fsdp_module())]
        self._put_away()
        named = trainable(model, may_be_sharded=True)
        self.team = Several(_group_of(model, named), has_shards=True)
        self.rows = Rows([named], None)

    @property
    def stopped(self) -> Set[int]:
        return frozenset()

    def takes_part(self, i: int) -> bool:
        return True

    def skip(self, i: int) -> None:
        self.rows.forget_gradient(i)

    def show_waiting(self, ids: Set[int]) -> None:
        """A lone worker waits inside its step, so there is nobody to show."""

    def check(self) -> None:
        self._put_away()
        self.rows.refresh()

    def hold(self, on_stop: Callable[[], None]) -> None:
        """Its data end when the run does."""

    def reopen(self) -> None:
        """Nothing was stopped."""

    def show_consensus(self, shown: bool) -> None:
        self._put_away()

    def release(self) -> None:
        """The run is over."""
        self.team.close()

    def _put_away(self) -> None:
        """After a forward pass without a backward one FSDP keeps some modules' whole parameters, and would compute with
        them again, whatever has been written to the shards."""
        for module in self._split:
            module.reshard()


def _fsdp_module() -> Any:
    """FSDP2's class. A model can only be of it if its module was imported, which takes more than a second."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())


def has_shards(model: nn.Module) -> bool:
    """Is any parameter, trained or frozen, a shard, or was before it was put together for a forward pass?"""
    return any(is_shard(p) for p in model.parameters()) or any(isinstance(m, _fsdp_module()) for m in model.modules())


def _group_of(model: nn.Module, named: dict[str, nn.Parameter]) -> dist.ProcessGroup:
    """The processes that have shards of the model, or a ValueError if it is not sharded as a worker's model can be."""
    first = next((name for name, p in named.items() if is_shard(p)), None)
    if first is None:
        raise ValueError(
            f"model must have a parameter that trains and is sharded, in {type(model).__name__} only frozen ones are: "
            "call fully_shard on the whole model too"
        )
    mesh: Any = named[first].device_mesh  # type: ignore[attr-defined]  # of a DTensor
    for name, p in named.items():
        if not is_shard(p):
            raise ValueError(
                f"parameters that train must all be sharded or all be whole: {first!r} is a shard (DTensor), {name!r} "
                "is not: call fully_shard on the whole model too, or freeze it with requires_grad_(False)"
            )
        other: Any = p
        if other.device_mesh != mesh:
            raise ValueError(
                f"parameters must be sharded over one mesh, {first!r} and {name!r} are over two: use {REMEDY} for both"
            )
        if mesh.ndim != 1 or not other.placements[0].is_shard():
            names = mesh.mesh_dim_names or tuple(range(mesh.ndim))
            raise ValueError(
                f"a worker's model must be sharded over one dimension of a mesh, parameter {name!r} lies as "
                f"{other.placements} on {mesh.ndim} ({', '.join(map(str, names))}): use {REMEDY}"
            )
    for name, buffer in model.named_buffers():
        if is_shard(buffer):
            raise ValueError(f"buffer {plain(name)!r} is a shard (DTensor): buffers must be whole in every process")
    group: dist.ProcessGroup = mesh.get_group()
    return group


def slice_of(like: Any, row: Tensor) -> Tensor:
    """``row``, the numbers of a parameter's shard here, as a DTensor that lies as the parameter does."""
    from torch.distributed.tensor import DTensor

    local = row.view(like.detach().to_local().shape)
    found: Tensor = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=torch.empty(
            like.shape, device="meta").stride()
    )  # fmt: skip
    return found
