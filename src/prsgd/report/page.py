"""One page that explains a comparison to somebody who was not there; it needs no network and no other file."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from prsgd import files, metrics
from prsgd.report import about, series
from prsgd.report.chart import Chart
from prsgd.report.figures import FIGURES, draw
from prsgd.report.figures.base import Picture, applying
from prsgd.report.figures.split import Split, group_colours, is_light
from prsgd.report.read import read
from prsgd.report.series import Group, group, rows
from prsgd.report.table import row_cells, seeds_differ, write_csv
from prsgd.report.verdict import verdict


def write(folders: Sequence[Path], out: Path | None = None, *, baseline: str | None = None) -> Path:
    """Make report.html in the folder ``out``, with figures/, table.csv and curves.csv beside it; returns its path.

    ``folders`` are runs or comparisons; of one of them, the page goes into it unless ``out`` is given. ``baseline`` is
    the label of the runs that the others are measured by.
    """
    if not folders:
        raise ValueError("folders must name at least one run or comparison, got none")
    if out is None:
        if is_several(folders):
            raise ValueError(f"out must be given for several folders, got {', '.join(map(str, folders))}")
        out = folders[0]
    groups = group(read(folders), baseline=baseline)
    if out.exists() and not out.is_dir():
        raise ValueError(f"out must be a folder, {out} is a file")
    pictures = applying(FIGURES, groups)
    draw(pictures, out)
    write_csv(groups, charts(pictures), out)
    path = out / files.REPORT
    path.write_text(_render(groups, pictures, out), encoding="utf-8")
    return path


def is_several(folders: Sequence[Path]) -> bool:
    """Are they more than one, whatever their names?"""
    return len({folder.resolve() for folder in folders}) > 1


def _render(groups: Sequence[Group], pictures: Sequence[Picture[Any]], out: Path) -> str:
    table = rows(groups)
    return render(
        "page.html.j2",
        _data(pictures),
        title=about.title(groups),
        verdict=verdict(groups),
        sentences=about.what_was_run(groups),
        unfinished=[one for one in groups if one.state],
        pictures=for_template(pictures, out),
        has_charts=bool(charts(pictures)),
        rows=[(row, row_cells(row)) for row in table],
        has_modelled=any(row.modelled_seconds is not None for row in table),
        has_seeds=seeds_differ(table),
        baseline=_name(series.baseline(groups)),
        metric=metrics.find(table[0].metric).axis if any(row.test_score is not None for row in table) else None,
        methods=about.method_words(groups),
        commands=about.commands(groups),
        environment=about.environments(groups),
    )


def _name(group: Group | None) -> str | None:
    return None if group is None else group.name


def render(template: str, data: dict[str, Any], **values: Any) -> str:
    """A page in the common frame; ``data`` is what its script draws."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    pages = Environment(
        loader=FunctionLoader(_part), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return pages.get_template(template).render(
        css=Markup(_part("page.css")),
        js=Markup(_part("axes.js") + _part("page.js")),
        data=Markup(_embedded(data)),
        **values,
    )


def _part(name: str) -> str:
    return (resources.files("prsgd.report") / name).read_text(encoding="utf-8")


def charts(pictures: Sequence[Picture[Any]]) -> dict[str, Chart]:
    """Those that are charts, by name."""
    return {picture.name: picture.numbers for picture in pictures if isinstance(picture.numbers, Chart)}


def for_template(pictures: Sequence[Picture[Any]], out: Path) -> list[dict[str, str | None]]:
    """What a template needs to show them, once they are drawn to ``out``."""
    return [
        {
            "name": picture.name,
            "heading": picture.figure.heading,
            "caption": picture.caption,
            "alt": picture.figure.alt,
            "screen": picture.figure.screen,
            "image": _static(picture.name, out),
        }
        for picture in pictures
    ]


def _static(name: str, out: Path) -> str:
    """The figure for paper, also for readers without JavaScript."""
    image = (out / files.FIGURES / f"{name}.svg").read_bytes()
    return f"data:image/svg+xml;base64,{base64.b64encode(image).decode()}"


def _data(pictures: Sequence[Picture[Any]]) -> dict[str, Any]:
    split = next((picture.numbers for picture in pictures if isinstance(picture.numbers, Split)), None)
    colours = [] if split is None else group_colours(len(split.counts[0]))
    return {
        **chart_data(charts(pictures)),
        "split": None if split is None else {"counts": split.counts, "names": split.names, "word": split.word},
        "groups": [{"fill": colour, "ink": "#000" if is_light(colour) else "#fff"} for colour in colours],
    }


def chart_data(found: Mapping[str, Chart]) -> dict[str, Any]:
    """What page.js draws."""
    return {"charts": {name: {"key": name, **_rounded(asdict(chart))} for name, chart in found.items()}}


def _rounded(value: Any) -> Any:
    """Five digits are more than a screen shows."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value


def _embedded(data: dict[str, Any]) -> str:
    """JSON that cannot end the script element it stands in.

    >>> _embedded({"name": "</script>"})
    '{"name":"\\\\u003c/script>"}'
    """
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
