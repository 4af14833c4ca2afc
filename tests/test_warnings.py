"""A warning points at the user's own line, from however deep below it comes: here that is a line of this file."""

from __future__ import annotations

import _thread
import ast
import linecache
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import prsgd
from prsgd._warn import warn
from prsgd.saving.states import States
from tests.problems import Point

SOURCE = Path(prsgd.__file__).parent


def run(module: nn.Module, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, prsgd.LocalSGD]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return module, optimizer, prsgd.LocalSGD(module, optimizer, **{"schedule": prsgd.every(2), **options})


def two_points() -> prsgd.Fleet:
    return prsgd.Fleet(Point(1.0), 2, mode="loop")


def a_step(folder: Path) -> None:
    """A hook of the optimizer's."""
    fleet = two_points()
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(1)):
        with torch.no_grad():
            fleet.modules[0].x.fill_(math.nan)
        for module in fleet.modules:
            module(1.0).backward()
        optimizer.step()  # here


def an_end(folder: Path) -> None:
    """The end of a `with` block, at which Pythons of other versions point with its first or its last line."""
    fleet = two_points()
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.once()):  # here
        fleet.modules[0](1.0).backward()
        optimizer.step()
        fleet.modules[0].x.data.fill_(math.nan)  # here


def a_finish(folder: Path) -> None:
    fleet = two_points()
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    local = prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.once()).start()
    fleet.modules[0](1.0).backward()
    optimizer.step()
    fleet.modules[0].x.data.fill_(math.nan)
    local.finish()  # here


def an_epoch(folder: Path) -> None:
    """Goes through contextlib."""
    fleet = two_points()
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.once()) as local, local.epoch():  # here
        fleet.modules[0](1.0).backward()
        optimizer.step()
        fleet.modules[0].x.data.fill_(math.nan)  # here


def a_listener(folder: Path) -> None:
    """Told of the first record when the second average is complete."""
    model, optimizer, local = run(Point(1.0))
    prsgd.watch(local, to=complain)
    with local:
        for _ in range(4):
            model(1.0).backward()
            optimizer.step()  # here


def complain(numbers: Any, step: int) -> None:
    raise ValueError("the disk is full")


def a_schedule(folder: Path) -> None:
    """Asked in the middle of a step."""
    seconds = iter(range(1000))
    model, optimizer, local = run(Point(1.0), schedule=prsgd.timed(0.5), clock=lambda _: float(next(seconds)))
    with local:
        for _ in range(4):
            model(1.0).backward()
            optimizer.step()  # here


def noise(folder: Path) -> None:
    net = Point(1.0)
    optimizer = torch.optim.Rprop(net.parameters())
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.auto()):
        for _ in range(18):
            net(1.0).backward()
            optimizer.step()  # here


def a_loaded_state(folder: Path) -> None:
    with run(Point())[2] as local:
        state = local.state_dict()
    run(Point(), schedule=prsgd.every(3))[2].load_state_dict(state)  # here


def a_saved_one(folder: Path) -> None:
    model, optimizer, local = run(Point())
    with local:
        prsgd.save(local, model, optimizer, folder)
        model(1.0).backward()
        optimizer.step()
        model(1.0).backward()
        optimizer.step()
        prsgd.save(local, model, optimizer, folder)
    next(folder.glob("round-*1/*0.json")).write_bytes(b"")
    model, optimizer, local = run(Point())
    prsgd.load(local, model, optimizer, folder)  # here


def states(folder: Path) -> None:
    kept = States(folder, numbered="step", owner=("rank", 0), remedy="begin anew")
    for number in (1, 2):
        kept.save(number, {"x": 1.0})
    (folder / "step-00000002" / "rank-0.json").write_bytes(b"")
    kept.whole()  # here


def a_fleet(folder: Path) -> None:
    def items(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return output.square().sum() * (1.0 if float(output.detach().sum()) > -1e9 else 0.0)

    fleet = prsgd.Fleet(nn.Linear(2, 1), 8)
    fleet.backward(items, torch.ones(8, 3, 2), torch.ones(8, 3, 1))  # here


CASES: dict[str, Callable[[Path], None]] = {
    f.__name__: f
    for f in (
        a_step, an_end, a_finish, an_epoch, a_listener, a_schedule, noise, a_loaded_state, a_saved_one, states, a_fleet,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_warning_points_at_the_users_line(name: str, tmp_path: Path) -> None:
    with pytest.warns((UserWarning, RuntimeWarning)) as caught:
        CASES[name](tmp_path)
    for warning in caught:
        line = linecache.getline(warning.filename, warning.lineno).strip()
        assert (warning.filename, line.partition("# ")[2]) == (__file__, "here"), f"{warning.message}: {line}"


def thread_of_ours() -> None:
    """A thread that has no frame but of prsgd."""
    over = threading.Event()
    names: dict[str, Any] = {"__name__": "prsgd.cli", "warn": warn, "over": over}
    code = "def outer():\n    inner()\n    over.set()\ndef inner():\n    warn('!')\n"
    exec(compile(code, "<ours>", "exec"), names)
    _thread.start_new_thread(names["outer"], ())
    assert over.wait(20)


def test_where_there_is_no_users_line_it_is_the_outermost() -> None:
    with pytest.warns(UserWarning, match="!") as caught:
        thread_of_ours()
    assert [(warning.filename, warning.lineno) for warning in caught] == [("<ours>", 2)]


def test_all_warnings_go_that_way() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        warners = [
            call.lineno for call in calls if ast.unparse(call.func) in ("warnings.warn", "warnings.warn_explicit")
        ]
        assert not warners or path == SOURCE / "_warn.py", f"{path}: {warners}: use prsgd._warn.warn"
