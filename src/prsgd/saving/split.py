"""The state of a worker that is several processes: what is cut is kept so that other processes can cut it anew.

    worker-0/round-00000012/tensors-4f../   parameters, optimizer state and the averaging's rows, parameter by
                                            parameter, by torch.distributed.checkpoint
                            process-0.json, process-0.safetensors   everything else, as each process has it
                            manifest-0.json   SHA-256 of both; written last

As many processes go on to the last bit. For another number, or a model that is whole, the tensors are cut anew, and the
first of the new ones takes over what the old ones had logged.
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prsgd import files
from prsgd._warn import warn
from prsgd.core.local_sgd import LocalSGD
from prsgd.core.resuming import check_optimizers, damage_named, kinds
from prsgd.errors import CheckpointError
from prsgd.replicas.fleet import Fleet
from prsgd.replicas.names import bare, load_state, plain, plainly
from prsgd.replicas.rows import Rows, is_shard
from prsgd.replicas.rows import local as here
from prsgd.replicas.sharded import slice_of
from prsgd.saving.finding import KEEP, gathered, split_states
from prsgd.saving.parts import check_names, load_parts, state_of
from prsgd.saving.random_numbers import random_state, restore_random_state
from prsgd.saving.states import DamagedCheckpointError, Packed, States

Tensors = dict[str, Tensor]
"""By name: what torch.distributed.checkpoint keeps."""
CPU = torch.device("cpu")
CUT = "cut"
"""Stands in an optimizer's state where a tensor was that is cut as its parameter is."""


def newest(run: LocalSGD, folder: Path) -> int:
    """The round of the newest state of all workers in ``folder``, as workers that were several processes; -1: there is
    none, -2: not even a part of one. A collective of all processes."""
    _, whole = _all_have(run, folder)
    there = json.dumps(bool(split_states(folder))).encode()
    anywhere = any(gathered(json.dumps(any(gathered(there, run.host.team.comm, CPU))).encode(), run.comm, _device(run)))
    return max((state[0] for state in whole), default=-1 if anywhere else -2)


def save(
    run: LocalSGD, optimizers: Sequence[Optimizer], parts: Mapping[str, Any], folder: Path, name: str
) -> Exception | None:
    """Write this process's part of the state; returns what went wrong."""
    from torch.distributed import checkpoint

    team, number = run.host.team, run.launched
    tree, tensors = _taken_apart(run, optimizers)
    tree["parts"] = {key: state_of(part) for key, part in parts.items()}
    states = _states(folder, run.comm.workers.start, team.place)
    place = _place(folder, run.comm.workers.start, number)
    try:
        writer = checkpoint.filesystem.FileSystemWriter(place / f"tensors-{name}")
        checkpoint.state_dict_saver.save(tensors, storage_writer=writer, process_group=team.group)
        said = {"run": name, "num_workers": run.comm.num_workers, "processes": team.size}
        states.write(number, Packed.of(tree), **said)
    except Exception as error:
        return error
    return None


def tidy(run: LocalSGD, folder: Path) -> None:
    """All have written: remove the tensors of states that are no more."""
    if run.host.team.place:
        return
    for place in folder.glob(f"worker-{run.comm.workers.start}/round-*"):
        try:
            name = json.loads((place / "manifest-0.json").read_bytes())["run"]
        except (OSError, ValueError, KeyError):
            shutil.rmtree(place, ignore_errors=True)
            continue
        for tensors in place.glob("tensors-*"):
            if tensors.name != f"tensors-{name}":
                shutil.rmtree(tensors, ignore_errors=True)


def load(run: LocalSGD, optimizers: Sequence[Optimizer], parts: Mapping[str, Any], folder: Path) -> None:
    """Go on from the newest state that all workers have."""
    if isinstance(run.model, Fleet):
        raise CheckpointError(
            f"the states in {folder} are of workers that were several processes, and a Fleet cannot go on from them: "
            f"go on with workers that are processes, or load {files.MODEL} into the model and begin anew"
        )
    from torch.distributed import checkpoint

    team, worker = run.host.team, run.comm.workers.start
    number, name, processes = _newest(run, folder)
    same = processes == team.size
    trees = [_states(folder, worker, p).load(number) for p in ([team.place] if same else range(processes))]
    tree = trees[0] if same else _merged(trees, folder, first=team.place == 0, size=team.size)
    tensors = _wanted(run, optimizers, tree, folder)
    check_names(tree["parts"], parts, folder)
    reader = checkpoint.filesystem.FileSystemReader(_place(folder, worker, number) / f"tensors-{name}")
    try:
        alone = team.group is None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is, where one process reads alone
            checkpoint.state_dict_loader.load(tensors, storage_reader=reader, process_group=team.group, no_dist=alone)
    except Exception as error:  # whatever it is: the tree has told that all of them are there
        line = " ".join(str(error).split())[:200]
        raise CheckpointError(f"the tensors of round {number} in {folder} cannot be read: {line}") from None
    if not same:
        tree["local"]["setup"]["num_parameters"] = run.host.rows.width
    _put_together(run, optimizers, tree, tensors, folder)
    load_parts(tree["parts"], parts, folder)
    if same:
        restore_random_state(tree["random"])
    elif worker == 0 and team.place == 0:
        warn(
            f"workers that were {processes} processes are {team.size} now: after round {number} the run goes on with "
            "the same models, and with other random numbers",
            RuntimeWarning,
        )


def whole_tensors(model: nn.Module) -> Tensors:
    """The model's state_dict on the CPU, put together from its shards: all of the worker's processes take part."""
    found = {}
    for name, tensor in state_of(bare(model)).items():
        if isinstance(tensor, Tensor):
            full: Any = tensor
            full = full.full_tensor() if is_shard(tensor) else tensor
            found[name] = full.detach().to("cpu", copy=True).contiguous()
    return found


def _taken_apart(run: LocalSGD, optimizers: Sequence[Optimizer]) -> tuple[dict[str, Any], Tensors]:
    """What each process keeps by itself, and what is cut."""
    model, state = bare(run.host.modules[0]), run.state_dict()
    named = plainly(model.named_parameters())
    aliases = {plain(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors: Tensors = {f"model/{name}": p.detach() for name, p in named.items()}
    rows = []
    for path, container in _rows(state, run.host.rows):
        rows.append([list(path), container[path[-1]].dim()])
        tensors |= _cut(run, path, container[path[-1]])
        container[path[-1]] = None
    saved = []
    for o, optimizer in enumerate(optimizers):
        kept = optimizer.state_dict()
        own = {index: dict(values) for index, values in kept["state"].items()}
        for index, key, name in _like_parameters(optimizer, own, named):
            tensors[f"optimizer {o}/{key}/{name}"] = own[index][key]
            own[index][key] = CUT
        saved.append({**kept, "state": own})
    return {
        "model": _kinds(named),
        "others": {name: value for name, value in state_of(model).items() if name not in aliases},
        "optimizers": saved,
        "local": state,
        "rows": rows,
        "random": random_state(),
        "has_shards": run.host.team.has_shards,
    }, tensors


def _wanted(run: LocalSGD, optimizers: Sequence[Optimizer], tree: Any, folder: Path) -> Tensors:
    """Room for all that is to be read, as it is cut here; a CheckpointError if it is of another model."""
    named = plainly(bare(run.host.modules[0]).named_parameters())
    theirs, ours = tree["model"], _kinds(named)
    for name in [*ours, *theirs]:
        if theirs.get(name) != ours.get(name):
            raise CheckpointError(
                f"the states in {folder} are of another model: parameter {name!r} is {theirs.get(name, 'not there')}, "
                f"in this run it is {ours.get(name, 'not there')}"
            )
    with damage_named():
        check_optimizers(tree["local"]["setup"], kinds(optimizers))
    tensors: Tensors = {f"model/{name}": torch.zeros_like(p.detach()) for name, p in named.items()}
    for path, _ in tree["rows"]:
        tensors |= _cut(run, path, _room(_part(run.host.rows, path)))
    names = {id(p): name for name, p in named.items()}
    for o, (optimizer, saved) in enumerate(zip(optimizers, tree["optimizers"])):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if len(params) != sum(len(group["params"]) for group in saved["param_groups"]):
            raise CheckpointError(f"the states in {folder} are of another optimizer: it has other parameters")
        for index, values in saved["state"].items():
            for key, value in values.items():
                if isinstance(value, str) and value == CUT:
                    tensors[f"optimizer {o}/{key}/{names[id(params[int(index)])]}"] = torch.zeros_like(
                        params[int(index)].detach()
                    )
    return tensors


def _put_together(run: LocalSGD, optimizers: Sequence[Optimizer], tree: Any, tensors: Tensors, folder: Path) -> None:
    """Give everybody what was read."""
    model, state = bare(run.host.modules[0]), tree["local"]
    named = plainly(model.named_parameters())
    names = {id(p): name for name, p in named.items()}
    for path, dim in tree["rows"]:
        rows, start = _part(run.host.rows, path), 0
        row = _room(rows)
        for p in rows.workers[0].values():
            piece = here(tensors[f"{'/'.join(map(str, path))}/{names[id(p)]}"])
            row[start : start + piece.numel()] = piece.flatten()
            start += piece.numel()
        container = state
        for key in path[:-1]:
            container = container[key]
        container[path[-1]] = row if dim == 1 else row.unsqueeze(0)
    run.load_state_dict(state)  # which refuses what does not fit before anything has changed
    for name, p in named.items():
        here(p.detach()).copy_(here(tensors[f"model/{name}"]))
    load_state(model, tree["others"], strict=False)
    for o, (optimizer, saved) in enumerate(zip(optimizers, tree["optimizers"])):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for index, values in saved["state"].items():
            for key, value in values.items():
                if isinstance(value, str) and value == CUT:
                    values[key] = tensors[f"optimizer {o}/{key}/{names[id(params[int(index)])]}"]
        load_parts({f"optimizer{o or ''}": saved}, {f"optimizer{o or ''}": optimizer}, folder)


def _newest(run: LocalSGD, folder: Path) -> tuple[int, str, int]:
    """Round, name and number of processes of the newest state that is whole for all workers, as all of them see it."""
    seen, whole = _all_have(run, folder)
    for _, _, _, num_workers in seen:
        if num_workers != run.comm.num_workers:
            raise CheckpointError(
                f"the states in {folder} are of {num_workers} workers that were several processes, and as many must go "
                f"on: this run has {run.comm.num_workers}"
            )
    if not whole:
        raise CheckpointError(f"{folder} holds no whole state of all {run.comm.num_workers} workers")
    number, name, processes, _ = max(whole)
    return number, name, processes


def _all_have(run: LocalSGD, folder: Path) -> tuple[list[Any], list[Any]]:
    """The states that are whole for some worker, and those that are for all: round, name, processes and workers."""
    worker = run.comm.workers.start
    mine = []
    for place in split_states(folder):
        number = int(place.name.removeprefix("round-"))
        if place.parent.name != f"worker-{worker}" or not (place / "manifest-0.json").exists():
            continue
        try:
            manifest = _states(folder, worker, 0).check(number)
            others = [_states(folder, worker, p).check(number) for p in range(1, int(manifest["processes"]))]
        except DamagedCheckpointError as error:
            warn(f"{error}; it is passed over", RuntimeWarning)
            continue
        if all(other["run"] == manifest["run"] for other in others):
            mine.append([number, manifest["run"], manifest["processes"], manifest["num_workers"]])
    said = gathered(json.dumps(mine).encode(), run.host.team.comm, CPU)
    known = [state for state in mine if all(state in one for one in said)]
    said = gathered(json.dumps(known).encode(), run.comm, _device(run))
    return [state for one in said for state in one], [state for state in known if all(state in one for one in said)]


def _device(run: LocalSGD) -> torch.device:
    return run.host.rows.device


def _merged(trees: Sequence[Any], folder: Path, *, first: bool, size: int) -> Any:
    """One process's tree from those of all that were: what they had logged is the ``first`` one's."""
    tree, others = trees[0], trees[1:]
    parts = others if tree["has_shards"] else []
    for n, lane in enumerate(tree["local"]["lanes"]):
        if lane["flight"] is not None or "snapshots" in lane["memory"]:
            raise CheckpointError(
                f"the state in {folder} was saved while an average was under way, from which only as many processes "
                "can go on: save where local.launched == local.round"
            )
        _add(lane["books"], [other["local"]["lanes"][n]["books"] for other in parts], ("drift",), first)
        _add(lane["books"], [other["local"]["lanes"][n]["books"] for other in others], ("samples",), first)
        pages = zip(*(other["local"]["lanes"][n]["books"]["pages"] for other in others))
        for page, theirs in zip(lane["books"]["pages"], pages):
            _add(page, theirs, ("samples",), first)
            for tally in ("last", "now"):
                _add_losses(page[tally], [other[tally] for other in theirs], size if first else 0)
        accounts = zip(*(other["local"]["lanes"][n]["accounts"] for other in others))
        for account, theirs in zip(lane["accounts"], accounts):
            _add(account, theirs, ("snapped_samples", "seen_samples"), first)
    noise = tree["local"]["noise"]
    if noise is not None:
        each = [other["local"]["noise"]["found"][0] for other in parts]
        alike = all(len(one) == len(noise["found"][0]) for one in each)
        sums = [math.fsum(values) if first else 0.0 for values in zip(noise["found"][0], *each)]
        noise["found"] = [sums if alike else []]
    return tree


def _add(own: Any, others: Sequence[Any], keys: Sequence[str], first: bool) -> None:
    for key in keys:
        own[key] = sum((other[key] for other in others), own[key]) if first else type(own[key])(0)


def _add_losses(own: Any, others: Sequence[Any], size: int) -> None:
    """``size`` processes log from now on; if all had logged alike, it is as if so many had."""
    each = [own["losses"], *(other["losses"] for other in others)]
    _add(own, others, ("loss", "losses", "samples"), size > 0)
    if size and len(set(each)) == 1:
        own["loss"], own["losses"] = own["loss"] * size / len(each), each[0] * size


def _rows(state: Any, rows: Rows) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The way to each row of the averagings' memories and of the gradients that are kept, and what it lies in."""
    for n, lane in enumerate(state["lanes"]):
        width = rows.parts[n].width
        for key, value in lane["averaging"].items():
            if isinstance(value, Tensor) and value.dim() in (1, 2) and value.numel() == value.shape[-1] == width:
                yield ("lanes", n, "averaging", key), lane["averaging"]
    before = [] if state["noise"] is None else state["noise"]["before"]
    for i, row in enumerate(before):
        if row is not None:
            yield ("noise", "before", i), before


def _part(rows: Rows, path: Sequence[Any]) -> Rows:
    """Of what a row on this way is: a lane's fragment, or the whole."""
    return rows.parts[int(path[1])] if path[0] == "lanes" else rows


def _room(rows: Rows) -> Tensor:
    return torch.zeros(rows.width, dtype=rows.dtype, device=rows.device)


def _cut(run: LocalSGD, path: Sequence[Any], row: Tensor) -> Tensors:
    """A row as tensors that lie as the parameters do."""
    label = "/".join(map(str, path))
    names = {id(p): name for name, p in plainly(bare(run.host.modules[0]).named_parameters()).items()}
    tensors, start, flat = {}, 0, row.view(-1)
    for p in _part(run.host.rows, path).workers[0].values():
        shape = here(p).shape
        piece = flat[start : start + shape.numel()].view(shape)
        tensors[f"{label}/{names[id(p)]}"] = slice_of(p, piece) if is_shard(p) else piece
        start += shape.numel()
    return tensors


def _like_parameters(
    optimizer: Optimizer, state: Mapping[Any, Any], named: Mapping[str, nn.Parameter]
) -> Iterator[tuple[Any, str, str]]:
    """What an optimizer keeps of a parameter's shape: momentum and the like."""
    names = {id(p): name for name, p in named.items()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in state.items():
        p = params[index]
        for key, value in list(values.items()):
            if isinstance(value, Tensor) and value.shape == p.shape and p.dim() and value.dtype == p.dtype:
                yield index, key, names[id(p)]


def _kinds(named: Mapping[str, nn.Parameter]) -> dict[str, str]:
    return {name: f"{list(p.shape)} {str(p.dtype).removeprefix('torch.')}" for name, p in named.items()}


def _states(folder: Path, worker: int, process: int) -> States:
    return States(
        folder / f"worker-{worker}",
        numbered="round",
        owner=("process", process),
        remedy="begin anew in another folder",
        keep=KEEP,
    )


def _place(folder: Path, worker: int, number: int) -> Path:
    return folder / f"worker-{worker}" / f"round-{number:08d}"
