"""What models are judged by on data that nobody trained on: how it is called, written and compared. Needs no torch.

A task names one of these; evaluations and summaries hold its name beside the number, and what shows them looks here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One number of a model; ``shown`` times as large where people read it."""

    name: str
    higher_is_better: bool
    column: str
    """Over a column of a table in text."""
    axis: str
    """Beside an axis, and over a column of a page."""
    live: str
    """Over a column while it runs, and before the number in a line."""
    heading: str
    """Of its figure."""
    caption: str
    plain: str
    """As one number is written while it runs."""
    shown: float = 1.0
    digits: int
    """Behind the point, of a mean with its deviation in a table."""
    value: str
    """As it is written in a sentence, once it is ``shown`` times as large."""
    said: str
    """The same without an article, as a run says it in the end."""
    amount: str
    """What a run has reached: a sentence's part around the value."""
    better: str
    """What a run that has the better number has done, to the one it is compared with."""
    best: str
    difference: str
    """What noise can make of it where there is one seed."""
    least: float
    """What is nearer than this counts as equal, however alike the seeds are."""
    most: float
    """What is further behind has not reached it, however much the seeds differ: noise is no excuse."""
    relative: bool
    """Are ``least`` and ``most`` shares of the number that is to be reached?"""

    def of(self, value: float) -> str:
        """
        >>> ACCURACY.of(0.974), BITS_PER_BYTE.of(1.5)
        ('97.4%', '1.5000')
        """
        return self.plain.format(value)

    def is_better(self, value: float, other: float) -> bool:
        """
        >>> ACCURACY.is_better(0.9, 0.8), BITS_PER_BYTE.is_better(2.0, 1.5)
        (True, False)
        """
        return value > other if self.higher_is_better else value < other


ACCURACY = Metric(
    name="accuracy",
    higher_is_better=True,
    column="accuracy %",
    axis="test accuracy (%)",
    live="test acc.",
    heading="Test accuracy against epochs",
    caption="As Figure 4 of the paper (Yu, Yang, Zhu 2019). The share of the test samples, which nobody trained on, "
    "that the consensus gets right; higher is better.",
    plain="{:.1%}",
    shown=100.0,
    digits=2,
    value="{:.1f} %",
    said="test accuracy {}",
    amount="a test accuracy of {}",
    better="was more accurate than",
    best="the most accurate",
    difference="differences under about a point",
    least=0.2,
    most=0.5,
    relative=False,
)
BITS_PER_BYTE = Metric(
    name="bits per byte",
    higher_is_better=False,
    column="bits/byte",
    axis="bits per byte",
    live="bits/byte",
    heading="Bits per byte against epochs",
    caption="How many bits the consensus needs for a byte of text that nobody trained on: its cross entropy there, "
    "over ln 2. Lower is better; 8 is what guessing costs.",
    plain="{:.4f}",
    digits=4,
    value="{:.3f}",
    said="{} bits per byte",
    amount="{} bits per byte",
    better="needed fewer bits per byte than",
    best="the best",
    difference="differences under about a hundredth",
    least=0.005,
    most=0.01,
    relative=True,
)
SCORE = Metric(
    name="score",
    higher_is_better=True,
    column="score",
    axis="test score",
    live="test score",
    heading="Test score against epochs",
    caption="What the task's own metric says of the consensus on the test samples, which nobody trained on; higher is "
    "better.",
    plain="{:.4g}",
    digits=4,
    value="{:.4g}",
    said="test score {}",
    amount="a test score of {}",
    better="had a better score than",
    best="the best",
    difference="small differences",
    least=0.005,
    most=0.01,
    relative=True,
)
ERROR = replace(
    SCORE,
    name="error",
    higher_is_better=False,
    column="error",
    axis="test error",
    live="test error",
    heading="Test error against epochs",
    caption=SCORE.caption.replace("higher", "lower"),
    said="test error {}",
    amount="a test error of {}",
    better="had a smaller error than",
)
"""These two are a user's own, of which only the direction is known."""
TRAINING_LOSS = Metric(
    name="training loss",
    higher_is_better=False,
    column="train loss",
    axis="training loss",
    live="train loss",
    heading="Training loss against epochs",
    caption="As Figure 3 of the paper (Yu, Yang, Zhu 2019). The loss is that of the consensus, the average of all "
    "workers' models; lower is better. Lines that lie on each other mean that averaging less often cost nothing.",
    plain="{:.4f}",
    digits=4,
    value="{:.3g}",
    said="training loss {}",
    amount="a training loss of {}",
    better="reached a lower training loss than",
    best="the best",
    difference="small differences",
    least=0.02,
    most=0.05,
    relative=True,
)
"""What stands in for a metric where a task has none."""

METRICS = {metric.name: metric for metric in (ACCURACY, BITS_PER_BYTE, SCORE, ERROR)}


def find(name: str | None) -> Metric:
    """The metric of this name; the training loss where there is none.

    >>> find("bits per byte").higher_is_better, find(None).name
    (False, 'training loss')
    """
    return METRICS.get(name or "", TRAINING_LOSS)
