"""Workers that come and go: real processes, real kills. What is averaged is checked against means by hand."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import prsgd
from prsgd.comm import lighthouse, parcel
from prsgd.comm.quorum import Caller, plan
from tests.crew import Answer, Crew, Died, Quadratic, hangs_while_it_is_told, reaches_the_lighthouse_alone
from tests.ranks import Program, command, is_alive, run_command, run_ranks

pytestmark = pytest.mark.skipif(find_spec("torchft") is None, reason="the extra elastic is not installed")


def walked(x: float, c: float, steps: int = 4, lr: float = 0.25) -> float:
    """Where steps of a worker lead from x."""
    for _ in range(steps):
        x = x - lr * (x - c)
    return x


def mean(x: float, workers: tuple[int, ...], steps: int = 4) -> float:
    """Of these workers, after a round that began at x."""
    return sum(walked(x, c, steps) for c in workers) / len(workers)


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-14)


def ready(crew: Crew, *ids: int, **options: Any) -> dict[int, Answer]:
    return {worker.id: worker.hear() for worker in crew.start(*ids, **options)}


def same(answers: dict[int, Answer]) -> Tensor:
    """Their model, which must be equal to the last bit."""
    first, *others = (answer.x for answer in answers.values())
    assert all(torch.equal(first, x) for x in others)
    return first


def come_in(crew: Crew, id: int, *others: int, rests: bool = False) -> tuple[dict[int, Answer], int]:
    """The others go on, round by round, until this worker is among them; and how many rounds that took: one, unless it
    ``rests``, or has rounds of its own to end."""
    crew.workers[id].await_call()
    for rounds in range(1, 20):
        answers = crew.step(4, others)
        if crew.workers[id].pipe.poll(5 if rests else 30):
            return {**answers, id: crew.workers[id].hear()}, rounds
    raise AssertionError("it did not come in")


def distributed(rank: int, options: dict[str, Any], rounds: int) -> Tensor:
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    with torch.no_grad():
        model.x.fill_(10.0 + rank)
    with prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(4), **options):
        for _ in range(4 * rounds + 2):
            optimizer.zero_grad()
            model(float(rank)).backward()
            optimizer.step()
    return model.x.detach()


@pytest.mark.parametrize("options", [{}, {"overlap": 2, "averaging": prsgd.outer(0.7, 0.5)}], ids=["mean", "outer"])
def test_without_a_failure_it_is_torch_distributed_to_the_last_bit(options: dict[str, Any]) -> None:
    with Crew(2, options, min_workers=2) as crew:
        ready(crew, 0, 1)
        crew.step(14)
        found = same(crew.end([0, 1]))
    assert torch.equal(found, run_ranks(distributed, 2, options, 3)[0])


@pytest.mark.parametrize("victim", [0, 2])
def test_a_kill_costs_no_round(victim: int) -> None:
    left = tuple(sorted({0, 1, 2} - {victim}))
    with Crew(3, {}, min_workers=2) as crew:
        for answer in ready(crew, 0, 1, 2).values():
            assert answer.x[0] == 10.0  # of worker 0
            assert all(end.startswith("0100007F:") for end in answer.listens)  # nothing beyond loopback
        x = mean(10.0, (0, 1, 2))
        assert same(crew.step(4))[0] == near(x)
        crew.step(3)
        crew.workers[victim].kill()
        answers = crew.step(1, left)
        assert same(answers)[0] == near(mean(x, left))
        assert all(answer.round == 2 for answer in answers.values())
        ended = crew.end(left)
        same(ended)
        assert all(answer.members == [(0, 1, 2), left] for answer in ended.values())
        gone = f"2 of 3 workers go on without {victim}: dead, cut off, or too slow"
        assert [ended[worker].said for worker in left] == [[gone], []]


def test_two_of_four_are_killed_while_an_average_travels() -> None:
    with Crew(4, {"overlap": 2}, min_workers=2) as crew:
        ready(crew, 0, 1, 2, 3)
        crew.step(5)
        crew.step(1, [1, 2, 3])  # the average of the second round has left, and waits for worker 0
        crew.workers[0].kill()
        crew.workers[2].kill()
        crew.step(6, [1, 3])
        ended = crew.end([1, 3])
        same(ended)
        # What worker 2 brought is not counted: no sum was made before it was gone.
        assert ended[1].members == [(0, 1, 2, 3), (1, 3), (1, 3), (1, 3)]


def test_a_worker_joins_and_counts_from_its_next_round() -> None:
    with Crew(3, {"averaging": prsgd.outer(0.5, 0.5, nesterov=False)}, min_workers=2) as crew:
        began = ready(crew, 0, 1, lr=0.125, start_seconds=0.5)
        fewer = "the run begins with 2 of 3 workers: the others did not come in time, and join when they do"
        assert [answer.said for answer in began.values()] == [[fewer], []]
        crew.step(4)
        crew.start(2, lr=0.5)
        answers, rounds = come_in(crew, 2, 0, 1)
        x = same(answers)
        assert [answers[i].round for i in range(3)] == [1 + rounds] * 3
        assert answers[2].lr == 0.125
        assert answers[2].step == 0
        # x <- x - lr u, with u <- momentum u + (x - mean): the newcomer knows x and u.
        begin, velocity, past = 10.0, 0.0, [10.0]
        for members in [*[(0, 1)] * (1 + rounds), (0, 1, 2)]:
            average = sum(walked(begin, c, lr=0.125) for c in members) / len(members)
            velocity = 0.5 * velocity + begin - average
            begin -= 0.5 * velocity
            past.append(begin)
        assert x[0] == near(past[-2])
        assert same(crew.step(4))[0] == near(past[-1])
        same(crew.end([0, 1, 2]))


def test_a_worker_that_was_killed_comes_back_as_another_process() -> None:
    with Crew(2, {"overlap": 1}, min_workers=1) as crew:
        ready(crew, 0, 1)
        crew.step(4)
        crew.workers[1].kill()
        crew.step(4, [0])
        crew.start(1)
        come_in(crew, 1, 0)
        crew.step(8)
        ended = crew.end([0, 1])
        same(ended)
        assert ended[0].members[:3] == [(0, 1), (0,), (0,)]
        assert ended[0].members[-1] == (0, 1)


def test_a_worker_that_hangs_is_left_out_and_comes_back_by_itself() -> None:
    with Crew(3, {"averaging": prsgd.outer(0.7, 0.5)}, min_workers=1) as crew:
        ready(crew, 0, 1, 2)
        for _ in range(4):
            crew.step(4)
        crew.workers[1].signal(signal.SIGSTOP)
        crew.workers[1].send(4)
        answers = crew.step(4, [0, 2])
        assert max(answer.seconds for answer in answers.values()) < 10
        crew.step(4, [0, 2])
        crew.workers[1].signal(signal.SIGCONT)
        answers, rounds = come_in(crew, 1, 0, 2)  # it ends its round of long ago: the others are ahead
        same(answers)
        assert {answer.round for answer in answers.values()} == {6 + rounds}
        same(crew.step(4))
        ended = crew.end([0, 1, 2])
        same(ended)
        assert ended[0].members[4:] == [(0, 2)] * (2 + rounds) + [(0, 1, 2)]


def left_out(crew: Crew, id: int, *others: int, steps: int = 4) -> None:
    """This worker is stopped in its round, of which it takes so many steps, while the others make an average."""
    for _ in range(4):
        crew.step(4)
    crew.workers[id].signal(signal.SIGSTOP)
    crew.workers[id].send(steps)
    crew.step(4, others)
    crew.workers[id].signal(signal.SIGCONT)


@pytest.mark.parametrize("fault", [hangs_while_it_is_told, reaches_the_lighthouse_alone])
def test_a_newcomer_that_cannot_come_in_does_not_hold_the_others(fault: Callable[[], None]) -> None:
    """They waited a minute for one, and for ever for the other."""
    with Crew(3, {}, min_workers=2) as crew:
        ready(crew, 0, 1, start_seconds=0.5)
        for _ in range(4):
            x = float(same(crew.step(4))[0])
        (new,) = crew.start(2, fault=fault)
        new.await_call()
        for _ in range(2):
            answers = crew.step(4, [0, 1])
            assert max(answer.seconds for answer in answers.values()) < 30
            x = mean(x, (0, 1))
            assert same(answers)[0] == near(x)
        if fault is hangs_while_it_is_told:
            new.signal(signal.SIGCONT)
        answers, _ = come_in(crew, 2, 0, 1, rests=True)
        x = float(same(answers)[0])
        assert same(crew.step(4))[0] == near(mean(x, (0, 1, 2)))
        ended = crew.end([0, 1, 2])
        same(ended)
        assert ended[0].members[4:6] == [(0, 1), (0, 1)]


def test_a_newcomer_that_hangs_in_its_first_round_is_held_to_the_others_limit() -> None:
    """It knew of no rounds, and told the lighthouse for a minute that it was well."""
    with Crew(3, {}, min_workers=2) as crew:
        ready(crew, 0, 1, start_seconds=0.5)
        for _ in range(4):
            crew.step(4)
        crew.start(2)
        come_in(crew, 2, 0, 1)
        answers = crew.step(4, [0, 1])
        assert max(answer.seconds for answer in answers.values()) < 30
        same(answers)
        crew.workers[2].send(4)
        answers, _ = come_in(crew, 2, 0, 1)
        same(answers)
        same(crew.end([0, 1, 2]))


@pytest.mark.parametrize(
    ("options", "steps"), [({}, 0), ({"overlap": 1}, 3), ({"averaging": prsgd.easgd(0.5)}, 0)], ids=["0", "1", "easgd"]
)
def test_a_look_of_a_worker_that_was_left_out_shows_the_average_with_which_it_comes_back(
    options: dict[str, Any], steps: int
) -> None:
    """It made the others' average a look, which ended the run for all; or it ended itself, with no word of why."""
    with Crew(3, options, min_workers=1) as crew:
        ready(crew, 0, 1, 2)
        left_out(crew, 1, 0, 2, steps=steps)
        crew.workers[1].hear()
        crew.workers[1].send("look")
        crew.workers[1].await_call()
        steps_taken = [crew.step(1, [0, 2]) for _ in range(4)]
        after = steps_taken[-1]
        shown = crew.workers[1].hear()
        if not options:
            assert torch.equal(shown, same(after))
        elif options.get("overlap"):  # what they brought
            # Their mean's way to 1 is a quarter shorter after each step: what they brought to one of these averages, or
            # to that of the round before, which travelled while it was left out.
            first = float(steps_taken[0][0].x[0] + steps_taken[0][2].x[0]) / 2
            brought = [1 + (first - 1) * 0.75**step for step in range(-2, 4)]
            assert any(shown[0] == near(mean) for mean in brought), (shown, brought)
        if options.get("overlap"):  # with which average it comes back is the others' pace
            crew.step(4)
            same(crew.end([0, 1, 2]))
            return
        assert {answer.round for answer in crew.step(4).values()} == {7}
        for id in range(3):
            crew.workers[id].send("look")
        looks = [crew.workers[id].hear() for id in range(3)]
        assert torch.equal(looks[0], looks[1])
        assert torch.equal(looks[0], looks[2])
        ended = crew.end([0, 1, 2])
        same(ended)
        assert ended[0].members[5:7] == [(0, 2), (0, 1, 2)]


@pytest.mark.parametrize(("options", "steps"), [({}, 4), ({"overlap": 2}, 3), ({"overlap": 2}, 2)])
def test_who_comes_back_at_the_last_average_has_ended_with_the_others(options: dict[str, Any], steps: int) -> None:
    """It went on to an average, and the others compared their models: different calls, an error for all."""
    with Crew(3, {**options, "done_timeout_seconds": 50.0}, min_workers=2) as crew:
        ready(crew, 0, 1, 2)
        left_out(crew, 1, 0, 2, steps=steps)
        crew.workers[1].await_call()
        for id in (0, 2):
            crew.workers[id].send("end")
        crew.workers[1].hear()
        crew.step(4 - steps, [1])
        crew.workers[1].send("end")
        same({id: crew.workers[id].hear() for id in range(3)})


def test_who_joins_at_the_last_average_has_ended_with_the_others() -> None:
    """It waited an hour for as many as the run must have."""
    with Crew(3, {"done_timeout_seconds": 50.0}, min_workers=2) as crew:
        ready(crew, 0, 1, start_seconds=0.5)
        crew.step(5)
        (new,) = crew.start(2)
        new.await_call()
        for id in (0, 1):
            crew.workers[id].send("end")
        new.hear()
        new.send("end")
        same({id: crew.workers[id].hear() for id in range(3)})


def test_who_comes_back_at_the_end_of_an_epoch_goes_on_with_the_others() -> None:
    with Crew(3, {}, min_workers=1) as crew:
        ready(crew, 0, 1, 2)
        left_out(crew, 1, 0, 2)
        crew.workers[1].await_call()
        for id in (0, 2):
            crew.workers[id].send("epoch")
        crew.workers[1].hear()
        crew.workers[1].send("epoch")
        x = same({id: crew.workers[id].hear() for id in range(3)})
        assert same(crew.step(4))[0] == near(mean(float(x[0]), (0, 1, 2)))
        ended = crew.end([0, 1, 2])
        same(ended)
        assert ended[0].members[-1] == (0, 1, 2)


def test_below_min_workers_the_run_waits() -> None:
    with Crew(2, {}, min_workers=2) as crew:
        ready(crew, 0, 1, start_seconds=1.5)
        x = same(crew.step(4))
        crew.workers[1].kill()
        crew.workers[0].send(4)
        with pytest.raises(TimeoutError):
            crew.workers[0].hear(2.5)
        (again,) = crew.start(1)
        answers = {1: again.hear(), 0: crew.workers[0].hear()}
        assert answers[0].said[0] == "worker 0 waits: 1 of at least 2 workers called"
        assert same(answers)[0] == near(walked(float(x[0]), 0))
        assert same(crew.step(4))[0] == near(mean(float(answers[0].x[0]), (0, 1)))
        same(crew.end([0, 1]))


def test_below_min_workers_for_too_long_is_an_error() -> None:
    with Crew(2, {"timeout_seconds": 2.0}, min_workers=2) as crew:
        ready(crew, 0, 1)
        crew.step(4)
        crew.workers[1].kill()
        with pytest.raises(Died, match=r"AverageTimeout: round 2, worker 0: .* 2 s: 1 of at least 2 workers called"):
            crew.step(4, [0])


def test_without_the_lighthouse_those_who_are_there_go_on() -> None:
    with Crew(3, {}, min_workers=1) as crew:
        ready(crew, 0, 1, 2)
        x = float(same(crew.step(4))[0])
        for _ in range(2):
            crew.lighthouse.kill()
            crew.lighthouse.join()
            x = mean(x, (0, 1, 2))
            assert same(crew.step(4))[0] == near(x)
            crew.light()
        crew.step(2)
        crew.workers[0].kill()
        assert same(crew.step(2, [1, 2]))[0] == near(mean(x, (1, 2)))  # the new one is found
        crew.lighthouse.kill()
        crew.workers[1].kill()
        with pytest.raises(Died, match=r"PeerError: round 5, .*lighthouse at .* is gone.*, saved after 4 rounds"):
            crew.step(4, [2])


def test_epochs_looks_and_models_that_are_not_finite_among_those_who_are_there() -> None:
    with Crew(3, {}, min_workers=2) as crew:
        ready(crew, 0, 1, 2)
        x = float(same(crew.step(4))[0])
        crew.workers[1].kill()
        crew.step(1, [0, 2])
        for id in (0, 2):
            crew.workers[id].send("look")
        for id in (0, 2):
            assert crew.workers[id].hear()[0] == near(mean(x, (0, 2), steps=1))
        crew.step(1, [0])  # and worker 2 has fewer batches
        for id in (0, 2):
            crew.workers[id].send("epoch")
        answers = {id: crew.workers[id].hear() for id in (0, 2)}
        x = (walked(x, 0, steps=2) + walked(x, 2, steps=1)) / 2
        assert same(answers)[0] == near(x)
        crew.step(3, [0, 2])
        crew.workers[2].send("nan")
        assert same(crew.step(1, [0, 2]))[0] == near(walked(x, 0))


def test_a_worker_dies_while_the_others_wait_for_its_last_batches() -> None:
    with Crew(3, {}, min_workers=1) as crew:
        ready(crew, 0, 1, 2)
        x = float(same(crew.step(4))[0])
        crew.step(2)
        for id in (0, 1):
            crew.workers[id].send("end")
        time.sleep(0.3)
        crew.workers[2].kill()
        assert same({id: crew.workers[id].hear() for id in (0, 1)})[0] == near(mean(x, (0, 1), steps=2))


def test_a_saved_run_goes_on_and_who_has_no_state_joins_it() -> None:
    options = {"averaging": prsgd.outer(0.7, 0.5), "overlap": 1}
    with Crew(3, options, min_workers=2) as crew:
        ready(crew, 0, 1, 2)
        crew.step(7)
        states = {}
        for id in range(3):
            crew.workers[id].send("state")
            states[id] = crew.workers[id].hear()
        crew.step(9)
        whole = same(crew.end([0, 1, 2]))
    with Crew(3, options, min_workers=2) as crew:
        for id in range(3):
            crew.start(id, state=states[id])
        assert all(worker.hear().round == 1 for worker in crew.workers.values())
        crew.step(9)
        assert torch.equal(same(crew.end([0, 1, 2])), whole)
    with Crew(3, options, min_workers=2) as crew:
        for id in range(2):
            crew.start(id, state=states[id], start_seconds=0.5)
        for id in range(2):
            crew.workers[id].hear()
        crew.step(1)
        crew.start(2)
        answers, rounds = come_in(crew, 2, 0, 1)
        assert answers[2].round == 2 + rounds
        crew.step(4)
        same(crew.end([0, 1, 2]))


def test_a_worker_with_another_model_is_refused_and_the_others_go_on() -> None:
    with Crew(3, {}, min_workers=2) as crew:
        ready(crew, 0, 1, start_seconds=0.5)
        crew.step(4)
        crew.start(2, model=Wider)
        with pytest.raises(Died, match=r"MismatchError: .*this worker has parameter 'x' \[5\].*another has .*\[3\]"):
            come_in(crew, 2, 0, 1)
        same(crew.step(4, [0, 1]))


class Wider(Quadratic):
    def __init__(self) -> None:
        super().__init__(5)


@pytest.mark.parametrize(
    ("averaging", "words"),
    [
        (prsgd.gossip("ring"), r"one sum, made or not, and gossip"),
        (prsgd.mean(wire=prsgd.half()), r"one sum, made or not, and mean.*use mean\(\) without a wire"),
        (prsgd.outer(of=prsgd.mean(wire=prsgd.sparse(0.1))), r"one sum"),
    ],
)
def test_averagings_that_are_more_than_a_sum_are_refused(averaging: Any, words: str) -> None:
    with Crew(3, {"averaging": averaging}) as crew:
        (worker,) = crew.start(0)
        with pytest.raises(Died, match=f"ValueError: .*{words}"):
            worker.hear()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"min_workers": 5}, r"min_workers must be at most num_workers, .* got 5 of 4"),
        ({"worker": 4}, r"worker must be .*got 4"),
        ({"worker": None}, r"num_workers and worker"),
        ({"lighthouse": "nowhere"}, r'lighthouse must be an address such as "127.0.0.1:29510", got .nowhere.'),
        ({"lighthouse": None}, r"TORCHFT_LIGHTHOUSE"),
        ({"timeout_seconds": 0}, r"timeout_seconds must be"),
    ],
)
def test_bad_input_is_one_line(arguments: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHFT_LIGHTHOUSE"):
        monkeypatch.delenv(name, raising=False)
    given = {"num_workers": 4, "worker": 0, "lighthouse": "127.0.0.1:1", **arguments}
    with pytest.raises(ValueError, match=words):
        prsgd.TorchFT(**given)


def test_no_lighthouse_and_no_torchft_are_one_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lighthouse, "CONNECT_SECONDS", 0.2)
    with pytest.raises(
        prsgd.PeerError, match=r"no lighthouse answers at http://127.0.0.1:1 .*torchft_lighthouse --bind"
    ):
        prsgd.TorchFT(2, worker=0, lighthouse="127.0.0.1:1")
    torchft = pytest.importorskip("torchft")
    unknown = ModuleType("torchft.coordination")
    unknown.LighthouseClient = type("LighthouseClient", (), {"quorum": print})  # type: ignore[attr-defined]
    monkeypatch.setattr(torchft, "coordination", unknown)
    with pytest.raises(prsgd.UsageError, match="LighthouseServer is none that TorchFT knows: it works with torchft-"):
        lighthouse.serve("127.0.0.1")
    with pytest.raises(prsgd.UsageError, match=r"none that TorchFT knows: it works with torchft-nightly>=2026.10.26"):
        prsgd.TorchFT(2, worker=0, lighthouse="127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(prsgd.UsageError, match=r"pip install 'prsgd\[elastic\]'"):
        prsgd.TorchFT(2, worker=0, lighthouse="127.0.0.1:1")


# Who takes part, of those that have met


def at(worker: int, calls: int = 3, newest: str = "a", **others: Any) -> Caller:
    told = {"call": "sum 3 float32", "offers": True, "peers": (0, 1, 2), **others}
    return Caller(f"{worker}:x", worker, calls=calls, newest=newest, **told)


def taking(*callers: Caller, min_workers: int = 1) -> tuple[tuple[int, ...], list[int]] | None:
    """Who brings numbers, and the workers that are behind."""
    found = plan("b", callers, min_workers=min_workers, num_workers=3)
    return None if found is None else (found.members, [found.callers[rank].worker for rank in found.behind])


def test_the_oldest_run_leads_however_many_calls_a_younger_one_has_made() -> None:
    """A worker that was started while all others evaluated had begun alone, and its untrained model won."""
    old, alone = at(0, calls=5, began=1.0, peers=(0,)), at(1, calls=90, newest="z", began=2.0, peers=(1,))
    assert taking(old, alone) == ((0,), [1])


def test_who_is_at_another_call_does_not_come_in() -> None:
    """Its numbers would not fit into the others' group: all hang, or gloo ends the process."""
    leader = at(0, peers=(0,))
    assert taking(leader, at(1, calls=1, newest="", call="gather 8", offers=False)) == ((0,), [])
    assert taking(leader, at(1, calls=0, newest="", call="", offers=False)) == ((0,), [1])


def test_below_min_workers_only_averages_wait() -> None:
    """At a look nobody can come in, so that all would wait for ever."""
    assert taking(at(0, gone=2), min_workers=2) is None
    assert taking(at(0, gone=2, offers=False), min_workers=2) == ((0,), [])


def test_who_could_not_come_in_is_waited_for_longer_the_next_time_and_rests_before() -> None:
    leaders = at(0, peers=(0, 1), limit=1.5), at(1, peers=(0, 1), limit=2.0)
    new = Caller("2:x", 2, failures=3)
    assert taking(*leaders, new) == ((0, 1), [2])
    assert taking(*leaders, replace(new, rests=True)) == ((0, 1), [])
    found = plan("b", [*leaders, new], min_workers=1, num_workers=3)
    assert found is not None
    assert found.limit == 16.0


def test_the_largest_min_workers_counts_for_all() -> None:
    assert taking(at(0, gone=2, min_workers=3)) is None


def test_who_takes_part() -> None:
    assert taking(at(0), at(1), at(2)) == ((0, 1, 2), [])
    assert taking(at(0), at(1)) is None
    assert taking(at(0), at(1, is_tired=True)) == ((0, 1), [])
    assert taking(at(0), at(1, gone=1)) == ((0, 1), [])
    assert taking(at(0, gone=1)) is None  # two are missing
    assert taking(at(0, gone=2)) == ((0,), [])
    assert taking(at(0, gone=2), min_workers=2) is None
    assert taking(at(0), at(1), at(2, calls=2)) == ((0, 1), [2])
    # They went on apart from each other: most of them stay, the other takes over what they have.
    assert taking(at(0, newest="z"), at(1), at(2)) == ((1, 2), [0])
    # Nobody comes in where no average is made.
    assert taking(at(0, offers=False), at(1, offers=False), at(2, calls=2)) == ((0, 1), [])
    with pytest.raises(prsgd.MismatchError, match="different calls"):
        taking(at(0), at(1), at(2, call="gather 8"))


def test_who_begins_a_run() -> None:
    new = [Caller(f"{worker}:x", worker) for worker in range(3)]
    assert taking(*new) == ((0, 1, 2), [])
    assert taking(*new[:2]) is None
    assert taking(new[0], replace(new[1], is_tired=True)) == ((0, 1), [])
    assert taking(*new, at(2)) == ((2,), [0, 1])  # the others began anew, and one process is enough for worker 2
    loaded = [replace(caller, launched=7) for caller in new[:2]]
    assert taking(*loaded, new[2]) == ((0, 1), [])


def test_what_is_told_travels_as_bytes() -> None:
    state: dict[str, Any] = {
        "a": torch.arange(6).view(2, 3),
        "b": [torch.tensor(1.5, dtype=torch.bfloat16), None, {"c": math.inf}],
    }
    words, numbers = parcel.packed(state)
    assert words.dtype == numbers.dtype == torch.uint8
    back = parcel.unpacked(words, numbers)
    assert torch.equal(back["a"], state["a"])
    assert back["b"][0] == 1.5
    assert back["b"][1:] == [None, {"c": math.inf}]
    with pytest.raises(ValueError, match="48 bytes was announced"):
        parcel.unpacked(words, numbers[:9])


PROGRAM = """
import os, signal, torch, prsgd
comm = prsgd.TorchFT(min_workers=1)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(2), comm=comm) as local:
    for step in range(12):
        if step == 5 and comm.workers.start == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
print(local.round, [record.members for record in local.records])
"""


def test_launch_starts_the_lighthouse_and_the_workers(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    done = run_command("launch", "--elastic", "--workers", "2", str(program), cwd=tmp_path, timeout_seconds=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "6 [(0, 1), (0, 1), (1,), (1,), (1,), (1,)]\n"
    assert "worker 0 was killed by SIGKILL; 1 left" in done.stderr


WAITING = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
open(f"{os.environ['RANK']}.pid", "w").write(str(os.getpid()))
time.sleep(100)
"""


def hang_ups_count() -> None:
    """Also where the tests run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("how", "code"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGKILL, -9)],
)
def test_when_launch_ends_so_do_its_workers(how: signal.Signals, code: int, tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text(WAITING)
    first = hang_ups_count
    with Program(command, "launch", "--elastic", "--workers", "2", "wait.py", cwd=tmp_path, first=first) as program:
        deadline = time.monotonic() + 60
        while len(pids := [int(text) for path in tmp_path.glob("*.pid") if (text := path.read_text())]) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        program.send_signal(how)
        _, said = program.communicate(60)
        assert program.poll() == code, said
        assert said.count("\n") == {"SIGKILL": 1, "SIGINT": 3}.get(how.name, 2)
    deadline = time.monotonic() + 60
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train.py"], "without --elastic processes are torchrun's"),
        (["--elastic", "nothing.py"], "nothing.py: no such file"),
        (["--elastic", "--workers", "0", "nothing.py"], "workers must be a whole number >= 1, got 0"),
    ],
)
def test_launch_refuses_in_one_line(args: list[str], words: str, tmp_path: Path) -> None:
    done = run_command("launch", *args, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert words in done.stderr
