"""One page that explains a comparison to somebody who was not there; it needs no network and no other file."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from prsgd import files
from prsgd.report import about, series
from prsgd.report.curves import Chart, charts
from prsgd.report.figures import class_colours, draw, first_split, is_light
from prsgd.report.places import places
from prsgd.report.read import read
from prsgd.report.series import Group, group, rows
from prsgd.report.table import row_cells, seeds_differ, write_csv
from prsgd.report.times import time_shares, timelines
from prsgd.report.verdict import verdict

_CAPTIONS = {
    "training-loss": (
        "Training loss against epochs",
        "As Figure 3 of the paper (Yu, Yang, Zhu 2019). The loss is that of the consensus, the average of all "
        "workers' models; lower is better. Lines that lie on each other mean that averaging less often cost nothing.",
    ),
    "test-accuracy": (
        "Test accuracy against epochs",
        "As Figure 4 of the paper (Yu, Yang, Zhu 2019). The share of the test samples, which nobody trained on, that "
        "the consensus gets right; higher is better.",
    ),
    "loss-against-bytes": (
        "Training loss against bytes sent",
        "The same losses, against what each worker had sent by then. Further left is cheaper; both axes are "
        "logarithmic.",
    ),
    "loss-against-modelled-seconds": (
        "Training loss against modelled seconds",
        "The same losses, against the time that the modelled cluster would have needed: computing, waiting for the "
        "slowest, and averaging.",
    ),
    "loss-against-seconds": (
        "Training loss against seconds",
        "The same losses, against the time that the processes took; each slept until its steps had taken what they "
        "take on the cluster.",
    ),
    "drift": (
        "Drift over time",
        "Drift is how far the workers' models are from each other just before they are averaged: the mean squared "
        "distance from their average. It grows with the period and falls with the lr. "
        "A run's last round may be shorter than the others, and its drift smaller.",
    ),
}


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
    draw(groups, out)
    write_csv(groups, out)
    path = out / files.REPORT
    path.write_text(_render(groups, out), encoding="utf-8")
    return path


def is_several(folders: Sequence[Path]) -> bool:
    """Are they more than one, whatever their names?"""
    return len({folder.resolve() for folder in folders}) > 1


def _render(groups: Sequence[Group], out: Path) -> str:
    found = charts(groups)
    split = first_split(groups)
    table = rows(groups)
    return render(
        "page.html.j2",
        _data(groups, found),
        title=about.title(groups),
        verdict=verdict(groups),
        sentences=about.what_was_run(groups),
        unfinished=[one for one in groups if one.state],
        charts=[figure_of(chart, out, *_CAPTIONS[chart.key]) for chart in found],
        places=_static("methods", out) if places(groups) else None,
        timeline=_static("timeline", out) if timelines(groups) else None,
        idle=_static("idle", out) if time_shares(groups) else None,
        split=None if split is None else _static("split", out),
        split_sentence=about.split_sentence(str(groups[0].runs[0].config.get("split", "iid"))),
        rows=[(row, row_cells(row)) for row in table],
        has_modelled=any(row.modelled_seconds is not None for row in table),
        has_seeds=seeds_differ(table),
        baseline=_name(series.baseline(groups)),
        has_accuracy=any(row.test_accuracy is not None for row in table),
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


def figure_of(chart: Chart, out: Path, heading: str, caption: str) -> dict[str, str]:
    """What a template needs to show a chart that was drawn to ``out``."""
    if chart.floor:
        caption += f" The axis begins at {chart.floor:.0f} %; the first epochs are below."
    return {"key": chart.key, "heading": heading, "caption": caption, "image": _static(chart.key, out)}


def _static(key: str, out: Path) -> str:
    """The figure for paper, for readers without JavaScript."""
    image = (out / files.FIGURES / f"{key}.svg").read_bytes()
    return f"data:image/svg+xml;base64,{base64.b64encode(image).decode()}"


def _data(groups: Sequence[Group], found: Sequence[Chart]) -> dict[str, Any]:
    split = first_split(groups)
    colours = [] if split is None else class_colours(len(split[0]))
    return {
        **chart_data(found),
        "split": split,
        "classes": [{"fill": colour, "ink": "#000" if is_light(colour) else "#fff"} for colour in colours],
    }


def chart_data(found: Sequence[Chart]) -> dict[str, Any]:
    return {"charts": {chart.key: _rounded(asdict(chart)) for chart in found}}


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
