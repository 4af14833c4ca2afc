"""The optimizers' two hooks, which are the only way in: what belongs to optimizers ends here.

Skipped steps, closures, several optimizers and gradients that somebody drops are no business of the loop: it is told
which hosted workers are about to be updated, and which were.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from prsgd.clocks.base import Timekeeper
from prsgd.core.lanes import Lanes
from prsgd.core.loop import Loop
from prsgd.core.noise import GradientNoise, is_due
from prsgd.core.roll import Roll
from prsgd.errors import UsageError
from prsgd.replicas.host import Host
from prsgd.replicas.optimizers import owners

_steps = attrgetter("steps")
_in_use: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that some LocalSGD hooks: two would average twice."""


class SkippedSteps:
    """Counts the steps that a lone worker skips, as GradScaler does: gradients that were not finite and were dropped.

    A gradient stays not finite while others are added to it. If the next one is finite and there was no step between
    them, it was dropped. Counted on the gradients' device: nobody waits for it before an average does.
    """

    def __init__(self) -> None:
        self._lost: Tensor | None = None
        self._count: int | Tensor = 0

    def passed(self, p: Tensor) -> None:
        """There is one more gradient; ``p`` has its part of it."""
        if p.grad is not None:
            finite = p.grad.isfinite().all()
            if self._lost is not None:
                self._count = self._count + (self._lost & finite)
            self._lost = ~finite

    def stepped(self) -> None:
        """Whatever there was has gone into a step."""
        self._lost = None

    def taken(self) -> int:
        """How many there were since this was last asked."""
        count, self._count = int(self._count), 0
        return count


class Hooks:
    """Tells the lanes of a run what happens to the hosted workers, step by step."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        host: Host,
        roll: Roll,
        clock: Timekeeper,
        *,
        overlap: int,
        failed: Callable[[BaseException], None],
        publish: Callable[[], None],
        skipped: SkippedSteps | None = None,
    ) -> None:
        self.optimizers = optimizers
        self._publish = publish
        self._host, self._roll, self._clock, self._overlap, self._failed = host, roll, clock, overlap, failed
        self.require_free()
        self._owners = owners(optimizers, host.rows.workers)
        # With several optimizers a step is over when the last of those that own the worker has stepped.
        self._closers = [
            next(o for o in reversed(optimizers) if i in self._owners[o]) for i in range(len(host.modules))
        ]
        self._in_step = [False] * len(host.modules)
        """It has the gradient of its next step."""
        self._replaced = [False] * len(host.modules)
        """This optimizer.step() is no step of its: its gradient was taken at a model that was not finite."""
        self._rests = [False] * len(host.modules)
        """It takes part in this step without moving, until all fragments of its model are replaced."""
        self._known = self._parameters()
        self._lanes: Lanes | None = None
        self._loops: Sequence[Loop] = ()
        self._handles: list[Any] = []
        self.refusal: str | None = None
        """Why no step may be taken now."""
        self._skipped = skipped
        self.noise: GradientNoise | None = None
        """Looks at gradients, where the schedule has to know how much they scatter."""

    def hook(self, lanes: Lanes) -> None:
        """Begin."""
        self._lanes, self._loops = lanes, [lane.loop for lane in lanes]
        _in_use.update(self.optimizers)
        for optimizer in self.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before))
            self._handles.append(optimizer.register_step_post_hook(self._after))
        if self._skipped is not None:
            newest = list(self._host.rows.workers[0].values())[-1]
            self._handles.append(newest.register_post_accumulate_grad_hook(self._skipped.passed))
        self._host.hold(self.advance)

    def unhook(self) -> None:
        """End."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for optimizer in self.optimizers:
            _in_use.discard(optimizer)
        self._host.release()

    def require_free(self) -> None:
        for optimizer in self.optimizers:
            if isinstance(optimizer, Optimizer) and optimizer in _in_use:
                raise UsageError(f"{type(optimizer).__name__} is hooked by another LocalSGD: finish that one first")

    def check(self) -> None:
        """Raise an error if the optimizers or the models are no longer what they were."""
        if self._parameters() != self._known:
            raise UsageError("the optimizer's parameters changed during the run: start a new LocalSGD with them")
        self._host.check()

    def lr(self) -> float:
        return float(self.optimizers[0].param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        self.set_lrs([lr] * len(self._groups()))

    def lrs(self) -> list[float]:
        """Of all parameter groups."""
        return [float(group["lr"]) for group in self._groups()]

    def set_lrs(self, lrs: Sequence[float]) -> None:
        """One for each parameter group."""
        for group, lr in zip(self._groups(), lrs, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def advance(self) -> None:
        """Between two steps, or when a worker was said to have run out of data."""
        try:
            self._roll.call(self._host.stopped)
            if self._lanes is not None:
                self._lanes.advance()
            self._roll.waits = [any(waits) for waits in zip(*(loop.waiting() for loop in self._loops))]
            waiting = (i for i, waits in enumerate(self._roll.waits) if waits and not self._roll.done[i])
            self._host.show_waiting({self._roll.ids[i] for i in waiting})
            self._publish()
        except BaseException as error:
            self._failed(error)
            raise

    def state_dict(self) -> dict[str, Any] | None:
        """What is known of gradients; None: nobody asks."""
        return None if self.noise is None else self.noise.state_dict()

    def check_state(self, state: Mapping[str, Any] | None) -> None:
        """Raise an error unless ``load_state_dict`` can take it."""
        if self.noise is not None and state is not None:
            self.noise.check_state(state)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        if self.noise is not None and state is not None:
            self.noise.load_state_dict(state)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Between a step's gradient and its update."""
        if self.refusal is not None:
            raise UsageError(self.refusal)
        if kwargs.get("closure") is not None or (len(args) > 1 and args[1] is not None):
            self._refuse_closure()
        roll, places = self._roll, self._owners[optimizer]
        if True in roll.waits or True in roll.done:  # whatever gradients somebody gave them
            for i in range(len(roll.ids)):
                if not roll.may_step(i):
                    self._host.skip(i)
        if _skipped(optimizer):
            return
        taking = []
        for i in places:  # asked now: a hook of somebody else may drop the gradients
            takes = not (self._replaced[i] or roll.done[i] or roll.waits[i])
            takes = takes and (self._rests[i] or self._host.takes_part(i))
            roll.takes_part[i] = takes
            if takes and not self._in_step[i]:
                self._in_step[i] = True
                taking.append(i)
        if taking:
            self._clock.computed(taking)
        self._rest(places)
        if self.noise is not None:
            for i in places:
                if is_due(steps := self._loops[0].paces[i].steps) and roll.takes_part[i]:
                    self.noise.look(i, optimizer, steps)
        for loop in self._loops:
            if loop.average is not None:
                self._land(places)
                break

    def _refuse_closure(self) -> None:
        """Where something is done with the gradients before the update: a closure takes them later."""
        if self._overlap:
            raise UsageError(
                "optimizer.step(closure) takes its gradient after the average would land: use overlap=0, or call "
                "backward() before optimizer.step()"
            )
        if self.noise is not None:
            raise UsageError(
                "optimizer.step(closure) takes its gradient after the schedule would look at it: use one that does "
                "not, such as every(8), or call backward() before optimizer.step()"
            )

    def _land(self, places: Sequence[int]) -> None:
        try:
            for loop in self._loops:
                for i in loop.before_update([i for i in places if self._roll.takes_part[i]]):
                    self._replaced[i], self._roll.takes_part[i] = True, False
                    self._host.skip(i)
            self._rest(places)
        except BaseException as error:
            self._failed(error)
            raise

    def _rest(self, places: Sequence[int]) -> None:
        """A gradient of a model that is not finite would spoil the fragments of it that were replaced."""
        for i in places:
            if self._roll.takes_part[i] and (self._roll.ailing[i] or self._rests[i]):
                self._rests[i] = True
                self._host.skip(i)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """After a step's update: count it, close and launch (Alg. 2 and 3: the end of the inner loop)."""
        places = self._owners[optimizer]
        if _skipped(optimizer):
            for i in places:
                self._in_step[i] &= optimizer is not self._closers[i]
            return
        updated, stepped, is_over = [], [], False
        for i in places:
            takes = self._roll.takes_part[i]
            if takes and not self._rests[i]:
                updated.append(i)
            if self._closers[i] is optimizer and (takes or self._replaced[i]):
                self._in_step[i] = self._replaced[i] = self._rests[i] = False
                is_over = True
                if takes:
                    stepped.append(i)
        is_turn = False
        for loop in self._loops:
            is_turn |= loop.after_update(updated, stepped)
        if not is_over:
            return
        if self._skipped is not None:
            self._skipped.stepped()
        self._clock.stepped(max(map(_steps, self._loops[0].paces)))
        if is_turn:
            self.advance()  # and publishes
        else:
            self._publish()

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def _parameters(self) -> list[int]:
        return [id(p) for o in self.optimizers for g in o.param_groups for p in g["params"] if p.requires_grad]


def _skipped(optimizer: Optimizer) -> bool:
    """Does GradScaler skip this step? It calls a fused optimizer's step() all the same, with ``found_inf`` set."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)
