"""Runs of a scenario: all workers in one process, or one process's share of them."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import prsgd
from tests.fuzz_outcome import NUMBERS, Look, Outcome
from tests.fuzz_problem import optimizers, replica
from tests.fuzz_scenario import Scenario, made
from tests.problems import Told, batch

LIMIT_SECONDS = 30.0
"""How long a rank waits for another."""


class Runner:
    """The hosted workers' models, optimizer and LocalSGD, with what a scenario does to them."""

    def __init__(self, scenario: Scenario, *, rank: int | None) -> None:
        self.scenario, self.rank, self.outcome = scenario, rank, Outcome()
        self.taken: dict[int, int] = {}
        self.gone: set[int] = set()
        self.comm: Any = None
        self._old: dict[int, dict[str, Any]] = {}
        net, self.fleet, n = replica(scenario.model), None, scenario.num_workers
        if rank is None:
            self.comm = prsgd.InProcess(n, shape=scenario.shape)
        elif scenario.form == "fleet" or scenario.shape != "all-reduce":  # else LocalSGD finds the group by itself
            self.comm = prsgd.TorchDistributed(num_workers=n, shape=scenario.shape, timeout_seconds=LIMIT_SECONDS)
        if rank is not None and scenario.form == "model":
            self.modules, self.workers = [net], [rank]
        else:
            self.fleet = prsgd.Fleet(net, n, comm=self.comm)
            self.modules, self.workers = list(self.fleet.modules), list(self.fleet.workers)
        self.optimizers = optimizers(scenario, [p for m in self.modules for p in m.parameters() if p.requires_grad])
        self.local = prsgd.LocalSGD(
            net if self.fleet is None else self.fleet,
            self.optimizers if len(self.optimizers) > 1 else self.optimizers[0],
            comm=self.comm,
            schedule=made(scenario.schedule),
            averaging=made(scenario.averaging),
            overlap="auto" if scenario.transfers else scenario.overlap,
            clock=Told(scenario.transfers) if scenario.transfers else None,
            optimizer_state=scenario.optimizer_state,
            fragments=scenario.fragments,
            timeout_seconds=LIMIT_SECONDS,
            done_timeout_seconds=LIMIT_SECONDS,
        )

    def take_batch(self) -> None:
        """One batch of every worker that takes part."""
        s = self.scenario
        active = self.workers if self.fleet is None else list(self.fleet.active)
        at = {w: self.taken[w] + 1 for w in active}
        self.spoil({w: self.taken[w] for w in active}, "after")
        if s.warmup:
            for group in (g for optimizer in self.optimizers for g in optimizer.param_groups):
                group["lr"] = 0.2 * min(1.0, (max(at.values()) - 1) / s.warmup)
        pairs = [batch(w, self.taken[w]) for w in self.workers]
        for module in self.modules:
            module.zero_grad()
        if self.fleet is None:
            losses = cross_entropy(self.modules[0](pairs[0][0]), pairs[0][1])
            losses.backward()
        else:
            losses = self.fleet.backward(cross_entropy, [x for x, _ in pairs], [y for _, y in pairs])
        log = self._logger(losses, at)
        if s.log == "before":
            log()
        self.spoil(at, "parameters", "gradient", "buffers", "infinite", "huge")
        skipped = [w for w in active if (w, at[w]) in s.skips]
        for w in skipped:
            self._module(w).zero_grad()
        if len(skipped) < len(active):
            for optimizer in self.optimizers:
                optimizer.step()
            if s.log == "after":
                log()
        for w in active:
            self.taken[w] += 1

    def look(self) -> None:
        # A fleet's worker that has left may take over an average that landed meanwhile: that is no look's doing.
        still = [m for w, m in zip(self.workers, self.modules) if w not in self.gone]
        before = [(_flat(m), _buffers(m)) for m in still]
        with self.local.consensus() as averaged:
            averaged.eval()
            self.outcome.seen.append((_flat(averaged), _buffers(averaged)))
        sound = not any(bool(t.isnan().any()) for row, buffers in before for t in (row, *buffers))
        if self.rank is None and sound and not self.gone and not self.scenario.weighted:
            mean = torch.stack([row for row, _ in before]).mean(dim=0)
            if not torch.allclose(self.outcome.seen[-1][0], mean, rtol=0, atol=1e-12) and bool(mean.isfinite().all()):
                self.outcome.spoilt = "the mean"
        for m, (row, buffers) in zip(still, before):
            if not torch.equal(torch.nan_to_num(_flat(m), 7.0), torch.nan_to_num(row, 7.0)):
                self.outcome.spoilt = "parameters"
            if not all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(_buffers(m), buffers)):
                self.outcome.spoilt = "buffers"
            if not m.training:
                self.outcome.spoilt = "training mode"

    def finished(self) -> Outcome:
        found = self.outcome
        for w in self.workers:
            found.parameters[w], found.buffers[w] = _flat(self._module(w)), _buffers(self._module(w))
            states = (o.state.get(p, {}) for o in self.optimizers for p in self._module(w).parameters())
            found.state[w] = [
                v.detach().clone() for state in states for _, v in sorted(state.items()) if isinstance(v, Tensor)
            ]
        self._keep_records()
        found.records = [self._old[r] for r in sorted(self._old)]
        if self.comm is not None:
            self.comm.close()
        return found

    def resumed(self) -> Runner:
        """Everything saved, thrown away and loaded into new objects."""
        holders = [self.local, *self.optimizers, *([self.fleet] if self.fleet is not None else self.modules)]
        saved = pickle.dumps([holder.state_dict() for holder in holders])
        self._keep_records()
        other = Runner(self.scenario, rank=self.rank)
        holders = [other.local, *other.optimizers, *([other.fleet] if other.fleet is not None else other.modules)]
        for holder, state in reversed(list(zip(holders, pickle.loads(saved), strict=True))):
            holder.load_state_dict(state)
        other.outcome, other.taken, other.gone, other._old = self.outcome, self.taken, self.gone, self._old
        if self.rank is not None and self.comm is not None:
            self.comm.close()
        other.local.start()
        return other

    def _keep_records(self) -> None:
        for r in self.local.records:
            self._old[r.round] = {name: getattr(r, name) for name in (*NUMBERS, "loss", "drift", "noise")}

    def _module(self, worker: int) -> nn.Module:
        return self.modules[self.workers.index(worker)]

    def spoil(self, at: dict[int, int], *places: str) -> None:
        for w, b, place in self.scenario.nans:
            if place not in places or at.get(w) != b:
                continue
            p = next(p for p in self._module(w).parameters() if p.requires_grad)
            if place == "gradient" and p.grad is not None:
                p.grad.fill_(float("nan"))
            elif place == "buffers":
                next(t for t in self._module(w).buffers() if t.is_floating_point()).fill_(float("nan"))
            elif place == "infinite":
                p.data[0], p.data[1:] = float("inf"), -float("inf")
            elif place == "huge":
                p.data.fill_(1e20)
            elif place != "gradient":
                p.data.fill_(float("nan"))

    def _logger(self, losses: Tensor, at: dict[int, int]) -> Callable[[], None]:
        samples = [1 + (w + at[w]) % 4 if w in at else 0 for w in self.workers]
        return lambda: self.local.log(loss=losses, samples=samples if self.fleet is not None else samples[0])


def run_fleet(scenario: Scenario, *, looks: bool = True, resume: bool = False) -> Outcome:
    """All workers in this process; looks are taken where ranks may look too."""
    runner, ticks = Runner(scenario, rank=None), 0

    def look(when: str) -> None:
        for tick, at in scenario.looks if looks else ():
            if (tick, at) == (ticks, when) and _all_may_look(scenario, runner):
                runner.outcome.looks.append(Look(tuple(runner.taken.values()), frozenset(runner.gone)))
                runner.look()

    def run() -> Outcome:
        nonlocal runner, ticks
        runner.taken = dict.fromkeys(runner.workers, 0)
        runner.local.start()
        while True:
            look("before")
            runner.outcome.ahead |= _leaves_ahead(scenario, runner)
            _stop(scenario, runner)
            if len(runner.gone) == scenario.num_workers:
                break
            look("after")
            if ticks and ticks == scenario.resume_at:
                if _all_may_look(scenario, runner):
                    runner.outcome.rest = Look(tuple(runner.taken.values()), frozenset(runner.gone))
                if resume:
                    runner = runner.resumed()
            runner.take_batch()
            ticks += 1
        runner.local.finish()
        return runner.finished()

    try:
        return _quiet(run)
    except Exception as error:
        assert runner.fleet is not None
        runner.outcome.error = f"{type(error).__name__}: {error}"
        runner.outcome.lost = not runner.fleet.rows.isfinite().all(dim=1).any()
        return runner.outcome


def run_rank(rank: int, scenario: Scenario, looks: Sequence[Look], rest: Look | None = None) -> Outcome:
    """This process's workers, looking where it is told, and with ``rest`` saved and made anew there."""
    runner, left = Runner(scenario, rank=rank), list(looks)
    here = set(runner.workers)

    def is_there(look: Look) -> bool:
        running = here - runner.gone
        return runner.gone == look.gone & here and all(runner.taken[w] == look.at[w] for w in running)

    def look() -> None:
        while left and here - runner.gone and is_there(left[0]):
            left.pop(0)
            runner.look()

    def run() -> Outcome:
        nonlocal runner
        runner.taken = dict.fromkeys(runner.workers, 0)
        runner.local.start()
        rests = rest is not None
        while True:
            look()
            _stop(scenario, runner)
            if runner.gone == here:
                break
            look()
            if rests and rest is not None and is_there(rest):
                runner, rests = runner.resumed(), False
            runner.take_batch()
        runner.local.finish()
        runner.outcome.looks = [look for look in left if here - look.gone]
        return runner.finished()

    try:
        return _quiet(run)
    except Exception as error:
        runner.local.__exit__(type(error), error, None)  # as at the end of a with block: the others are not to wait
        runner.outcome.error = f"{type(error).__name__}: {error}"
        return runner.outcome


def _stop(scenario: Scenario, runner: Runner) -> None:
    for w in runner.workers:
        if runner.taken[w] == scenario.batches[w] and w not in runner.gone:
            runner.spoil({w: scenario.batches[w]}, "after")
            runner.gone.add(w)
            if runner.fleet is not None:
                runner.fleet.stop(w)


def _all_may_look(scenario: Scenario, runner: Runner) -> bool:
    """Have all launched the same averages, were each a process of its own, which does not wait for others to launch?"""
    unsteady = "per_worker" in scenario.schedule or scenario.skips or scenario.nans
    if scenario.overlap and unsteady and scenario.ranks < scenario.num_workers:
        return False  # a process's workers may wait for each other where the fleet's do not
    launched = _launched(scenario, runner)
    running = {launched[w] for w in runner.workers if w not in runner.gone}
    return len(running) == 1 and all(launched[w] <= min(running) for w in runner.gone)


def _leaves_ahead(scenario: Scenario, runner: Runner) -> bool:
    """Has one that leaves now launched what others have not, were each a process of its own?"""
    launched = _launched(scenario, runner)
    running = [w for w in runner.workers if w not in runner.gone]
    leaving = [launched[w] for w in running if runner.taken[w] == scenario.batches[w]]
    return bool(leaving) and max(leaving) > min(launched[w] for w in running)


def _launched(scenario: Scenario, runner: Runner) -> dict[int, int]:
    found = {}
    for w, steps in zip(runner.workers, runner.local.steps, strict=True):
        skips = sum(1 for worker, b in scenario.skips if worker == w and b <= runner.taken[w])
        undone = runner.taken[w] - skips - steps  # steps not taken, since a model that was not finite was replaced
        found[w] = sum(c - undone <= steps for c in scenario.closings(w))
    return found


def _quiet(run: Callable[[], Outcome]) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run()


def _flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def _buffers(module: nn.Module) -> list[Tensor]:
    return [b.detach().clone() for b in module.buffers()]
