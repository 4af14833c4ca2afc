"""The paper's recipe for the lr, as numbers: for runs that follow it, and for reports that look whether they did."""

from __future__ import annotations

LR_DROPS = (1 / 2, 11 / 12)
"""Fractions of a run at which the lr is divided by 10: epochs 150 and 275 of 300 in the paper."""
