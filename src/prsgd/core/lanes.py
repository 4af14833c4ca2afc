"""All lanes of a run together: they launch in turn, and where all workers meet, all lanes do, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from torch import Tensor

from prsgd.averaging.base import Landing
from prsgd.core.lane import Lane
from prsgd.core.roll import Roll
from prsgd.schedules.base import Now, Round


class Lanes:
    """The lanes, of which the next one to launch is that with the fewest launches, and the first among those.

    All workers launch the same averages, so all agree on which is next; one that is done answers in that order. One
    average travels at a time: it arrives before another lane's is launched.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes
        self._answers: dict[tuple[int, int], Round] = {}
        if len(lanes) > 1:
            for k, lane in enumerate(lanes):
                lane.loop.index, lane.loop.fragments = k, len(lanes)
                lane.loop.ask, lane.loop.recovered = partial(self._ask, lane.loop.ask), self._recovered
                lane.loop.may_close, lane.loop.clear = partial(self._may_close, lane), partial(self._clear, lane)
            self._place()

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    @property
    def first(self) -> Lane:
        return self._lanes[0]

    @property
    def under_way(self) -> int:
        """How many averages were launched and have not landed."""
        return sum(lane.loop.average is not None for lane in self._lanes)

    @property
    def is_ending(self) -> bool:
        """Had some workers run out of data, and others not, at the newest average?"""
        return any(lane.is_ending for lane in self._lanes)

    def advance(self) -> None:
        """At a step boundary: see ``Loop.advance``."""
        for lane in self._in_turn():
            lane.loop.advance()

    def look(self) -> list[tuple[Lane, Landing]]:
        """The exact mean of all workers' models, lane by lane."""
        for lane in self._lanes if len(self._lanes) > 1 else ():
            lane.loop.arrive()
        return [(lane, lane.loop.look()) for lane in self._in_turn()]

    def end(self) -> None:
        """All hosted workers are done: answer the others until all are, on every lane."""
        for lane in self._in_turn():
            lane.loop.wind_up()
        open_lanes = {lane for lane in self._lanes if not lane.loop.has_ended}
        while open_lanes:
            lane = self._in_turn()[0]
            if lane.loop.answer():
                open_lanes.discard(lane)
        for lane in self._in_turn():
            if not lane.loop.has_ended:
                lane.loop.end()
            lane.loop.has_ended = False

    def join(self) -> None:
        """A worker that comes in has nothing yet, and answers the average that it was told of."""
        for lane in self._lanes:
            if lane.loop.answer():
                lane.loop.end()
                lane.loop.has_ended = True

    def drop(self) -> None:
        """Give up what is under way."""
        for lane in self._lanes:
            lane.loop.average = None

    def reopen(self) -> None:
        """All workers have data again, and open the same round next."""
        self._place()
        self._answers.clear()
        rounds = max(lane.books.round for lane in self._lanes)
        for lane in self._lanes:
            lane.loop.reopen(rounds)

    def log(self, loss: float | Tensor | None, samples: int | Sequence[int], roll: Roll) -> None:
        """Add a step's loss and samples to the round that it belongs to, on each lane."""
        for lane in self._lanes:
            lane.books.log(loss, samples, lane.paces, roll)

    def state_dict(self) -> list[dict[str, Any]]:
        return [lane.state_dict() for lane in self._lanes]

    def rounds(self) -> list[list[Any]]:
        """What the schedule has answered lately: worker, round, and what that is."""
        return [[*key, asdict(round)] for key, round in self._answers.items()]

    def load_rounds(self, rounds: Sequence[Sequence[Any]]) -> None:
        self._answers = {(int(worker), int(number)): Round(**round) for worker, number, round in rounds}

    def check_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Raise an error unless ``load_state_dict`` can take them."""
        for lane, state in zip(self._lanes, states, strict=True):
            lane.check_state(state)

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        for lane, state in zip(self._lanes, states, strict=True):
            lane.load_state_dict(state)

    def inherit(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on where other workers were."""
        for lane, state in zip(self._lanes, states, strict=True):
            lane.inherit(state)
        self._place()

    def _in_turn(self) -> list[Lane]:
        """From the next one to launch on."""
        return sorted(self._lanes, key=lambda lane: lane.loop.launches)

    def _place(self) -> None:
        """All lanes open a round at the same step: they end theirs in the order in which they are to launch."""
        for place, lane in enumerate(self._in_turn(), 1):
            lane.loop.place = place

    def _ask(self, schedule: Callable[[Now], Round], now: Now) -> Round:
        """All lanes' rounds of one number are parts of one round of the schedule, which is asked for it once."""
        key = now.worker, now.round
        if key not in self._answers:
            self._answers[key] = schedule(now)
            self._answers.pop((now.worker, now.round - 3), None)
        return self._answers[key]

    def _may_close(self, lane: Lane, i: int) -> bool:
        """Is this lane the next whose round the hosted worker at place ``i`` closes?"""
        return min(self._lanes, key=lambda each: each.loop.launches + each.paces[i].boards) is lane

    def _recovered(self, i: int) -> None:
        """All fragments of the model of the hosted worker at place ``i`` were replaced; buffers came with the first."""
        for lane in self._lanes:
            lane.averages.return_buffers(i)

    def _clear(self, lane: Lane) -> None:
        """This lane is to launch: what travels arrives first."""
        for other in self._lanes:
            if other is not lane:
                other.loop.arrive()
