"""A lane as plain numbers and tensors, and back: timetables, what the averaging remembers, an average in flight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from prsgd.averaging.base import Header, Landing, Sums
from prsgd.clocks.base import Timekeeper
from prsgd.comm.base import Done
from prsgd.core.average import Average, Averages
from prsgd.core.loop import Loop
from prsgd.core.resuming import check_memory, check_tensor, saved

_PLAIN = (
    "members", "announced", "step", "period", "overlap", "wait_seconds", "copy_seconds", "flight_seconds", "drift",
    "drifts",
)  # fmt: skip
"""Of an ``Average``, as it is."""


def lane_state(loop: Loop, averages: Averages, clock: Timekeeper) -> dict[str, Any]:
    """Waits for an average in flight, and keeps it without landing it."""
    average = loop.average
    if average is not None:
        averages.wait(average)
    taken = average is not None or any(pace.boards for pace in loop.paces)
    ids = averages.roll.ids
    return {
        "paces": [pace.state_dict(clock(id)) for pace, id in zip(loop.paces, ids)],
        "accounts": [account.state_dict() for account in averages.accounts],
        "waits": list(averages.roll.waits),
        "averaging": saved(averages.memory),
        "apart": averages.apart,
        "told": list(averages.told),
        "memory": averages.snapshots.state_dict(with_snapshots=taken and loop.paces[0].overlap > 0),
        "flight": None if average is None else _average_state(average),
    }


def check_lane_state(state: Mapping[str, Any], averages: Averages) -> None:
    """Raise an error unless ``load_lane_state`` can take it."""
    hosted, rows = len(averages.paces), averages.snapshots.rows
    for name in ("paces", "accounts", "waits"):
        _check_length(name, state[name], hosted)
    fresh = averages.averaging.init(averages.snapshots.row(0), hosted)
    check_memory(averages.averaging, state["averaging"], fresh, rows.width)
    flight = state["flight"]
    boards = any(pace["snap"] is not None and not pace["snap"]["launched"] for pace in state["paces"])
    overlaps = averages.paces[0].overlap > 0
    averages.snapshots.check_state(state["memory"], with_snapshots=overlaps and (boards or flight is not None))
    if flight is None:
        return
    for name in ("counts", "bad"):
        _check_length(name, flight[name], hosted)
    if not flight["to_land"] or not set(flight["to_land"]) <= set(range(hosted)):
        raise ValueError(f"the state's average is to land on {flight['to_land']} of {hosted} workers")
    for name in ("target", "mean", "exact_mean"):
        tensor = flight.get(name)
        if tensor is not None:
            shape = (hosted, rows.width) if name == "target" and tensor.dim() == 2 else (rows.width,)
            check_tensor(f"an average's {name}", tensor, shape, rows.dtype)
    if flight["memory"] is not None:
        check_memory(averages.averaging, flight["memory"], fresh, rows.width)


def _check_length(name: str, values: Any, hosted: int) -> None:
    if len(values) != hosted:
        raise ValueError(f"the state has {len(values)} {name} for {hosted} workers")


def load_lane_state(state: Mapping[str, Any], loop: Loop, averages: Averages, clock: Timekeeper) -> None:
    """Go on from there."""
    for pace, own, id in zip(loop.paces, state["paces"], averages.roll.ids):
        pace.load_state_dict(own, clock(id))
    for account, kept in zip(averages.accounts, state["accounts"]):
        account.load_state_dict(kept)
    averages.roll.waits = list(state["waits"])
    averages.snapshots.load_state_dict(state["memory"])
    averages.memory, averages.apart = saved(state["averaging"]), bool(state["apart"])
    averages.told = tuple(state["told"])
    flight = state["flight"]
    loop.average = None if flight is None else _average_from(flight, averages.snapshots.captured())


def _average_state(average: Average) -> dict[str, Any]:
    """Everything but the snapshots, which are kept beside; somebody has waited for it."""
    landing = average.arrived
    header = landing.header
    tensors = {"target": landing.target, "mean": landing.mean}
    if landing.exact is not landing.target:
        tensors["exact_mean"] = landing.exact
    return {
        **{name: getattr(average, name) for name in _PLAIN},
        "counts": list(average.counts),
        "bad": list(average.bad),
        "to_land": sorted(average.to_land),
        **{name: None if tensor is None else tensor.clone() for name, tensor in tensors.items()},
        "memory": None if landing.memory is None else saved(landing.memory),
        "extras": header.extras.clone(),
        "exact": header.exact.clone(),
        "sums": list(header.sums),
        "own": list(average.own),
        "step_seconds": list(header.step_seconds),
        "tells": list(header.tells),
        "bytes_sent": [landing.bytes_sent, landing.server_bytes_sent],
        "hops": landing.hops,
        "shared": landing.shared,
    }


def _average_from(state: Mapping[str, Any], snap: Tensor) -> Average:
    header = Header(
        Sums(*state["sums"]),
        state["exact"].clone(),
        state["extras"].clone(),
        step_seconds=tuple(state["step_seconds"]),
        tells=tuple(state["tells"]),
    )
    target, mean = (None if state[name] is None else state[name].clone() for name in ("target", "mean"))
    bytes_sent, server_bytes_sent = state["bytes_sent"]
    landing = Landing(
        target=target,
        mean=mean,
        exact=state.get("exact_mean", target),  # the target itself where it is that
        header=header,
        bytes_sent=bytes_sent,
        server_bytes_sent=server_bytes_sent,
        hops=state["hops"],
        shared=state["shared"],
        memory=None if state["memory"] is None else saved(state["memory"]),
    )
    return Average(
        work=Done(landing),
        own=Sums(*state["own"]),
        snap=snap,
        counts=tuple(state["counts"]),
        bad=tuple(state["bad"]),
        to_land=set(state["to_land"]),
        landing=landing,
        **{name: state[name] for name in _PLAIN},
    )
