"""Clusters as numbers: what a run would take on machines that are not here."""

from prsgd.cluster.clock import ClusterClock, Sleeper
from prsgd.cluster.model import PRESETS, Cluster, load, placed, write

__all__ = ["PRESETS", "Cluster", "ClusterClock", "Sleeper", "load", "placed", "write"]
