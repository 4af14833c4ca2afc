"""A task of the user's own, by its file: everything that takes a task takes it, and what cannot be used is one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import prsgd
from prsgd import tasks
from prsgd.cli import main
from prsgd.errors import DataError
from prsgd.lab.config import Config
from prsgd.lab.folder import prepare
from prsgd.lab.progress import Stopped
from prsgd.lab.run import run
from prsgd.report import page

EXAMPLES = Path(__file__).parent.parent / "examples" / "tasks"
HEAD = """import torch, prsgd
from torch import nn
x, y = torch.randn(60, 3), torch.arange(60) % 2
loss = nn.functional.cross_entropy
def net(): return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
"""
GOOD = "task = prsgd.task(model=net, train=(x[:40], y[:40]), test=(x[40:], y[40:]), loss=loss, batch_size=2)"
SMALL = ["--workers", "2", "--steps", "6", "--look", "3"]


def write(folder: Path, text: str = GOOD, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(f"{HEAD}{text}\n")
    return path


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def train(folder: Path, path: object, *args: str) -> dict[str, Any]:
    assert main(["train", "--task", str(path), *SMALL, "--out", str(folder), *args]) == 0
    return summary(folder)


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line that it says."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(args)
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize("name", ["csv_task", "image_folder_task", "hf_task"])
def test_the_examples_are_compared(
    name: str, tmp_path: Path, warm_launch: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "hf_task":
        pytest.importorskip("transformers")
    if name != "csv_task":  # where one report is drawn
        monkeypatch.setattr(page, "write", lambda folders: folders[0] / "report.html")
    path, out = EXAMPLES / f"{name}.py", tmp_path / "out"
    args = ["--workers", "2", "--batch-size", "2", "--steps", "4", "--period", "2", "4", "--seeds", "1", "--jobs", "2"]
    assert main(["compare", "--task", str(path), *args, "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert f"{name}, " in said.err
    assert "accuracy %" in said.out
    runs = [summary(out / f"pr-sgd-period-{period}-seed-0") for period in (2, 4)]
    assert [found["rounds"] for found in runs] == [2, 1]
    assert {found["metric"] for found in runs} == {"accuracy"}
    if name == "csv_task":
        html = (out / "report.html").read_text()
        assert f" on {name}: period 2 and 4" in html
        assert f"--task {path}" in html
    assert len(path.read_text().splitlines()) <= 30


def test_the_page_shows_the_example() -> None:
    code = (EXAMPLES / "csv_task.py").read_text().partition('"""\n')[2]
    assert code in (EXAMPLES.parent.parent / "docs" / "own-task.md").read_text()


def test_the_csv_is_learned(tmp_path: Path) -> None:
    path = tmp_path / "csv_task.py"
    shutil.copy(EXAMPLES / "csv_task.py", path)
    shutil.copy(EXAMPLES / "seeds.csv", tmp_path)
    assert main(["train", "--task", str(path), "--workers", "4", "--out", str(tmp_path / "run")]) == 0
    assert summary(tmp_path / "run")["test_score"] > 0.9
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["task"], len(config["task_sha256"]), config["epochs"]) == (str(path), 64, 10)


def test_two_processes_give_the_same_bits_as_one(tmp_path: Path, warm_launch: None) -> None:
    """The file draws its data at random: alike in all processes."""
    path = write(tmp_path)
    one = train(tmp_path / "one", path)
    two = train(tmp_path / "two", path, "--processes", "2")
    assert one["weights_sha256"] == two["weights_sha256"]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_goes_on_from_another_folder_to_the_last_bit(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_launch: None
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path)
    whole = train(tmp_path / "whole", path.name, "--method", "pr-sgd-auto", "--processes", str(processes))
    config = Config(task=path.name, method="pr-sgd-auto", workers=2, steps=6, look=3, processes=processes).resolve()
    stopped = tmp_path / "stopped"
    if processes == 1:
        prepare(config, stopped)
        answers = iter([False] * 5 + [True] * 9)
        with pytest.raises(Stopped):
            run(config, stopped, should_stop=lambda: next(answers))
    else:  # as it is when its last part is lost
        shutil.copytree(tmp_path / "whole", stopped)
        (stopped / "summary.json").unlink()
    monkeypatch.chdir("/")
    assert main(["train", "--resume", str(stopped)]) == 0
    assert summary(stopped)["weights_sha256"] == whole["weights_sha256"]


def test_what_has_changed_is_not_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"x = torch.load({str(tmp_path / 'x.pt')!r}); {GOOD}"
    torch.save(torch.ones(60, 3), tmp_path / "x.pt")
    path = write(tmp_path, text)
    train(tmp_path / "run", path)
    (tmp_path / "run" / "summary.json").unlink()
    write(tmp_path, f"{text}  # better")
    said = refused(capsys, "train", "--resume", str(tmp_path / "run"))
    assert "task has changed since the run was begun" in said
    assert str(path) in said
    write(tmp_path, text)
    torch.save(torch.zeros(60, 3), tmp_path / "x.pt")
    tasks.by_path._task.cache_clear()  # another day, another process
    tasks.load.cache_clear()
    assert "data have changed since the run was begun" in refused(capsys, "train", "--resume", str(tmp_path / "run"))


def test_a_comparison_on_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_launch: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several methods and seeds, in processes that outlive a run; the report of an own metric that is an error."""
    monkeypatch.setattr(page, "write", lambda folders: folders[0] / "report.html")
    own = "def far(out, y): return (out[:, 0] - y).abs().mean()\n"
    own += GOOD.replace("loss=loss", "loss=lambda out, y: (out[:, 0] - y).square().mean(), metric=far")
    path = write(tmp_path, own.replace("metric=far", "metric=far, higher_is_better=False"))
    args = ["compare", "--task", str(path), *SMALL, "--methods", "pr-sgd", "pr-sgd-auto", "pr-sgd-timed"]
    more = ["--cluster", "mixed", "--seeds", "2", "--jobs", "2", "--out", str(tmp_path / "out"), "--json"]
    assert main([*args, *more]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["runs"]) == 6
    assert {(entry["metric"], entry["modelled_seconds"] > 0) for entry in found["runs"]} == {("error", True)}
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    done = next(entry for entry in found["runs"] if entry["label"] == "pr-sgd-auto")
    from safetensors.torch import load_file

    model.load_state_dict(load_file(tmp_path / "out" / f"pr-sgd-auto-seed-{done['config']['seed']}/model.safetensors"))
    data = tasks.find(str(path)).load()
    far = (model(data.test_x)[:, 0] - data.test_y).abs().mean().item()
    assert done["test_score"] == pytest.approx(far, rel=1e-5)


def test_probe_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["probe", "--task", str(write(tmp_path)), "--steps", "2", "--looks", "2", "--json"]
    assert main(args) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["parameters"], found["batch_size"]) == (26, 2)
    (tmp_path / "probe.json").write_text(json.dumps(found))
    assert main(["plan", "--workers", "4", "--steps", "1000", "--probe", str(tmp_path / "probe.json")]) == 0


def test_modules_names_and_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours").mkdir()
    both = (
        GOOD.replace("task =", "one =")
        + "\n"
        + GOOD.replace("task =", "two =").replace("net,", "{'a': net, 'b': net},")
    )
    write(tmp_path / "ours", f"from .helper import HELP\n{both}", "learning.py")
    (tmp_path / "ours" / "helper.py").write_text("HELP = 1\n")
    assert tasks.find("ours.learning:one").name == "ours.learning:one"
    assert tasks.short("ours.learning:one") == "ours.learning-one"
    assert train(tmp_path / "run", "ours.learning:two", "--model", "b")["rounds"] == 1
    write(tmp_path, f"from beside import HELP\n{both}")
    (tmp_path / "beside.py").write_text("HELP = 1\n")
    config = Config(task="mine.py:one").resolve()
    assert (config.task, config.model) == (f"{tmp_path}/mine.py:one", "net")
    assert config.resolve() == config
    assert list(tasks.find("mine.py:two").models) == ["a", "b"]


CASES = {
    "1 / 0": "{path}, line 6: ZeroDivisionError: division by zero",
    "def (": "{path}, line 6: SyntaxError",
    "raise SystemExit(3)": "{path}, line 6: SystemExit: 3",
    "task = prsgd.task(model=net, train=(x, y), test=(x, y))": "{path}, line 6: TypeError: task() missing 1 required "
    "keyword-only argument: 'loss'",
    "task = 3": "{path} holds none: it needs a line like task = prsgd.task(model=...",
    f"{GOOD.replace('task =', 'a =')}; {GOOD.replace('task =', 'b =')}": "{path} holds several: a, b; say which, as in "
    "{path}:a",
    GOOD.replace("x[:40], y[:40]", "x[:0], y[:0]"): "{path}, line 6: train must have at least one sample, got none",
    GOOD.replace("y[40:]", "y[41:]"): "{path}, line 6: test must have as many x as y, got 20 and 19",
    GOOD.replace("y[40:]", "['a'] * 20"): "{path}, line 6: test's y must be numbers, as a tensor or an array, got list",
    GOOD.replace("(x[:40], y[:40])", "x"): "{path}, line 6: train must be a pair (x, y), or a Dataset of such pairs, "
    "got float32 (60, 3)",
    GOOD.replace("model=net", "model=net()"): "{path}, line 6: model must be a class or a function without arguments",
    GOOD.replace("loss=loss", "loss=3"): "{path}, line 6: loss must be a function of the model's output and y, got int",
    GOOD.replace(
        "loss=loss", "loss=loss, metric='f1'"
    ): "{path}, line 6: metric must be one of 'auto', 'accuracy', got",
    GOOD.replace("loss=loss", "loss=loss, lr=0"): "{path}, line 6: lr must be a finite number > 0, got 0",
    GOOD.replace("loss=loss", "loss=lambda out, y: out"): "{path}: loss of int64 (2,): it must give one number as a "
    "tensor, got float32 (2, 2)",
    GOOD.replace("loss=loss", "loss=lambda out, y: torch.tensor(1.0)"): "{path}: loss of int64 (2,): it must depend on",
    GOOD.replace("loss=loss", "loss=lambda out, y: out.sum() / 0"): "{path}: loss of int64 (2,): it must be finite",
    GOOD.replace("model=net", "model=lambda: nn.Linear(4, 2)"): "{path}: model model of float32 (2, 3): RuntimeError: ",
    GOOD.replace("model=net", "model=lambda: nn.ReLU()"): "{path}: model model: it must make a torch.nn.Module with "
    "parameters that train, got ReLU",
    GOOD.replace("model=net", "model=lambda: nn.Linear(3, 1)").replace("loss=loss", "loss=lambda out, y: out.mean()"): (
        "{path}: metric of int64 (4,): accuracy needs a number for each class (n, classes) from the model, got float32"
    ),
    GOOD.replace("loss=loss", "loss=loss, augment=lambda x, generator: x[:1]"): "{path}: augment of float32 (2, 3): it "
    "must give 2 samples for 2, got float32 (1, 3)",
    GOOD.replace("loss=loss", "loss=lambda out, y: loss(out, y)[None]"): "{path}: loss of int64 (2,): it must give one "
    "number as a tensor, got float32 (1,): take its mean()",
    GOOD.replace("model=net", "model=lambda: nn.LazyLinear(2)"): "{path}: model model: its parameter 'weight' has no "
    "shape yet: give the layer its number of inputs",
    f"y[30] = 2; {GOOD}": "{path}: loss on train of int64 (4,): IndexError: Target 2 is out of bounds.",
    f"y[50] = 2; {GOOD}": "{path}: loss on test of int64 (4,): IndexError: Target 2 is out of bounds.",
    "y = y.float()\n"
    + GOOD.replace("model=net", "model=lambda: nn.Linear(3, 1)").replace("loss=loss", "loss=nn.functional.mse_loss"): (
        "{path}: loss of float32 (2,): Using a target size (torch.Size([2])) that is different to the input size "
        "(torch.Size([2, 1]))."
    ),
    GOOD.replace("x[40:]", "x[40:, :2]"): "{path}: model net on test of float32 (4, 2): RuntimeError: mat1",
    GOOD.replace(
        "loss=loss", "loss=loss, metric=lambda out, y: None"
    ): "{path}: metric of int64 (4,): it must give one number, got NoneType",
}


@pytest.mark.parametrize("text", CASES)
def test_what_cannot_be_used_is_one_line(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, text)
    said = refused(capsys, "compare", "--task", path.name, *SMALL)
    assert said.startswith(f"prsgd compare: error: task {CASES[text].format(path=path)}")
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.py"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.py", "none.py': No such file or directory"),
        ("mine.py:other", "mine.py holds none called 'other': task"),
        ("no.such:task", "task no.such:task cannot be found: ModuleNotFoundError: No module named 'no'"),
        ("nosuchmodule:task", "cannot be found: there is no module nosuchmodule here; a file is called mytask.py"),
        ("mine", "or a file of your own such as mytask.py, got 'mine'"),
    ],
)
@pytest.mark.parametrize("command", ["compare", "train", "probe"])
def test_what_is_not_there_is_one_line(
    command: str, name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    assert message in refused(capsys, command, "--task", name)
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.py"]


def test_labels_may_be_booleans(tmp_path: Path) -> None:
    text = GOOD.replace("loss=loss", "loss=lambda out, y: loss(out, y.long())").replace("y[", "(y > 0)[")
    assert train(tmp_path / "run", write(tmp_path, text))["rounds"] == 1


def test_what_prepares_a_batch_prepares_the_first_one_too(tmp_path: Path) -> None:
    """A task made by replacing parts of one that the package has, whose samples are bytes until they are prepared."""
    text = f"""import dataclasses
{GOOD.replace("task =", "floats =")}
data = floats.load()
whole = dataclasses.replace(data, train_x=(9 * data.train_x).char(), test_x=(9 * data.test_x).char())
task = dataclasses.replace(floats, load=lambda: whole, prepare=lambda x: x / 9)
del floats
"""
    assert train(tmp_path / "run", write(tmp_path, text))["rounds"] == 1


def test_models_whose_layers_share_weights_are_saved(tmp_path: Path) -> None:
    text = """class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(3, 2), nn.Linear(3, 2)
        self.other.weight = self.one.weight
    def forward(self, x):
        return self.one(x) + self.other(x)
"""
    train(tmp_path / "run", write(tmp_path, f"{text}{GOOD.replace('model=net', 'model=Tied')}"))
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(saved["one.weight"], saved["other.weight"])


def test_data_that_are_others_each_time_are_noticed(tmp_path: Path) -> None:
    path = write(
        tmp_path, f"import numpy\nx = torch.tensor(numpy.random.default_rng().random((60, 3))).float()\n{GOOD}"
    )
    config = Config(task=str(path)).resolve()
    tasks.by_path._task.cache_clear()  # as another process sees it
    tasks.load.cache_clear()
    with pytest.raises(DataError, match="does the file read or draw others each time"):
        tasks.load(config.task, None, config.data_sha256)


def test_what_a_file_prints_and_draws_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_rng_state()
    tasks.find(str(write(tmp_path, f"print('hello'); torch.manual_seed(3)\n{GOOD}")))
    assert torch.equal(before, torch.get_rng_state())
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "hello\n")  # --json promises nothing else on stdout


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return np.full(2, i), i


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def made(**parts: Any) -> Any:
    x = torch.zeros(4, 2)
    known: dict[str, Any] = {"model": lambda: nn.Linear(2, 1), "train": (x, x), "test": (x, x), "loss": nn.MSELoss()}
    return prsgd.task(**{**known, **parts})


def test_samples_come_as_tensors_arrays_or_datasets() -> None:
    data = made(train=Pairs(), test=TensorDataset(torch.ones(2, 2), torch.tensor([0, 1]))).load()
    assert data.train_x.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert (data.train_y.tolist(), data.test_y.tolist()) == ([0, 1, 2], [0, 1])
    assert (data.labels.tolist(), data.group_names) == ([0, 1, 2], ("0", "1", "2"))
    data = made(train=(np.zeros((4, 2)), [7, -100, 7, 7])).load()
    assert (data.labels.tolist(), data.group_names, data.group_word) == ([1, 0, 1, 1], ("-100", "7"), "class")
    data = made().load()
    assert (data.labels.tolist(), data.group_names, data.group_word) == ([0] * 4, ("all",), "sample")


def test_what_models_are_judged_by() -> None:
    labels = (torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))
    assert made().metric is None
    assert made(train=labels, metric=None).metric is None
    assert made(train=labels).metric.name == "accuracy"
    own = made(metric=lambda *_: 0.5)
    assert (own.metric.name, own.score_fn(torch.zeros(4), torch.zeros(4))) == ("score", 2.0)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"train": Stream()}, "train must have a length, got an IterableDataset"),
        ({"train": TensorDataset(torch.zeros(4))}, r"train must be a Dataset of pairs \(x, y\), got one of tuple"),
        ({"train": TensorDataset(torch.zeros(0), torch.zeros(0))}, "train must have at least one sample, got none"),
        ({"test": (torch.tensor(1), torch.tensor(1))}, "test's x must have the samples in front, got one number"),
        ({"model": {}}, "model must be at least one, got none"),
        ({"metric": 3}, 'metric must be "accuracy", a function of the model\'s output and y, or None, got 3'),
        ({"augment": "crop"}, "augment must be a function of x and a torch.Generator, got str"),
        ({"epochs": 0}, "epochs must be a whole number >= 1, got 0"),
        ({"optimizer": "adam"}, "optimizer must be one of 'sgd', 'adamw', got 'adam': did you mean 'adamw'"),
    ],
)
def test_bad_arguments(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(**parts)


def test_an_lr_goes_with_its_optimizer(tmp_path: Path) -> None:
    path = str(write(tmp_path, GOOD.replace("loss=loss", "loss=loss, lr=0.02")))
    assert Config(task=path).resolve().lr == 0.02
    assert Config(task=path, optimizer="adamw").resolve().lr == 0.001
