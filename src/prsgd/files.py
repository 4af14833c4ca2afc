"""The names of what lies in the folder of a run, of a comparison and of a report: nobody else spells them out."""

from __future__ import annotations

import re

CONFIG = "config.json"
"""What a run is; a folder with this file is a run's."""
SPLIT = "split.json"
"""How many samples of each group each worker has, and what the groups are."""
ENVIRONMENT = "environment.json"
CLUSTER = "cluster.toml"
"""The cluster that is modelled, if one is."""
RECORDS = "records.jsonl"
"""A line for each average and each evaluation."""
CHECKPOINTS = "checkpoints"
MODEL = "model.safetensors"
"""The final model's state_dict."""
SUMMARY = "summary.json"
"""How a run ended; it is written last."""
TRACE = "trace.json"
"""What all workers did when; each process writes its own as ``trace_of(rank)``."""
TRACES = "trace-*.json"
"""The pattern of what ``trace_of`` names."""
TENSORBOARD = "tensorboard"
ERROR = "error.txt"
"""The traceback of a surprise."""
STOP = "stop"
"""A file with this name asks a run's processes to stop when the epoch ends."""
LOCK = ".lock"
"""Held by the process that is training here."""

COMPARISON = "compare.json"
"""The configs of the runs that are compared; a folder with this file is a comparison's."""

REPORT = "report.html"
FIGURES = "figures"
TABLE = "table.csv"
CURVES = "curves.csv"

OURS = (
    CONFIG, SPLIT, ENVIRONMENT, CLUSTER, RECORDS, CHECKPOINTS, MODEL, SUMMARY, TRACE, TENSORBOARD, ERROR, STOP, LOCK,
    COMPARISON, REPORT, FIGURES, TABLE, CURVES,
)  # fmt: skip
"""All that we put into a folder: --overwrite removes these and nothing else."""


def trace_of(rank: int) -> str:
    """The trace that one process of a run writes.

    >>> trace_of(3)
    'trace-3.json'
    """
    return f"trace-{rank}.json"


def is_ours(name: str) -> bool:
    """Did we put this there? Also a file that was being written when its process was killed.

    >>> is_ours("summary.json"), is_ours(".summary.json.4242"), is_ours("trace-3.json"), is_ours("thesis.txt")
    (True, True, True, False)
    """
    plain = re.sub(r"^trace-\d+\.", "trace.", re.sub(r"^\.|\.\d+$", "", name))
    return name in OURS or plain in OURS
