"""Parallel Restarted SGD: the algorithm.

Read beside the paper (Yu, Yang, Zhu, AAAI 2019). Its Algorithms 1-3 are one loop here. Each worker takes local steps
(Alg. 1 line 8, Alg. 2 line 6, Alg. 3 line 5: the user's own ``optimizer.step()``); a round *closes*, and its average
is launched; the average *lands*, and the worker restarts from it (Alg. 1 lines 5-6, Alg. 2 and 3 line 4). With

    d = overlap: how many of a worker's steps begin while an average travels,

d = 0 lands right after the closing step's update, and the worker restarts at the mean itself: Algorithms 2 and 3 as
printed. d >= 1 lands in the d-th step after closing, between its gradient and its update, as
x_i <- x_i + (mean_j snap_j - snap_i): d = 1 is Algorithm 1 as printed, whose gradient at x_i^{t-1} is taken while the
average of the x^{t-1} is computed.

A loop is over one *lane*: the part of the hosted workers' models that travels together. Most runs have one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from prsgd.averaging.base import Landing
from prsgd.clocks.base import Timekeeper
from prsgd.core.average import Average, Averages
from prsgd.core.meeting import Meeting
from prsgd.core.pace import Pace
from prsgd.core.roll import Account
from prsgd.schedules.base import Now, Round, Schedule


class Loop:
    """One lane of a run: the hosted workers' timetables, the average under way, and the way there and back."""

    def __init__(
        self,
        schedule: Schedule,
        averages: Averages,
        clock: Timekeeper,
        *,
        check: Callable[[], None],
        lr: Callable[[], float],
        set_lr: Callable[[float], None],
    ) -> None:
        self._averages, self._clock = averages, clock
        self.ask: Callable[[Now], Round] = schedule.open
        """How long a round is to be."""
        self._check, self._lr, self._set_lr = check, lr, set_lr
        self._roll, self._books = averages.roll, averages.books
        self.paces: Sequence[Pace] = averages.paces
        self._accounts: Sequence[Account] = averages.accounts
        self._meeting = Meeting(averages)
        self.average: Average | None = None
        """The one under way."""
        self.launches = 0
        self._overlap = averages.snapshots.overlap
        self.index, self.place, self.fragments = 0, 1, 1
        """Among the lanes; in the order in which their rounds end, from 1; and how many there are."""
        self.may_close: Callable[[int], bool] = _always
        """Is it this lane's turn on the hosted worker at this place?"""
        self.clear: Callable[[], None] = _nothing
        """Waits for what other lanes have under way."""
        self.recovered: Callable[[int], None] = averages.return_buffers
        """The hosted worker at this place has a finite model again."""
        self.has_ended = False
        """Did this worker come in at the others' last average, and has ended with them? Until it takes another step."""

    # Steps

    def before_update(self, places: Sequence[int]) -> list[int]:
        """Between a step's gradient and its update: land what is due (Alg. 1 lines 5-6).

        Returns those whose gradients were taken at models that are given up, and are no more of use.
        """
        replaced = []
        for i in places if self.average is not None else ():
            average = self.average
            if average is not None and self.paces[i].lands_now:
                self._land([i], in_step=True)
                replaced += [i] if self._voids_step(i, average) else []
        return replaced

    def after_update(self, updated: Sequence[int], stepped: Sequence[int]) -> bool:
        """An optimizer has updated these. Those that have ``stepped`` with it, the last one of theirs, have one step
        more behind them (Alg. 1 line 8, Alg. 2 line 6, Alg. 3 line 5), moved or not. Is it time to ``advance``?"""
        for i in updated:
            self._accounts[i].moved = True
        for i in stepped:
            self.paces[i].steps += 1
            self._accounts[i].rested += i not in updated
            self.has_ended = False
        # At most steps nobody has anything to do.
        return any(pace.is_turn(self._clock, id) for pace, id in zip(self.paces, self._roll.ids))

    def advance(self) -> None:
        """At a step boundary: open and close rounds, and launch an average whenever all hosted workers have closed."""
        average = self.average
        if average is not None and any(self._roll.done[i] for i in average.to_land):
            self._land(())
        while True:
            running = self._roll.running()
            for i in running:
                self._turn(i)
            boards = [pace.boards for pace in self.paces]
            if not any(boards) or not all(boards[i] for i in running):
                break
            self._launch()

    def waiting(self) -> list[bool]:
        """By place: those that may take no step before others of this process have closed their rounds."""
        return [pace.waits(self._clock(id)) for pace, id in zip(self.paces, self._roll.ids)]

    def _turn(self, i: int) -> None:
        pace = self.paces[i]
        if pace.may_open:
            self._open(i)
        overlap = pace.due(self._clock(self._roll.ids[i]))
        if overlap is not None and not pace.boards and self.may_close(i):
            if pace.snap is not None:  # rounds by the clock can be shorter than the overlap
                self._land([i])
            self._close(i, overlap)

    def _open(self, i: int) -> None:
        """Alg. 2 line 4: set the round's length K^s and lr gamma^s. Alg. 3: I_i."""
        pace, id = self.paces[i], self._roll.ids[i]
        now = Now(
            worker=id,
            num_workers=len(self._averages.comm.members),
            round=pace.rounds + 1,
            step=pace.steps,
            lr=self._lr(),
            last=self._books.last,
            learned=self._averages.learned,
        )
        given, overlap = self.ask(now), pace.overlap
        most = None if given.steps is None else max(1, given.steps // self.fragments)  # one is under way at a time
        if self._averages.hiding is not None:
            overlap, given = self._averages.hiding.of(given, overlap, most)
        elif self.fragments > 1 and most is not None:
            overlap = min(self._overlap, most)
        round = pace.staggered(given, self.place, self.fragments)
        pace.open(round, self._clock(id), overlap)
        self._books.pages[i].turn()
        if round.lr is not None and self.place == self.fragments:  # whose rounds are the schedule's
            self._set_lr(round.lr)

    def _close(self, i: int, overlap: int) -> None:
        """The round's steps are taken: this is what the worker brings to the average."""
        opens = self.paces[i].close(overlap)
        self._accounts[i].snap(self._books.pages[i].samples)
        self._clock.closed(i)
        if self.paces[i].overlap:
            self._averages.snapshots.capture(i)
        if opens:
            self._open(i)

    # Averages

    def _launch(self) -> Average:
        """Alg. 1 line 5: start the average of all hosted workers, and land it on those that do not overlap it."""
        self._check()
        self.clear()
        answering = [i for i, pace in enumerate(self.paces) if self._roll.done[i] and not pace.boards]
        for i in answering:
            self.paces[i].answer()
            self._accounts[i].snap(self._books.pages[i].samples)
            if self.paces[i].overlap:
                self._averages.snapshots.capture(i)
        average = self.average = self._averages.launch(answering)
        self.launches += 1
        blocking = []
        for i, pace in enumerate(self.paces):
            assert pace.snap is not None
            pace.snap.launched = True
            if pace.snap.lands_at == pace.steps and i not in answering:
                blocking.append(i)
        self._books.sent()
        if blocking or self._roll.all_done:
            self._land(blocking)
        return average

    def _land(self, places: Sequence[int], *, in_step: bool = False) -> None:
        """Alg. 1 line 6, Alg. 2 and 3 line 4: these workers, and those that are done, restart from the average."""
        average = self.average
        assert average is not None
        began = {i: self._clock(self._roll.ids[i]) for i in places}
        self._meeting.arrive(average)
        for i in sorted(average.to_land):
            if i in places or self._roll.done[i]:
                counts = in_step and not self._roll.done[i] and not self._voids_step(i, average)
                self._touch_down(i, average, in_step=counts)
        for i, seconds in began.items():  # waiting for the last average is no part of the round that is open by now
            self.paces[i].opened_seconds += self._clock(self._roll.ids[i]) - seconds
        if not average.to_land:
            self._complete(average)
            if average.ends_it:
                self.end()
                self.has_ended = True

    def _voids_step(self, i: int, average: Average) -> bool:
        """Is the step that it lands in none, since its gradient is of a model that is given up? Of one that travels in
        fragments this is only a part: the worker is idle in its steps until all are replaced (``Roll.ailing``)."""
        return average.gives_up(i) and self.fragments == 1

    def _touch_down(self, i: int, average: Average, *, in_step: bool) -> None:
        pace = self.paces[i]
        assert pace.snap is not None
        self._averages.land(i, average)
        self._accounts[i].land(pace.snap.at, average.counts[i])
        lost = average.bad[i] and self._roll.ids[i] not in average.outliers
        self._roll.mend(i, self.index, lost=lost, fragments=self.fragments)
        if not self._roll.ailing[i]:
            self.recovered(i)
        average.came_down(pace.land(in_step=in_step))
        if self._roll.done[i] and pace.round is None:
            pace.opened_at = pace.steps
            self._books.pages[i].turn()
        if average.arrived.target is not None and average.brought_news:
            self._clock.landed(i, self._books.number)

    def _complete(self, average: Average) -> None:
        """It has landed on all hosted workers."""
        self.average = None
        for pace, done in zip(self.paces, self._roll.done):
            if done and not pace.boards:  # what answered a look has not landed
                pace.snap = None
        self._averages.adopt(average)
        if not average.brought_news or average.is_look:
            return
        books = self._books
        modelled = self._clock.completed()
        record = average.record(round=books.number, fragment=books.fragment, lr=self._lr(), modelled=modelled)
        alike = average.arrived.header.sums.are_alike(average.own)
        books.enter(record, average.drift, average.drifts, average.own, alike=alike)

    # Where all workers meet

    def look(self) -> Landing:
        """The exact mean of all workers' models as they are now; where this one was left out, that of what the others
        brought to the average with which it came back."""
        average = self.average
        self.arrive()  # workers that are done have landed it then, and count as they do after that
        if average is not None and average.missed:  # the others are past the look
            return replace(average.arrived, target=average.arrived.exact)
        return self._meeting.look()

    def wind_up(self) -> None:
        """All hosted workers are done: land what is in flight or about to be."""
        self.arrive()
        if any(pace.boards for pace in self.paces):  # a fleet's workers that waited for others of it
            self._launch()
            self.arrive()
        for pace in self.paces:
            pace.snap = None

    def reopen(self, rounds: int) -> None:
        """After an epoch's end: all workers open the same round next, however many they opened themselves."""
        for pace in self.paces:
            pace.rounds, pace.left_steps, pace.left_seconds = rounds, 0, 0.0

    def arrive(self) -> None:
        """Wait for what is under way, which lands when it is due."""
        if self.average is not None:
            self._land(())

    def answer(self) -> bool:
        """Bring what there is to the others' next average. Were all workers done?"""
        average = self._launch()
        self._meeting.arrive(average)
        return average.is_last

    def end(self) -> None:
        """All workers are done: complete the books, and see that all have the same model."""
        self._meeting.end()


def _always(_: int) -> bool:
    return True


def _nothing() -> None:
    pass
