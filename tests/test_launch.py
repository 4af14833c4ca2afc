"""launch(): ranks started here, their failures told rightly, and none left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import prsgd
from tests.problems import batch, model, train_fleet
from tests.ranks import Program, is_alive, script, warm_launch


def train(num_steps: list[int], period: int) -> tuple[list[int], torch.Tensor, int]:
    rows, _, fleet = train_fleet(num_steps, schedule=prsgd.every(period), overlap=1)
    return list(fleet.workers), rows, torch.get_num_threads()


def test_two_processes_with_four_workers_each_are_eight_in_one() -> None:
    found = prsgd.launch(train, processes=2, args=([9] * 8, 4))
    assert [workers for workers, _, _ in found] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [threads for _, _, threads in found] == [1, 1]
    rows, _, _ = train_fleet([9] * 8, schedule=prsgd.every(4), overlap=1)
    torch.testing.assert_close(torch.cat([rows for _, rows, _ in found]), rows, rtol=1e-11, atol=1e-13)


def fail(how: str, bad_rank: int, folder: str) -> None:
    rank = prsgd.init().workers.start
    Path(folder, str(rank)).write_text(str(os.getpid()))
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2)):
        for t in range(100_000):
            if rank == bad_rank and t == 5:
                if how == "raise":
                    raise KeyError("mine")
                if how == "exit":
                    os._exit(7)
                if how == "sys.exit":
                    sys.exit(8)
                os.kill(os.getpid(), signal.SIGKILL)
            x, y = batch(rank, t)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()


def alive(folder: Path) -> list[int]:
    return [pid for file in folder.iterdir() if is_alive(pid := int(file.read_text() or 0))]


@pytest.mark.parametrize(
    ("how", "bad_rank", "message"),
    [
        ("raise", 1, r"^rank 1 of 3 failed:\n\nTraceback(.|\n)*in fail\n(.|\n)*KeyError: 'mine'\n$"),
        ("exit", 2, "^rank 2 of 3 exited with code 7 before its function returned$"),
        ("sys.exit", 1, r"^rank 1 of 3 failed:\n\nTraceback(.|\n)*SystemExit: 8\n$"),
        ("kill", 0, "^rank 0 of 3 was killed by SIGKILL before its function returned$"),
    ],
)
def test_a_rank_that_fails(
    how: str, bad_rank: int, message: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if how != "kill":  # that one with new interpreters, which the others need not wait for
        request.getfixturevalue("warm_launch")
    with pytest.raises(prsgd.LaunchError, match=message):
        prsgd.launch(fail, processes=3, args=(how, bad_rank, str(tmp_path)))
    assert len(list(tmp_path.iterdir())) == 3
    assert alive(tmp_path) == []


def sleep(folder: str) -> None:
    Path(folder, str(prsgd.init().workers.start)).write_text(str(os.getpid()))
    time.sleep(100)


def launches(folder: str) -> None:
    try:
        prsgd.launch(sleep, processes=2, args=(folder,))
    except KeyboardInterrupt:
        print("interrupted")


SCRIPT = """
import sys
from tests.test_launch import launches
if __name__ == "__main__":
    launches(sys.argv[1])
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_when_the_parent_goes_so_do_the_ranks(how: signal.Signals, tmp_path: Path) -> None:
    path, folder = tmp_path / "script.py", tmp_path / "pids"
    path.write_text(SCRIPT)
    folder.mkdir()
    # One of the three with ranks that are new interpreters and its children, as a user has them.
    first = None if how == signal.SIGKILL else warm_launch
    with Program(script, str(path), str(folder), cwd=tmp_path, first=first) as parent:
        deadline = time.monotonic() + 120
        while len([f for f in folder.iterdir() if f.read_text()]) < 2:
            assert time.monotonic() < deadline
            assert parent.poll() is None
            time.sleep(0.05)
        parent.send_signal(how)
        said, _ = parent.communicate(120)
        assert said == ("interrupted\n" if how == signal.SIGINT else "")
        deadline = time.monotonic() + 120
        while alive(folder):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def nothing() -> None:
    pass


@pytest.mark.parametrize("processes", [0, -1, 1.5, "2"])
def test_number_of_processes(processes: Any) -> None:
    with pytest.raises(ValueError, match=rf"^processes must be a whole number >= 1, got {processes!r}$"):
        prsgd.launch(nothing, processes=processes)


def test_functions_that_cannot_be_sent() -> None:
    with pytest.raises(ValueError, match=r"fn must be a function at the top level of a module, got .*<lambda>"):
        prsgd.launch(lambda: None, processes=1)

    def inner() -> None:
        pass

    with pytest.raises(ValueError, match=r"fn must be a function at the top level of a module, got .*inner"):
        prsgd.launch(inner, processes=1)
    typed = "import prsgd\ndef f(): pass\nprsgd.launch(f, processes=1)"
    result = subprocess.run([sys.executable, "-c", typed], capture_output=True, text=True, timeout=120)
    assert "ValueError: fn must be importable in a new process, f was typed into an interpreter" in result.stderr


def too_many() -> None:
    prsgd.Fleet(model(), 2)


@pytest.mark.usefixtures("warm_launch")
def test_more_processes_than_workers() -> None:
    with pytest.raises(prsgd.LaunchError, match="got 2 workers for 3 processes"):
        prsgd.launch(too_many, processes=3)


def unsendable() -> Any:
    return lambda: None


@pytest.mark.usefixtures("warm_launch")
def test_a_result_that_cannot_be_sent() -> None:
    with pytest.raises(prsgd.LaunchError, match="rank 0 of 1 failed"):
        prsgd.launch(unsendable, processes=1)


def forking() -> None:
    if os.environ["RANK"] == "1":
        if os.fork() == 0:
            time.sleep(100)  # holds the rank's pipes open
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


@pytest.mark.timeout(90)  # while it lives
def test_a_killed_rank_is_noticed_though_its_child_lives() -> None:
    with pytest.raises(prsgd.LaunchError, match="rank 1 of 2 was killed by SIGKILL"):
        prsgd.launch(forking, processes=2)


def leaving(path: str) -> Any:
    import atexit

    def bye() -> None:
        time.sleep(0.2)  # the parent has the result by now
        Path(path).write_text("bye")

    atexit.register(bye)
    return 1


def unpackable() -> Any:
    return lambda: 1


@pytest.mark.usefixtures("warm_launch")
def test_what_pickle_does_not_take_and_what_is_no_function(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="args must be such that pickle takes them, got "):
        prsgd.launch(leaving, processes=1, args=(lambda: 1,))
    with pytest.raises(ValueError, match="fn must be a function, got 5"):
        prsgd.launch(5, processes=1)  # type: ignore[arg-type]
    with pytest.raises(prsgd.LaunchError, match="fn must return what pickle takes"):
        prsgd.launch(unpackable, processes=1)
    assert prsgd.launch(leaving, processes=1, args=(str(tmp_path / "x"),)) == [1]
    assert (tmp_path / "x").read_text() == "bye"
