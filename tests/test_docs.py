"""The documentation holds: its code runs, its links lead somewhere, the reference is whole, and the site builds."""

from __future__ import annotations

import json
import re
import shutil
import sys
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import prsgd
from prsgd.cli import COMMANDS, EXAMPLES
from prsgd.cli.parser import Parser
from prsgd.lab.methods import METHODS
from tests import ranks
from tests.ranks import Program, free_port
from tools import docs

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in docs.ELSEWHERE)])
BLOCK = re.compile(r"^(?:<!-- (?P<marker>.*?) -->\n)?```(?:python|py)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
MARKERS = re.compile(r"not run: .+|run: (torchrun|elastic) (\d+)")


MODULES = [
    name
    for name in re.findall(r"^::: (\S+)$", (ROOT / "docs" / "reference" / "modules.md").read_text(), re.MULTILINE)
    if not name.startswith("prsgd.integrations.")
]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(launcher: str) -> list[tuple[str, str, int]]:
    """Every block of Python that this launcher runs: its page and number, its code, in how many processes."""
    found = []
    for page in PAGES:
        for number, block in enumerate(BLOCK.finditer(page.read_text()), start=1):
            marker = MARKERS.fullmatch(block["marker"] or "run: torchrun 1")
            assert marker is not None, f"{named(page)}: {block['marker']}"
            if marker[1] == launcher:
                found.append((f"{named(page)}, block {number}", block["code"], int(marker[2])))
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.ipynb")), ids=named)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    """Its cells in their order, as one program: a kernel would only take longer to start."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    said = "".join("".join(output.get("text", [])) for cell in cells for output in cell["outputs"])
    script = tmp_path / "cells.py"
    script.write_text("\n".join("".join(cell["source"]) for cell in cells))
    with Program(ranks.script, str(script), cwd=tmp_path, env={"MPLBACKEND": "agg"}) as program:
        out, err = program.communicate(250)
    assert program.process.exitcode == 0, err
    assert numbers_apart(out) == numbers_apart(said)  # what is shown is what these cells say


def numbers_apart(text: str) -> str:
    """Other processors round differently.

    >>> numbers_apart("loss  0.0131, accuracy 97.5%")
    'loss #, accuracy #%'
    """
    return re.sub(r" *[\d.e-]*\d", " #", text)


def test_no_block_is_overlooked() -> None:
    for page in PAGES:
        text = page.read_text()
        assert len(BLOCK.findall(text)) == len(re.findall(r"```py(?:thon)?\b", text)), named(page)


@pytest.mark.parametrize(("code", "processes"), [pytest.param(*run, id=name) for name, *run in blocks("torchrun")])
def test_a_block_of_python_runs(code: str, processes: int, tmp_path: Path) -> None:
    """In an empty folder, by itself: as ``python page.py``, or in processes that have torchrun's environment."""
    path = tmp_path / "page.py"
    path.write_text(code)
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}
    # A page that uses torch alone would look up this machine's name, which may take minutes where nobody answers.
    job["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    with ExitStack() as running:
        programs = []
        for rank in range(processes):
            env = {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
            program = Program(ranks.script, str(path), cwd=tmp_path, first=ranks.warm_launch, env=env)
            programs.append(running.enter_context(program))
        for program in programs:
            out, err = program.communicate(100)
            assert program.process.exitcode == 0, out + err


@pytest.mark.parametrize(("code", "processes"), [pytest.param(*run, id=name) for name, *run in blocks("elastic")])
def test_a_block_of_python_runs_where_workers_come_and_go(code: str, processes: int, tmp_path: Path) -> None:
    """As ``prsgd launch --elastic page.py`` starts it, with a lighthouse."""
    if find_spec("torchft") is None:
        pytest.skip("torchft is not installed: the extra [elastic]")
    path = tmp_path / "page.py"
    path.write_text(code)
    done = ranks.run_command(
        "launch", "--elastic", "--workers", str(processes), str(path), cwd=tmp_path, timeout_seconds=100
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_between_files_lead_somewhere(page: Path) -> None:
    """As one reads them without the site: files that are there, and headings by the rule of forges."""
    wrong = []
    for _, target, anchor in docs.LINK.findall(docs.FENCED.sub("", page.read_text())):
        if not urlsplit(target).scheme:
            file = page.parent / target
            if not file.exists() or (anchor and anchor[1:] not in headings(file)):
                wrong.append(target + anchor)
    assert not wrong


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings.

    >>> sorted(headings(ROOT / "CONTRIBUTING.md"))[:2]
    ['adding-a-part', 'changes']
    """
    titles = re.findall(r"^#+ (.*)$", docs.FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_every_page_is_in_the_navigation() -> None:
    _, nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:")
    listed = re.findall(r"^ +- (?:[^#\n]+: )?(\S+\.md)", nav, re.MULTILINE)
    pages = [place for place in docs.pages().values() if place.endswith(".md")]
    assert sorted(listed) == sorted(pages)


def test_the_reference_is_whole() -> None:
    listed = re.findall(r"^::: prsgd\.(\w+)$", (ROOT / "docs" / "reference" / "api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == prsgd.__all__


@pytest.mark.parametrize("name", prsgd.__all__)
def test_a_public_name_has_an_example(name: str) -> None:
    assert ">>> " in (getattr(prsgd, name).__doc__ or "")


@pytest.mark.parametrize("name", MODULES)
def test_a_name_in_a_module_has_an_example(name: str) -> None:
    """Those of integrations are scripts, which tests/test_integration_pages.py runs."""
    module, _, thing = name.rpartition(".")
    assert ">>> " in (getattr(import_module(module), thing).__doc__ or "")


def test_every_command_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    from prsgd.cli import main

    assert list(EXAMPLES) == list(COMMANDS)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert capsys.readouterr().out.splitlines()[-1] == f"example: {EXAMPLES['train']}"
    for name, example in EXAMPLES.items():
        with pytest.raises(SystemExit):
            main([name, "--help"])
        said = capsys.readouterr().out
        assert example in said
        assert all(len(line) <= 80 for line in said.splitlines()), name
        known = set(re.findall(r"--[\w-]+", said))
        assert set(re.findall(r"--[\w-]+", example)) <= known, name


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_text_says_what_each_option_is(name: str) -> None:
    """More than what holds without it; and a method's name can be copied from it."""
    parser = Parser(prog=name)
    import_module(f"prsgd.cli.{name}").add(parser)
    assert [action.dest for action in parser._actions if (action.help or "(").startswith("(")] == []
    if name in ("train", "compare"):
        assert set(METHODS) <= set(re.findall(r"[\w-]+", parser.format_help()))


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_site_builds(tmp_path: Path) -> None:
    """Strictly, so that zensical finds pages and anchors that are missing; and ours reads what it built."""
    if find_spec("zensical") is None:
        pytest.skip("zensical is not installed: the extra [docs]")
    shutil.copyfile(ROOT / "mkdocs.yml", tmp_path / "mkdocs.yml")
    for folder in ("src", "tools"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    assert docs.build(tmp_path) == []
    for page in ("index.html", "reference/api.html", "reference/command-line.html", "project/changelog.html"):
        assert (tmp_path / "site" / page).is_file()
    api = (tmp_path / "site" / "reference" / "api.html").read_text()
    assert all(f'id="prsgd.{name}"' in api for name in prsgd.__all__)
    assert "&gt;&gt;&gt; " in api
    assert "<blockquote>" not in api


def test_what_is_wrong_with_a_site_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#c">b</a><a href="none.html">?</a><script src="https://x/y.js">')
    (tmp_path / "b.html").write_text('<h1 id="b">b</h1><a href="a.html">a</a><a href="https://elsewhere">a link</a>')
    (tmp_path / "c.css").write_text("@font-face { src: url(https://fonts/x.woff) }")
    assert docs.wrong(tmp_path) == [
        "a.html: no anchor b.html#c", "a.html: no file none.html", "a.html loads https://x/y.js",
        "c.css loads https://fonts/x.woff",
    ]  # fmt: skip
