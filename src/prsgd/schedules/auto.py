"""A period that chooses itself: as long as the workers' drift costs no more than the noise of their gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from prsgd._check import positive, whole_number
from prsgd.records import Record
from prsgd.schedules.base import OWN_MOMENTUM, Learns, Now, Round

OLD = 0.7
"""Share of the past in the running mean of the gradients' noise, at each average that brings a new number."""
OLD_EXCESS = 0.9
"""The same of the drift's excess over what noise explains, which is a matter of the data, and changes slowly."""
MOST_EXCESS = 4.0
"""A single drift counts for no more than so many times what noise explains: gradients have outliers."""
CHANCE = 1.1
"""What chance makes of an excess of 1."""
SYSTEMATIC = 64.0
"""How much more drift weighs that noise does not explain."""
SHORT_RUN = 5_000
"""Steps up to which the tolerance stays as it is."""


@dataclass(frozen=True)
class auto(Learns):  # noqa: N801 - a word in the user's sentence
    """A period that needs no tuning: it starts at 1, and follows the lr, the noise of the gradients and the data.

    Workers that have drifted apart take their gradients at other points than their mean. That puts the mean of their
    gradients off by at most L^2 drift in squared norm (Theorem 1's second term; drift <= 4 lr^2 I^2 G^2 by Lemma 1),
    while the noise of their batches, of variance s^2 each, puts it off by s^2 / N however often they average. So a
    round may last until the first is 0.6 times the second (``tolerance``):

        drift  <=  target  =  tolerance s^2 / (N L^2)  max(1, sqrt(step / 5,000))

    In a long run it may last longer: Corollary 1's period grows as T^(1/4), and with it the drift as T^(1/2).

    The drift is measured at each average, and s^2 by two gradients in a row now and then. With momentum m the lr of the
    theorem is lr / (1 - m), and L is taken to be (1 - m) / ``largest_lr``, the largest that training stands: the
    largest so far, unless it is given. The next period is the last one times sqrt(target / drift), at most doubled and
    at most ``longest``, and never lowered while the drift is below its target.

    Where workers' data differ, their models part faster than the noise explains, and each in a direction of its own,
    round after round. That part of the drift does more harm, and weighs 64 times as much: the mean of the workers'
    gradients is that at the mean of their models plus mean_i H_i (x_i - mean), in which chance averages out and what
    pulls worker i and bends its loss H_i does not. What noise explains is known for SGD with one momentum for all
    parameters, without Nesterov's, and workers that count alike; elsewhere all drift weighs alike.

    With momentum, ``LocalSGD(..., optimizer_state="average")`` lets rounds be several times as long: momentum that each
    worker keeps for itself carries them apart.

    For optimizers of SGD's and of Adam's kind, and averagings whose drift is known: not gossip, nor one with a wire.

    >>> import torch, prsgd
    >>> fleet = prsgd.Fleet(torch.nn.Linear(4, 1), num_workers=4)
    >>> optimizer = torch.optim.SGD(fleet.parameters(), lr=0.05)
    >>> falling = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100, gamma=0.1)
    >>> with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.auto()) as local:
    ...     for step in range(200):
    ...         optimizer.zero_grad()
    ...         x, noise = torch.randn(2, 4, 8, 4, generator=torch.Generator().manual_seed(step))
    ...         losses = fleet.backward(torch.nn.functional.mse_loss, x, x.sum(dim=2, keepdim=True) + noise[..., :1])
    ...         optimizer.step()
    ...         falling.step()
    >>> local.records[0].period, local.records[-2].period > 1
    (1, True)
    """

    tolerance: float = 0.6
    largest_lr: float | None = None
    longest: int = 1024

    def __post_init__(self) -> None:
        object.__setattr__(self, "tolerance", positive("tolerance", self.tolerance))
        if self.largest_lr is not None:
            object.__setattr__(self, "largest_lr", positive("largest_lr", self.largest_lr))
        object.__setattr__(self, "longest", whole_number("longest", self.longest, at_least=1))

    def open(self, now: Now) -> Round:
        period, before = _planned(now.learned, now.round), _planned(now.learned, now.round - 1)
        if period == before:
            return Round(steps=period)
        drift, target, systematic = (now.learned[name] for name in ("drift", "target", "systematic"))
        if math.isnan(drift):
            return Round(steps=period, reason=f"an epoch ended before its first round did: period {before} to {period}")
        weighed = f" ({systematic:.0%} of it systematic, weighed {SYSTEMATIC:g}-fold)" if systematic else ""
        reason = f"drift {drift:.3g}{weighed}, target {target:.3g}: period {before} to {period}"
        return Round(steps=period, reason=reason)

    def learn(self, learned: Mapping[str, float], record: Record, lr: float) -> Mapping[str, float]:
        """The numbers by which the next rounds open: the ``period`` from the round ``since`` on, that ``before``, and
        what it was chosen by."""
        found = dict(learned)
        found["before"] = found.setdefault("period", 1.0)
        found["since"] = record.round + 2.0  # the round after the record's is over: its average has brought the numbers
        found["largest_lr"] = max(found.get("largest_lr", 0.0), lr)
        steps = _planned(learned, record.round)  # workers of other processes may have taken fewer
        found["steps"] = found.get("steps", 0.0) + steps
        if record.noise is not None:
            found["noise"] = OLD * found.get("noise", record.noise) + (1 - OLD) * record.noise
            found.pop("momentum", None)
            if record.momentum is not None and record.momentum < 1:  # float32 may have rounded it
                found["momentum"] = record.momentum
        n = record.workers
        if "noise" not in found or record.drift is None or n < 2 or not (lr > 0 and record.lr > 0):
            return found
        # Of the workers' common expectation, from which their mean is off by a share of 1/n.
        drift = record.drift * n / (n - 1)
        excess = self._excess(found, record.lr, drift, steps)
        found["systematic"] = max(0.0, 1 - CHANCE / excess) if excess else 0.0
        found["lr"], change = record.lr, lr / record.lr  # at the lr to come:
        drift *= (1 + (SYSTEMATIC - 1) * found["systematic"]) * change * change
        # The record's noise is s^2 / (1 - m)^2, so that s^2 / L^2 is largest_lr^2 * noise.
        tolerance = self.tolerance * max(1.0, math.sqrt(found["steps"] / SHORT_RUN))
        largest_lr = self.largest_lr or found["largest_lr"]
        target = tolerance * largest_lr * largest_lr * found["noise"] / n
        if math.isfinite(drift) and math.isfinite(target):
            # As it was planned: a process whose workers have run out of data sees no period in its record.
            wanted = self._next(int(found["period"]), steps, drift, target)
            found |= {"period": float(wanted), "drift": drift, "target": target, "heard": 1.0}
        return found

    def cut_short(self, learned: Mapping[str, float], round: int) -> Mapping[str, float]:
        """Of an epoch without a whole round nothing is known, and the period would stay whatever happens: rounds of
        half the length may be whole."""
        found = dict(learned)
        if not found.pop("heard", 0.0) and "period" in found:
            found |= {"before": found["period"], "period": float(max(1, int(found["period"]) // 2))}
            found |= {"since": round + 1.0, "drift": math.nan}
        return found

    def _excess(self, found: dict[str, float], lr: float, drift: float, steps: int) -> float:
        """How many times as large as noise explains the drift has been lately, with that of a round of so many steps
        that ended at this lr; 0: that is not known."""
        if not {OWN_MOMENTUM, "momentum"} <= found.keys():
            return 0.0
        own = found[OWN_MOMENTUM]
        if found.setdefault("excess_own", own) != own:  # it was of a run whose workers part in another way
            found["excess_own"] = own
            found.pop("excess", None)
        expected = lr * lr * found["noise"] * _noisy_steps(steps, found["momentum"], own=own > 0)
        if expected > 0 and 0.9 < found.get("lr", lr) / lr < 1.1:  # the lr was about the same in the whole round
            now = min(MOST_EXCESS, drift / expected)
            found["excess"] = OLD_EXCESS * found.get("excess", now) + (1 - OLD_EXCESS) * now
        return found.get("excess", 0.0)

    def _next(self, period: int, measured: int, drift: float, target: float) -> int:
        """``measured``: the period that had this drift; rounds of another ``period`` may be under way by now."""
        stretch = min(2.0, math.sqrt(target / drift)) if drift > 0 else 2.0
        wanted = max(1, math.floor(measured * stretch * (1 + 1e-9)))
        return min(self.longest, max(period, wanted) if drift <= target else min(period, wanted))

    def check(self, num_workers: int, overlap: int) -> None:
        """Every overlap works: it is clamped to the round's length, and the record holds the one used."""


def _planned(learned: Mapping[str, float], round: int) -> int:
    """The period of a round, the newest or one before that."""
    return int(learned.get("period" if round >= learned.get("since", 1) else "before", 1))


def _noisy_steps(steps: int, m: float, *, own: bool) -> float:
    """How many gradients' noise a round of so many steps is worth, each moving a model as far as it does in the end:
    noise alone parts the workers by lr^2 noise times this.

    With momentum m the j-th gradient from the end has moved by 1 - m^j of that. If workers keep their ``own`` momentum,
    a round begins with the noise of those before it, of variance 1 / (1 - m^2), of which m (1 - m^K) is to come.

    >>> _noisy_steps(3, 0.0, own=True)
    3.0
    >>> _noisy_steps(2, 0.5, own=False), round(_noisy_steps(1, 0.5, own=True), 6)
    (0.8125, 0.333333)
    """
    left = m**steps
    within = steps - 2 * m * (1 - left) / (1 - m) + m**2 * (1 - left**2) / (1 - m**2)  # sum_j (1 - m^j)^2
    return within + own * (m * (1 - left)) ** 2 / (1 - m**2)
