"""Checkpoints: what comes back is what was saved, and what is damaged is said."""

from __future__ import annotations

import json
import math
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from prsgd.errors import CheckpointError
from prsgd.lab.checkpoint import Checkpoints, fingerprint, newest_common
from prsgd.saving.states import KEEP, write

STATE: dict[str, Any] = {
    "step": 7,
    "lr": 0.1 + 0.2,
    "inf": math.inf,
    "none": None,
    "flag": True,
    "state": {0: {"momentum_buffer": torch.randn(3, 4).t()}, 1: {"momentum_buffer": None}},
    "list": [1, [torch.tensor(5), "tensor"], {"tensor": "a text", "items": []}],
    "bytes": torch.arange(5, dtype=torch.uint8),
    "empty": torch.zeros(0, 3, dtype=torch.float64),
}


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(alike, a, b))
    return type(a) is type(b) and bool(a == b)


def test_what_comes_back_is_what_was_saved(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, STATE)
    assert checkpoints.whole() == [7]
    assert alike(checkpoints.load(7), STATE)


def test_a_state_stays_whole_where_there_is_no_space_to_write_it_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, {"numbers": torch.ones(10)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        for step in (7, 8):
            with pytest.raises(OSError, match="File too large"):
                checkpoints.save(step, {"numbers": torch.ones(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoints.whole() == [7]
    assert torch.equal(checkpoints.load(7)["numbers"], torch.ones(10))
    assert [path.name for path in tmp_path.rglob("step-*")] == ["step-00000007"]
    assert not list(tmp_path.rglob(".*"))


def test_what_was_just_saved_is_kept_also_where_others_are_newer(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (10, 15, 20, 3):
        checkpoints.save(step, {"step": step})
    assert 3 in checkpoints.whole()


def test_what_is_not_plain_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="plain values and tensors, got set"):
        Checkpoints(tmp_path).save(1, {"a": {1, 2}})


def test_the_last_ones_are_kept_for_each_rank(tmp_path: Path) -> None:
    ranks = [Checkpoints(tmp_path, rank=r) for r in range(2)]
    for step in range(10, 15):
        for checkpoints in ranks:
            checkpoints.save(step, {"step": step})
    assert [c.whole() for c in ranks] == [list(range(15 - KEEP, 15))] * 2
    assert ranks[1].load(14) == {"step": 14}


def damage(path: Path, kind: str) -> None:
    place = path / "checkpoints" / "step-00000002"
    if kind == "bit":
        content = bytearray((place / "rank-0.safetensors").read_bytes())
        content[-1] ^= 1
        (place / "rank-0.safetensors").write_bytes(content)
    elif kind == "truncated":
        (place / "rank-0.json").write_bytes((place / "rank-0.json").read_bytes()[:-2])
    elif kind == "missing":
        (place / "rank-0.json").unlink()
    elif kind == "manifest":
        (place / "manifest-0.json").write_text("{")
    elif kind == "unfinished":
        (place / "manifest-0.json").unlink()


@pytest.mark.parametrize("kind", ["bit", "truncated", "missing", "manifest"])
def test_a_damaged_one_is_named_and_the_previous_used(tmp_path: Path, kind: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {"x": torch.ones(3) * step})
    damage(tmp_path, kind)
    with pytest.warns(UserWarning, match="step-00000002.*it is passed over"):
        assert checkpoints.whole() == [1]
    (tmp_path / "checkpoints" / "step-00000001" / "rank-0.json").write_text("x")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
        checkpoints.whole(on_damage=lambda _: None)


def test_an_unfinished_one_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {})
    damage(tmp_path, "unfinished")
    assert checkpoints.whole() == [1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "has the format 2, this version of prsgd reads up to 1"),
        ({"sha256": {"../../etc/passwd": "0"}}, r"lists \['../../etc/passwd'\], not "),
        ({"sha256": None}, "lists None, not "),
    ],
)
def test_manifests_of_another_kind_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {})
    path = tmp_path / "checkpoints" / "step-00000003" / "manifest-0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=message):
        checkpoints.whole()


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    write(tmp_path / "a", b"one")
    with pytest.raises(TypeError):
        write(tmp_path / "a", "not bytes")  # type: ignore[arg-type]
    assert (tmp_path / "a").read_bytes() == b"one"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_fingerprints_see_the_last_bit() -> None:
    x = torch.ones(3)
    y = x.clone()
    y[1] = torch.nextafter(y[1], torch.tensor(2.0))
    assert fingerprint([x, torch.tensor(1)]) == fingerprint([x.clone(), torch.tensor(1)]) != fingerprint([y])


def test_what_a_run_does_not_continue_from_is_removed(tmp_path: Path) -> None:
    ranks = [Checkpoints(tmp_path, rank=r) for r in range(2)]
    for step in (1, 2):
        for checkpoints in ranks:
            checkpoints.save(step, {"step": step})
    damage(tmp_path, "bit")
    with pytest.warns(UserWarning, match="passed over"):
        whole = ranks[0].whole()
    ranks[0].forget_all_but(whole)
    assert ranks[0].whole() == [1]
    assert ranks[1].whole() == [1, 2]  # each process removes its own
    ranks[1].forget_all_but([1])
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    ranks[0].save(2, {})
    assert ranks[0].whole() == [1, 2]


def test_the_newest_that_all_have() -> None:
    here = Path("here")
    assert newest_common([[1, 2, 3], [2, 3, 4]], here) == 3
    assert newest_common([[], []], here) is None
    assert newest_common([[5], []], here) is None  # killed while the first one was written
    with pytest.raises(CheckpointError, match="the processes' checkpoints in here have no step in common"):
        newest_common([[5], [6]], here)
