"""The page of ``prsgd verify``: what the paper proves, beside what was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from prsgd.report.figures import draw
from prsgd.report.figures.base import applying
from prsgd.report.figures.verified import FIGURES
from prsgd.report.page import chart_data, charts, for_template, render
from prsgd.theory.verify import Claim, Effort


def write(claims: Sequence[Claim], effort: Effort, out: Path) -> Path:
    """Make verify.html in the folder ``out``, with verify.json and figures/ beside it; returns its path."""
    out.mkdir(parents=True, exist_ok=True)
    pictures = applying(FIGURES, effort)
    draw(pictures, out)
    content = [{**asdict(claim), "holds": claim.holds} for claim in claims]
    (out / "verify.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    path = out / "verify.html"
    missed = [claim.name for claim in claims if not claim.holds]
    verdict = f"All {len(claims)} claims hold where they were measured."
    if missed:
        verdict = f"{len(claims) - len(missed)} of {len(claims)} claims hold; not: {'; '.join(missed)}."
    page = render(
        "verify.html.j2",
        chart_data(charts(pictures)),
        title="The paper's claims, measured",
        verdict=verdict,
        claims=claims,
        pictures=for_template(pictures, out),
    )
    path.write_text(page, encoding="utf-8")
    return path
