"""A cluster as numbers: presets by name, and files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prsgd import _toml, units
from prsgd._check import nearest, positive, shown, whole_number
from prsgd.comm.links import LINK_SHAPES, Link, bytes_summed


@dataclass(frozen=True)
class Cluster:
    """N workers and what connects them.

    >>> two = Cluster("two", speeds=(2.0, 1.0), step_seconds=0.1, bytes_per_second=125e6)
    >>> two.slowest_step_seconds, two.link.average_seconds(125_000_000, workers=2)
    (0.1, 1.0)
    """

    name: str
    speeds: tuple[float, ...]
    """One per worker; 1 takes ``step_seconds`` for a step, 2 half of it."""
    step_seconds: float
    bytes_per_second: float
    """Of the slowest worker's link."""
    latency_seconds: float = 0.0
    shape: str = "ring"
    jitter: float = 0.0
    """Standard deviation of the logarithm of a step's time: 0.1 is a little, 0.5 makes stragglers."""
    copy_seconds: float = 0.0
    """What an average costs a worker beside the transfer: taking the snapshot, writing the mean."""

    @property
    def link(self) -> Link:
        return Link(self.bytes_per_second, self.latency_seconds, self.shape)

    @property
    def slowest_step_seconds(self) -> float:
        return self.step_seconds / min(self.speeds)

    def average_seconds(self, bytes_sent: int, server_bytes_sent: int = 0, hops: int = 0) -> float:
        """Of an average for which each worker puts so many bytes on the wire: a sum, by whatever shape its bytes were
        counted, or ``hops`` messages one after another."""
        n = len(self.speeds)
        if n == 1:
            return 0.0
        if hops:
            return self.link.messages_seconds(bytes_sent, hops=hops)
        return self.link.average_seconds(bytes_summed(n, bytes_sent, server_bytes_sent), workers=n)


_LAN = {"step_time": "20ms", "bandwidth": "1Gbit", "latency": "0.1ms"}
PRESETS: dict[str, dict[str, Any]] = {
    "lan-1g": _LAN,
    "lan-10g": {**_LAN, "bandwidth": "10Gbit", "latency": "0.05ms"},
    "wan": {**_LAN, "bandwidth": "100Mbit", "latency": "50ms"},
    "datacenter": {**_LAN, "bandwidth": "100Gbit", "latency": "0.01ms"},
    "paper": {"step_time": "10ms", "bandwidth": "10GB/s", "latency": "0.01ms"},
    "mixed": {**_LAN, "speeds": [4, 2, 1, 1]},
    "stragglers": {**_LAN, "jitter": 0.5},
}
"""20 ms a step unless the machine is said to be faster; ``mixed`` is for any number of workers, in that proportion."""
KEYS = ("name", "step_time", "speeds", "bandwidth", "latency", "shape", "jitter", "copy_time")


def load(what: str, workers: int) -> Cluster:
    """A preset by its name, or a TOML file.

    >>> load("mixed", 8).speeds
    (4.0, 4.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0)
    >>> load("mixd", 8)
    Traceback (most recent call last):
    ValueError: cluster must be a file or one of lan-1g, lan-10g, wan, datacenter, paper, mixed, stragglers, got \
'mixd': did you mean 'mixed'?
    """
    whole_number("workers", workers, at_least=1)
    if what in PRESETS:
        content = dict(PRESETS[what])
        pattern = content.get("speeds", [1])
        content["speeds"] = [pattern[i * len(pattern) // workers] for i in range(workers)]
        return _made(what, {"name": what, **content}, workers)
    path = Path(what)
    if not path.is_file():
        raise ValueError(f"cluster must be a file or one of {', '.join(PRESETS)}, got {what!r}{nearest(what, PRESETS)}")
    content = _toml.read(path, KEYS)
    return _made(str(path), {"name": path.stem, **content}, workers)


def placed(what: str) -> str:
    """A preset's name as it is, a file by its whole path: a run may be continued from another folder.

    >>> placed("mixed"), placed("/a/b/../c.toml")
    ('mixed', '/a/c.toml')
    """
    return what if what in PRESETS or not Path(what).suffix else str(Path(what).resolve())


def write(cluster: Cluster, path: Path) -> None:
    """As a file that ``load`` reads.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "two.toml"
    >>> two = Cluster("two", speeds=(2.0, 1.0), step_seconds=0.1, bytes_per_second=125e6)
    >>> write(two, path)
    >>> load(str(path), workers=2) == two
    True
    """
    lines = [
        f'name = "{cluster.name}"',
        f'step_time = "{cluster.step_seconds * 1e3:.9g}ms"  # of a worker with speed 1',
        f"speeds = [{', '.join(f'{speed:.6g}' for speed in cluster.speeds)}]",
        f"jitter = {cluster.jitter:.6g}  # standard deviation of the logarithm of a step's time",
        f'bandwidth = "{cluster.bytes_per_second / 1e6:.9g}MB/s"',
        f'latency = "{cluster.latency_seconds * 1e3:.9g}ms"  # of a message',
        f'shape = "{cluster.shape}"',
        f'copy_time = "{cluster.copy_seconds * 1e3:.9g}ms"  # of snapshot and landing, which nothing hides',
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _made(source: str, content: Mapping[str, Any], workers: int) -> Cluster:
    try:
        return Cluster(
            name=str(content["name"]),
            step_seconds=_seconds("step_time", _of(content, "step_time"), above_zero=True),
            speeds=_speeds(content.get("speeds", [1] * workers), workers),
            bytes_per_second=_bandwidth(_of(content, "bandwidth"), workers),
            latency_seconds=_seconds("latency", content.get("latency", "0ms")),
            shape=_shape(content.get("shape", "ring")),
            jitter=_jitter(content.get("jitter", 0.0)),
            copy_seconds=_seconds("copy_time", content.get("copy_time", "0ms")),
        )
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _of(content: Mapping[str, Any], key: str) -> Any:
    if key not in content:
        raise ValueError(f"{key} is missing")
    return content[key]


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a text with a unit, got {value!r}")
    return value


def _seconds(key: str, value: Any, *, above_zero: bool = False) -> float:
    return units.seconds(key, _text(key, value), above_zero=above_zero)


def _speeds(value: Any, workers: int) -> tuple[float, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"speeds must be a list with one number per worker, got {value!r}")
    if len(value) != workers:
        raise ValueError(f"speeds must have one entry per worker: {workers} workers, got {len(value)}")
    return tuple(positive(f"speeds[{i}]", speed) for i, speed in enumerate(value))


def _bandwidth(value: Any, workers: int) -> float:
    """One for all, or one per worker, of which the slowest counts."""
    if not isinstance(value, list):
        return units.bytes_per_second("bandwidth", _text("bandwidth", value))
    if len(value) != workers:
        raise ValueError(f"bandwidth must have one entry, or one per worker: {workers} workers, got {len(value)}")
    return min(units.bytes_per_second(f"bandwidth[{i}]", _text(f"bandwidth[{i}]", one)) for i, one in enumerate(value))


def _shape(value: Any) -> str:
    if value not in LINK_SHAPES:
        raise ValueError(f"shape must be one of {', '.join(LINK_SHAPES)}, got {value!r}")
    return str(value)


def _jitter(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 5:
        raise ValueError(f"jitter must be a number from 0 to 5, got {shown(value)}")
    return float(value)
