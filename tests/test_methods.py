"""The table of methods: every row can be trained, a new one needs nothing else, and what cannot work says why."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import prsgd
from prsgd.cli import main
from prsgd.cli.compare import variants
from prsgd.comm.base import Then
from prsgd.lab import methods
from prsgd.lab.config import Config
from prsgd.lab.folder import prepare
from prsgd.lab.methods import METHODS, Method, Parts
from prsgd.lab.run import run
from prsgd.report.places import far_below, places, seconds_on
from prsgd.report.read import read
from prsgd.report.series import baseline, group
from tests.test_report import make_run

pytestmark = pytest.mark.usefixtures("warm_launch")

ROOT = Path(__file__).parents[1]
QUICK = ["--workers", "4", "--epochs", "1", "--batch-size", "32"]


def test_reading_the_table_needs_no_torch() -> None:
    code = "import sys, prsgd.lab.methods; from prsgd.report import page; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def test_the_table_is_complete() -> None:
    _, table = (ROOT / "docs" / "reference" / "methods.md").read_text().split("| method | parts | |\n|---|---|---|\n")
    rows, _ = table.split("\n\n", 1)
    assert [row.split("`")[1] for row in rows.splitlines()] == list(METHODS)
    assert all(method.words.endswith(".") for method in METHODS.values())


def test_parts() -> None:
    shown = {name: str(method.build(methods.Settings(period=method.period or 1))) for name, method in METHODS.items()}
    assert shown["d-psgd"] == "every(1) + gossip(graph='ring')"
    assert shown["qsgd"] == "every(1) + mean(wire=quantized(bits=4, bucket=512))"
    assert shown["sparseloco"] == (
        "every(8) + outer(lr=1.0, momentum=0.0, nesterov=True, by_inner_lr=False, "
        "of=mean(wire=sparse(density=0.02, bits=2)))"
    )
    assert shown["local-adamw-averaged"] == shown["pr-sgd-momentum"]
    assert shown["des-loc"] == 'every(8) + mean(), optimizer_state={"exp_avg": 3, "exp_avg_sq": 6}'
    assert shown["pr-sgd-momentum"] == 'every(8) + mean(), optimizer_state="average"'


def test_methods_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.splitlines())
    for name, method in METHODS.items():
        assert f"{name}  ({method.reference})" in text
    assert "spectral gap 0.195 with 8 workers" in text
    assert "post_local(500, 8) + mean()\n    in a run of 1,000 steps\n" in text
    assert main(["methods", "d-psgd", "--workers", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["d-psgd"]["overlap"] == 1
    for args in (["methods", "d-psg"], ["methods", "d-psgd", "--workers", "1"]):
        with pytest.raises(SystemExit) as error:
            main(args)
        assert error.value.code == 2
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "d-psgd", "workers": 1}, r'method d-psgd: gossip\("ring"\) needs at least 2 workers, got 1'),
        ({"method": "d-psgd", "overlap": 2}, "overlap must be"),
        ({"method": "easgd", "weights": "steps"}, "method easgd takes no weights, got steps"),
        ({"method": "d-psgd", "weights": "steps"}, "method d-psgd takes no weights, got steps"),
        ({"method": "pr-sgd-momentum", "overlap": 2}, "overlap must be 0 or 1 with method pr-sgd-momentum, got 2"),
        ({"method": "qsdg"}, "did you mean 'qsgd'"),
        ({"method": "local-adamw", "optimizer": "sgd"}, "method local-adamw is one of adamw, got optimizer 'sgd'"),
        ({"method": "pr-sgd", "outer_lr": 0.5}, "method pr-sgd has no outer_lr, got 0.5"),
        ({"method": "easgd", "outer_momentum": 0}, "method easgd has no outer_momentum, got 0"),
        ({"method": "diloco", "outer_lr": 0.0}, "outer_lr must be a finite number > 0, got 0.0"),
        ({"method": "diloco", "outer_momentum": 1.0}, r"outer_momentum must be in \[0, 1\), got 1.0"),
        ({"method": "pr-sgd-timed"}, "needs to know how long a round lasts"),
    ],
)
def test_what_cannot_work_says_why(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**given).resolve()


def test_an_outer_lr_and_momentum_that_are_given_are_the_outer_optimizers() -> None:
    config = Config(method="diloco", outer_lr=1, outer_momentum=0).resolve()
    assert config.parts().averaging == prsgd.outer(1.0, 0.0)
    config = Config(method="sparseloco", outer_lr=0.4).resolve()
    assert config.parts().averaging == prsgd.outer(0.4, 0.0, of=prsgd.mean(wire=prsgd.sparse(0.02, bits=2)))
    assert Config(method="slowmo").resolve().parts().averaging == prsgd.outer(1.0, 0.7, False, True)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_adamw(name: str, tmp_path: Path) -> None:
    """A few steps: all workers end with one model, which has learned something."""
    config = Config(method=name, optimizer="adamw", workers=4, steps=12, lr=0.01, cluster="lan-1g").resolve()
    assert config.weight_decay == 0.1
    prepare(config, tmp_path)
    summary = run(config, tmp_path)
    assert summary.train_loss < summary.first_train_loss
    assert summary.rounds


def test_all_is_every_method() -> None:
    found = variants({"method": ["all"], "cluster": "lan-1g", "seeds": [1]})
    assert [c.method for c in found] == [name for name in METHODS if not name.startswith(("local-adamw", "des-loc"))]
    with_adamw = variants({"method": ["all"], "optimizer": "adamw", "cluster": "lan-1g", "seeds": [1]})
    assert [c.method for c in with_adamw] == list(METHODS)
    assert {c.method: (c.period, c.overlap) for c in found}["d-psgd"] == (1, 1)
    assert {c.method: c.label for c in found}["top-k"] == "top-k"


def train_here(config: Config, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config.resolve().to_json())
    run(config.resolve(), folder)


@pytest.mark.parametrize("name", METHODS)
def test_seconds_on_another_cluster_are_those_of_its_clock(name: str, tmp_path: Path) -> None:
    """What the report reckons from a run on lan-1g is what the clock says of a run on wan."""
    times = {}
    for cluster in ("lan-1g", "wan"):
        train_here(Config(method=name, workers=4, steps=20, cluster=cluster), tmp_path / cluster)
        (times[cluster],) = read([tmp_path / cluster])
    for made, asked in (("lan-1g", "lan-1g"), ("lan-1g", "wan"), ("wan", "lan-1g")):
        last = times[asked].last
        assert last is not None
        assert last.modelled_seconds is not None
        assert seconds_on(times[made], asked) == pytest.approx(last.modelled_seconds, rel=1e-6)


def test_methods_without_an_all_reduce_or_with_rounds_that_change_in_two_processes(tmp_path: Path) -> None:
    """As in one: the same loss, the same bytes."""
    for name in ("d-psgd", "top-k", "post-local", "qsr", "pr-sgd-auto"):
        train_here(Config(method=name, workers=4, epochs=1, batch_size=32), tmp_path / name / "one")
        args = ["train", "--method", name, "--processes", "2", *QUICK, "--out", str(tmp_path / name / "two")]
        assert main(args) == 0
        one, two = read([tmp_path / name])
        assert [(a.round, a.step, a.bytes_sent) for a in one.averages] == [
            (a.round, a.step, a.bytes_sent) for a in two.averages
        ]
        assert one.last is not None
        assert two.last is not None
        assert one.last.train_loss == pytest.approx(two.last.train_loss, rel=1e-4)


# A new method: this class would be a file in averaging/, and its row a row of the table.


@dataclass(frozen=True)
class halfway(prsgd.Averaging):
    """Move half of the way to the mean."""

    def launch(
        self, memory: Mapping[str, Any], comm: prsgd.Communicator, snap: Tensor, header: prsgd.Header
    ) -> prsgd.Work[prsgd.Landing]:
        own = snap.clone()

        def half(landing: prsgd.Landing) -> prsgd.Landing:
            return landing if landing.target is None else replace(landing, target=torch.lerp(own, landing.target, 0.5))

        return Then(prsgd.mean().launch(memory, comm, snap, header), half)


def test_a_new_method_is_a_file_and_a_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Method("Workers move half of the way to the mean.", "nobody", lambda _: Parts(prsgd.every(4), halfway()))
    monkeypatch.setitem(METHODS, "halfway", row)
    assert main(["methods", "halfway"]) == 0
    assert "every(4) + halfway()" in capsys.readouterr().out
    for method in ("halfway", "pr-sgd", "minibatch-sgd"):
        assert main(["train", "--method", method, *QUICK, "--out", str(tmp_path / method)]) == 0
    folders = [str(tmp_path / m) for m in ("halfway", "pr-sgd", "minibatch-sgd")]
    assert main(["report", *folders, "--out", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page" / "report.html").read_text()
    assert "Workers move half of the way to the mean." in page
    assert "Where each method lands" in page
    assert (tmp_path / "page" / "figures" / "methods.png").stat().st_size > 10_000


def test_a_method_knows_how_long_the_run_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where it is known: not yet when a config is checked."""
    seen = []

    def build(given: methods.Settings) -> Parts:
        seen.append(given.num_steps)
        return Parts(prsgd.every(given.num_steps // 2 if given.num_steps else 1), prsgd.mean())

    monkeypatch.setitem(METHODS, "twice", Method("Two averages.", "nobody", build))
    train_here(Config(method="twice", workers=4, epochs=2, batch_size=32), tmp_path / "run")
    num_steps = 2 * (1437 // (4 * 32))
    assert set(seen) == {None, num_steps}
    [made] = read([tmp_path / "run"])
    assert [average.step for average in made.averages] == [num_steps // 2, num_steps]


# The report's figure of methods


def test_places(tmp_path: Path) -> None:
    for seed, name in ((s, n) for s in (0, 1) for n in ("minibatch-sgd", "d-psgd", "pr-sgd")):
        period = 4 if name == "pr-sgd" else 1 if name == "d-psgd" else None
        make_run(
            tmp_path / f"{name}-{seed}", method=name, period=period, seed=seed, accuracies=(0.1, 0.8, 0.9 + seed / 100)
        )
    found = {place.name: place for place in places(group(read([tmp_path])))}
    assert list(found) == ["minibatch-sgd", "pr-sgd period 4", "d-psgd overlap 0"]
    assert found["pr-sgd period 4"].score.mean == pytest.approx(90.5)
    assert set(found["pr-sgd period 4"].seconds) == {"lan-1g", "wan"}
    assert found["pr-sgd period 4"].seconds["wan"] < found["minibatch-sgd"].seconds["wan"]
    base = baseline(group(read([tmp_path])))
    assert base is not None
    assert base.name == "minibatch-sgd"


def test_what_is_far_below_does_not_squeeze_the_others(tmp_path: Path) -> None:
    ends = {"minibatch-sgd": 0.97, "qsgd": 0.96, "terngrad": 0.975, "top-k": 0.965, "sign-sgd": 0.97, "one-shot": 0.6}
    for name, end in ends.items():
        period = None if name in ("minibatch-sgd", "one-shot") else 1
        make_run(tmp_path / name, method=name, period=period, accuracies=(0.1, 0.5, end))
    found = places(group(read([tmp_path])))
    assert [place.name for place in far_below(found)] == ["one-shot"]
    assert far_below([place for place in found if place.name != "one-shot"]) == []


def test_places_without_seconds_where_speeds_matter(tmp_path: Path) -> None:
    for name in ("minibatch-sgd", "easgd", "pr-sgd"):
        make_run(tmp_path / name, method=name, period=None if name == "minibatch-sgd" else 4, cluster="mixed")
    assert [place.seconds for place in places(group(read([tmp_path])))] == [{}, {}, {}]
    assert places(group(read([tmp_path / "easgd", tmp_path / "pr-sgd"]))) == []
