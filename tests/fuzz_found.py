"""What random runs have found, each in its smallest form."""

from __future__ import annotations

from tests.fuzz_scenario import Scenario

SLOWMO = "outer(1.0, 0.7, nesterov=False, by_inner_lr=True)"

FOUND = {
    # Looks, while a worker that has run out of data answers them.
    "outer steps when it answers a look": Scenario(
        averaging="outer()", schedule="every(1)", batches=(3, 0), looks=((2, "after"),)
    ),
    "the elastic centre moves when it answers a look": Scenario(
        averaging="easgd()", schedule="every(1)", batches=(0, 3), looks=((2, "before"),)
    ),
    "a look in mid-flight counts what is in flight again": Scenario(batches=(2, 4), overlap=1, looks=((3, "after"),)),
    "a look in mid-flight shows other statistics": Scenario(
        schedule="every(1)", batches=(1, 2), overlap=1, model="batchnorm", looks=((2, "before"),)
    ),
    "a look in mid-flight counts what is in flight again, with sparse": Scenario(
        averaging="sparse(0.5)", batches=(2, 4), overlap=1, looks=((3, "after"),)
    ),
    "a model that is not finite answers a look and is zeros from then on": Scenario(
        schedule="every(4)", batches=(2, 4), form="fleet", looks=((3, "after"),), nans=((0, 2, "parameters"),)
    ),
    "a look gives up where the next average would not": Scenario(
        schedule="every(4)", batches=(0, 3), looks=((2, "after"),), nans=((1, 1, "gradient"),)
    ),
    "those that answer a look are not told that no model is finite": Scenario(
        schedule="every(3)",
        batches=(2, 1),
        looks=((1, "after"),),
        nans=((0, 1, "gradient"), (1, 1, "gradient")),
    ),
    # Workers whose models are not finite, where those that are left have run out of data.
    "nobody is rescued by steps": Scenario(
        averaging="mean('steps')", schedule="every(1)", batches=(0, 1), nans=((1, 1, "gradient"),)
    ),
    "nobody is rescued by samples": Scenario(
        averaging="mean('samples')", schedule="every(1)", batches=(0, 1), form="fleet", nans=((1, 1, "gradient"),)
    ),
    "nobody is rescued by steps among signs": Scenario(
        averaging="mean('steps', quantized('sign', bucket=16))",
        schedule="every(1)",
        batches=(0, 1),
        form="fleet",
        nans=((1, 1, "gradient"),),
    ),
    "some leave when an average in flight is a rescue at the end": Scenario(
        schedule="every(1)", batches=(0, 2), overlap=1, nans=((1, 1, "after"),)
    ),
    "some leave when an average of few bits in flight is a rescue at the end": Scenario(
        averaging="quantized(4, bucket=16)", batches=(2, 0), overlap=2, nans=((0, 1, "after"),)
    ),
    "a rescue at the end is recorded twice": Scenario(
        averaging="easgd()", batches=(2, 0), overlap=2, nans=((0, 1, "after"),)
    ),
    "a rescue counts the batches of another moment": Scenario(
        schedule="every(1)", batches=(3, 0), overlap=1, model="batchnorm", nans=((0, 2, "gradient"),), resume_at=2
    ),
    # The lr in an averaging.
    "slow momentum by an lr of 0": Scenario(averaging=SLOWMO, schedule="every(1)", warmup=2),
    "slow momentum by the lr of a worker that is done": Scenario(averaging=SLOWMO, batches=(2, 6), warmup=5),
    "slow momentum by the lr of a worker whose rounds have ended": Scenario(
        averaging=SLOWMO, schedule="growing(lr_cap=1.0)", batches=(3, 8)
    ),
    # A worker of a fleet that runs out of data while its round is closed and others' are not.
    "a closed round that waits is launched as that of a worker with data": Scenario(
        averaging="outer()", schedule="per_worker([1, 3])", batches=(1, 1)
    ),
    "a closed round that waits is launched with the snapshot it closed with": Scenario(
        schedule="per_worker([3, 1])", batches=(5, 0), overlap=1
    ),
    "a closed round that waits while another skips a step": Scenario(
        averaging="sparse(0.2)", schedule="every(1)", batches=(2, 2), skips=((1, 2),)
    ),
}
