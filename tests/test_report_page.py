"""Words, figures and the page: what is written, and what a reader sees and clicks in a real browser."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from matplotlib.figure import Figure as Drawing
from playwright.sync_api import Browser, Page, sync_playwright

from prsgd.report import about
from prsgd.report import page as report
from prsgd.report.figures import FIGURES as ALL
from prsgd.report.figures import draw, verified
from prsgd.report.figures.base import Figure, applying
from prsgd.report.series import Group
from tests.test_report import grouped, make_comparison, make_run

pytestmark = pytest.mark.usefixtures("drawn_once")

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
FIGURES = ["training-loss", "test-accuracy", "loss-against-bytes", "drift"]


REST = "--epochs 2 --batch-size 8 --lr 0.1 --momentum 0.9 --optimizer sgd"
START = "--task digits --model mlp"
Kind = tuple[str, int | None, int, int]


@pytest.mark.parametrize(
    ("kinds", "lines"),
    [
        (
            [("pr-sgd", period, 0, seed) for period in (1, 4) for seed in (0, 1)],
            [f"compare {START} --workers 4 --period 1 4 {REST} --seeds 2"],
        ),
        (
            [("minibatch-sgd", None, 0, 0), ("pr-sgd", 4, 0, 0), ("pr-sgd", 8, 0, 0)],
            [f"compare {START} --method minibatch-sgd pr-sgd --workers 4 --period 4 8 {REST} --seeds 1"],
        ),
        (
            [("pr-sgd", 4, overlap, seed) for overlap in (0, 1) for seed in (3, 5)],
            [f"compare {START} --workers 4 --period 4 --overlap 0 1 {REST} --seeds 3 5"],
        ),
        (
            [("pr-sgd", 4, 0, 0), ("pr-sgd", 8, 1, 0)],  # not all periods with all overlaps
            [
                f"compare {START} --workers 4 --period 4 {REST} --seeds 1",
                f"compare {START} --workers 4 --period 8 --overlap 1 {REST} --seeds 1",
            ],
        ),
        (
            [("pr-sgd", 4, 0, 0), ("pr-sgd", 8, 0, 1)],
            [
                f"train {START} --workers 4 --period 4 {REST} --seed 0",
                f"train {START} --workers 4 --period 8 {REST} --seed 1",
            ],
        ),
        ([("one-shot", None, 0, 7)], [f"train {START} --method one-shot --workers 4 {REST} --seed 7"]),
    ],
)
def test_commands_make_these_runs(tmp_path: Path, kinds: list[Kind], lines: list[str]) -> None:
    for i, (method, period, overlap, seed) in enumerate(kinds):
        make_run(tmp_path / str(i), method=method, period=period, overlap=overlap, seed=seed)
    assert [" ".join(line) for line in about.commands(grouped(tmp_path))] == [f"prsgd {line}" for line in lines]


def test_what_was_run(tmp_path: Path) -> None:
    text = " ".join(about.what_was_run(grouped(make_comparison(tmp_path))))
    assert "4 workers trained the model mlp on digits for 5 epochs, each with batches of 8 samples" in text
    assert "lr 0.1, divided by 10 at 1/2 and 11/12 of the run" in text
    assert "2 seeds (0, 1)" in text


@pytest.mark.parametrize(
    ("seeds", "sentence"),
    [
        ({1: [0, 1], 8: [0, 1]}, "Each was run with 2 seeds (0, 1): a line is their mean, the band"),
        ({1: [0], 8: [0]}, "There is one seed (0), so the curves have no band."),
        ({1: [0, 1, 2], 4: [0, 1, 2], 8: [0]}, "The seeds differ: period 1 and period 4 have 3 (0, 1, 2); period 8 "
            "has one (0). A line is the mean of its seeds, the band around it reaches from the lowest to the highest."),
        ({1: [3], 8: [4]}, "The seeds differ: period 1 has one (3); period 8 has one (4). So the curves have no band."),
        ({1: [0, 1], 8: [2, 3]}, "The seeds differ: period 1 has 2 (0, 1); period 8 has 2 (2, 3). A line is the mean"),
        ({1: list(range(12)), 8: [0]}, "period 1 has 12 (0 to 11); period 8 has one (0)."),
    ],
)  # fmt: skip
def test_seeds_are_said_for_each_run(tmp_path: Path, seeds: dict[int, list[int]], sentence: str) -> None:
    for period, given in seeds.items():
        for seed in given:
            make_run(tmp_path / f"{period}-{seed}", period=period, seed=seed)
    assert sentence in about.what_was_run(grouped(tmp_path))[-1]


def test_commands_of_runs_with_different_seeds(tmp_path: Path) -> None:
    for period, seed in ((1, 0), (1, 1), (1, 2), (8, 0)):
        make_run(tmp_path / f"{period}-{seed}", period=period, seed=seed)
    assert [" ".join(line) for line in about.commands(grouped(tmp_path))] == [
        f"prsgd compare {START} --workers 4 --period 1 {REST} --seeds 3",
        f"prsgd compare {START} --workers 4 --period 8 {REST} --seeds 1",
    ]


def test_the_page_has_a_column_of_seeds_where_they_differ(tmp_path: Path) -> None:
    head = '<th scope="col">seeds</th>'
    for period, seed in ((1, 0), (1, 1), (8, 0), (8, 1)):
        make_run(tmp_path / f"{period}-{seed}", period=period, seed=seed)
    assert head not in report.write([tmp_path]).read_text()
    make_run(tmp_path / "more", period=4, seed=0)
    text = report.write([tmp_path]).read_text()
    assert head in text
    assert '<th scope="row">period 4</th><td>1</td>' in text
    assert '<th scope="row">period 8</th><td>2</td>' in text


def test_the_page_names_its_baseline(tmp_path: Path) -> None:
    runs = make_comparison(tmp_path / "runs")
    assert "share is of those of period 1." in report.write([runs]).read_text()
    text = report.write([runs], baseline="pr-sgd period 8").read_text()
    assert "share is of those of period 8." in text
    assert "Period 4 reached the accuracy of period 8" in text


def test_figures_are_drawn_and_the_same_twice(tmp_path: Path) -> None:
    found = applying(ALL, grouped(make_comparison(tmp_path / "runs")))
    paths = draw(found, tmp_path / "one")
    names = ["training-loss", "test-accuracy", "loss-against-bytes", "drift", "split"]
    assert [path.name for path in paths] == [f"{name}.{kind}" for name in names for kind in ("png", "svg")]
    for path in paths:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")
        assert len(content) > 8_000
    again = draw(found, tmp_path / "two")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in paths]


def test_a_new_figure_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands on the page with its words, its picture beside it; one that does not apply leaves nothing."""

    def draw_count(count: int) -> Drawing:
        drawing = Drawing()
        drawing.text(0.1, 0.5, f"{count} groups")
        return drawing

    def row(name: str, count: Callable[[Sequence[Group]], int | None]) -> Figure[Sequence[Group], int]:
        return Figure(name, f"Of {name}", "A number", count, lambda count: f"There are {count} groups.", draw_count)

    monkeypatch.setattr(report, "FIGURES", (*ALL, row("groups", len), row("nothing", lambda _: None)))
    text = report.write([make_comparison(tmp_path)]).read_text()
    assert "<h2>Of groups</h2>\n  <p>There are 3 groups.</p>\n  <figure><img src=" in text
    assert 'alt="A number"' in text
    assert '<a href="figures/groups.png">PNG</a>' in text
    assert "Of nothing" not in text
    assert not list(tmp_path.glob("figures/nothing.*"))
    assert sorted(path.suffix for path in tmp_path.glob("figures/groups.*")) == [".png", ".svg"]


def test_names_of_figures_are_their_own() -> None:
    for figures in (ALL, verified.FIGURES):
        names = [figure.name for figure in figures]
        assert len(set(names)) == len(names)


def test_page_goes_where_it_is_sent(tmp_path: Path) -> None:
    runs = make_comparison(tmp_path / "runs")
    assert report.write([runs]) == runs / "report.html"
    assert report.write([runs], tmp_path / "out") == tmp_path / "out" / "report.html"
    assert (tmp_path / "out" / "table.csv").exists()
    both = [runs / "period-4-seed-0", runs / "period-1-seed-0"]
    with pytest.raises(ValueError, match="out must be given for several folders"):
        report.write(both)
    assert report.write([runs, runs / "."]) == runs / "report.html"  # one folder, said twice
    with pytest.raises(ValueError, match="at least one run or comparison, got none"):
        report.write([])


def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    make_run(tmp_path / "a", method="</script><b>&")
    text = report.write([tmp_path]).read_text()
    assert text.count("</script>") == 2
    assert "<b>&" not in text


def test_reporting_imports_no_torch() -> None:
    code = "import sys, prsgd.report.page; print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert found.stdout == "False False\n"


# In a browser


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, drawn_once: None) -> str:
    runs = make_comparison(tmp_path_factory.mktemp("page") / "runs")
    return report.write([runs]).as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not Path(CHROMIUM).exists():
        pytest.skip(f"needs Chromium, not found at {CHROMIUM}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    """Open, 1280 wide; at the end nothing may have been said on the console or fetched from elsewhere."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    said: list[str] = []
    fetched: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: fetched.append(request.url))
    page.set_default_timeout(120_000)
    page.goto(address)
    yield page
    page.close()
    assert said == []
    assert [url for url in fetched if not url.startswith("data:")] == [address]


POINTS_OUTSIDE = """
(figure) => [...figure.querySelectorAll(".line")].map((line) => {
  const box = line.ownerSVGElement.viewBox.baseVal;
  const points = line.getAttribute("d").match(/-?[\\d.]+ -?[\\d.]+/g).map((pair) => pair.split(" ").map(Number));
  const inside = points.filter(([x, y]) => x >= 0 && x <= box.width && y >= 0 && y <= box.height);
  return [points.length, inside.length];
})
"""


@pytest.mark.parametrize("name", FIGURES)
def test_each_figure_is_drawn(page: Page, name: str) -> None:
    found = page.locator(f"[data-chart={name}]").evaluate(POINTS_OUTSIDE)
    assert len(found) == 3
    for points, inside in found:
        assert points >= 5
        # The accuracy's axis begins above the first epoch; what is below is clipped.
        assert inside == points or (name == "test-accuracy" and inside >= points - 1)


def test_the_split_is_drawn(page: Page) -> None:
    assert page.locator("[data-split] .bar").count() == 7  # four workers, two classes, one of them empty once
    assert page.locator("[data-split] title").first.text_content() == "worker 0, class 0: 3 samples"


def test_a_reader_finds_verdict_words_and_command(page: Page) -> None:
    assert page.locator(".verdict").inner_text() == (
        "Period 8 reached the accuracy of period 1 (96.1 % against 96.1 %) "
        "with 8.0x fewer rounds and 12.5 % of the bytes."
    )
    assert (
        page.locator("pre").inner_text().startswith("prsgd compare --task digits --model mlp --workers 4 --period 1 4")
    )
    assert page.locator("tbody tr").count() == 3


def test_the_legend_hides_a_curve_everywhere(page: Page) -> None:
    curve = '.curve[data-name="period 4"]'
    assert page.locator(curve).count() == len(FIGURES)
    button = page.locator("[data-chart=training-loss] .legend button", has_text="period 4")
    button.focus()
    page.keyboard.press("Enter")
    assert page.locator(curve).count() == 0
    assert page.locator(".curve").count() == 2 * len(FIGURES)
    pressed = page.locator(".legend button", has_text="period 4").evaluate_all(
        "(buttons) => buttons.map((button) => button.getAttribute('aria-pressed'))"
    )
    assert pressed == ["false"] * len(FIGURES)
    button.click()
    assert page.locator(curve).count() == len(FIGURES)


def test_hovering_shows_the_values(page: Page) -> None:
    figure = page.locator("[data-chart=test-accuracy]")
    chart = figure.locator("svg.chart")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box is not None
    tip = figure.locator(".tip")
    assert not tip.is_visible()
    page.mouse.move(box["x"] + box["width"] - 16, box["y"] + 60)
    assert tip.inner_text().split() == [
        "epoch",
        "5",
        "period",
        "1",
        "96.1",
        "period",
        "4",
        "96.1",
        "period",
        "8",
        "96.1",
    ]
    assert figure.locator(".cross").count() == 1
    shown = tip.bounding_box()
    assert shown is not None
    assert shown["x"] >= box["x"]
    assert shown["x"] + shown["width"] <= box["x"] + box["width"]
    page.mouse.move(5, 5)
    assert not tip.is_visible()


def test_the_keyboard_reads_values_too(page: Page) -> None:
    chart = page.locator("[data-chart=training-loss] svg.chart")
    chart.focus()
    page.keyboard.press("End")
    tip = page.locator("[data-chart=training-loss] .tip")
    assert tip.locator("b").inner_text() == "epoch 5"
    page.keyboard.press("ArrowLeft")
    assert tip.inner_text().split() == ["epoch", "4", "period", "1", "0.1", "period", "4", "0.1", "period", "8", "0.1"]
    page.keyboard.press("Escape")
    assert not tip.is_visible()


def colours(page: Page) -> tuple[str, str]:
    line = page.locator(".line").first.evaluate("(line) => getComputedStyle(line).stroke")
    return page.evaluate("getComputedStyle(document.body).backgroundColor"), line


def test_dark_mode_changes_the_colours_and_print_does_not(page: Page) -> None:
    light = colours(page)
    assert light[0] == "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="dark")
    dark = colours(page)
    assert dark[0] != light[0]
    assert dark[1] != light[1]
    page.emulate_media(color_scheme="dark", media="print")
    assert colours(page) == light


def test_a_narrow_screen_does_not_scroll_sideways(page: Page) -> None:
    page.set_viewport_size({"width": 420, "height": 900})
    # Asked from here: a function that waits in the page is an eval(), which the page's own policy forbids.
    deadline = time.monotonic() + 60
    while page.evaluate("document.querySelector('svg.chart').viewBox.baseVal.width") >= 420:
        assert time.monotonic() < deadline
        page.wait_for_timeout(20)
    assert page.evaluate("document.documentElement.scrollWidth") == 420


def test_without_javascript_the_figures_for_paper_are_shown(browser: Browser, address: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    assert page.locator("figure img").count() == len(FIGURES) + 1
    for image in page.locator("figure img").all():
        box = image.bounding_box()
        assert box is not None
        assert box["height"] > 100
    context.close()
