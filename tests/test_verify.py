"""The simulation is the real loop, and the paper's claims hold when measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from playwright.sync_api import sync_playwright
from torch import Tensor, nn

import prsgd
from prsgd.cli import main
from prsgd.report import verified
from prsgd.theory.bounds import active_workers
from prsgd.theory.simulate import run, run_growing, run_per_worker, two_wells, wells
from prsgd.theory.verify import QUICK, Claim, claims, constants
from tests.test_report_page import ARGUMENTS, CHROMIUM

CENTRE = np.array([0.5, -0.3, 0.1])


class Model(nn.Module):
    """The wells, with the noise of each step given as its input."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((3,), 3.0, dtype=torch.float64))

    def forward(self, noise: Tensor) -> Tensor:
        u = (self.x - torch.from_numpy(CENTRE)).square()
        return (u / (1 + u)).sum() + noise @ self.x


def itself(out: Tensor, _: Any) -> Tensor:
    return out


def real(
    schedule: prsgd.Schedule, ticks: int, workers: int, overlap: int = 0, lr: float = 0.1
) -> tuple[list[float], Any]:
    """Drift where each gradient is taken, and the end, by LocalSGD, with the simulation's random numbers."""
    random = np.random.default_rng(0)
    fleet = prsgd.Fleet(Model(), workers)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=lr)
    drift = []
    with prsgd.LocalSGD(fleet, optimizer, schedule=schedule, overlap=overlap):
        for _ in range(ticks):
            drift.append(float((fleet.rows - fleet.rows.mean(0)).square().sum(1).mean()))
            noise = torch.from_numpy(np.sqrt(2.0 / 3) * random.standard_normal((1, workers, 3))[0])
            optimizer.zero_grad()
            fleet.backward(itself, noise, noise)
            optimizer.step()
    return drift, fleet.rows[0].numpy()


@pytest.mark.parametrize(("period", "overlap"), [(1, 0), (1, 1), (4, 0), (4, 1), (4, 3), (4, 4)])
def test_the_simulation_is_the_loop(period: int, overlap: int) -> None:
    found = run(wells(CENTRE), workers=3, steps=22, lr=0.1, period=period, overlap=overlap, noise=2.0, seeds=1)
    drift, end = real(prsgd.every(period), 22, 3, overlap)
    np.testing.assert_allclose(found.drift, drift, rtol=1e-10, atol=1e-25)
    np.testing.assert_allclose(found.end[0], end, rtol=1e-10)


def test_growing_and_per_worker_are_the_loop_too() -> None:
    found = run_growing(wells(CENTRE), workers=2, rounds=20, noise=2.0, seeds=1, lr_scale=0.05)
    drift, end = real(prsgd.growing(lr_scale=0.05), len(found.drift), 2)
    np.testing.assert_allclose(found.drift, drift, rtol=1e-10, atol=1e-25)
    np.testing.assert_allclose(found.end[0], end, rtol=1e-10)
    hetero = run_per_worker(wells(CENTRE), periods=[4, 2, 1], rounds=5, lr=0.1, noise=2.0, seeds=1)
    drift, end = real(prsgd.per_worker([4, 2, 1]), 20, 3)
    np.testing.assert_allclose(hetero.drift, drift, rtol=1e-10, atol=1e-25)
    np.testing.assert_allclose(hetero.end[0], end, rtol=1e-10)
    assert sum(active_workers([4, 2, 1])) == 7


def test_the_functions_constants() -> None:
    """Gradients against differences, curvatures against L, f* against a grid."""
    for function in (wells(CENTRE), two_wells(3)):
        points = np.random.default_rng(0).uniform(-4, 4, (2000, 3))
        step = 1e-6
        for j in range(3):
            shift = step * np.eye(3)[j]
            slope = (function.value(points + shift) - function.value(points - shift)) / (2 * step)
            np.testing.assert_allclose(function.gradient(points)[:, j], slope, atol=1e-6)
            curvature = (function.gradient(points + shift) - function.gradient(points - shift))[:, j] / (2 * step)
            assert np.abs(curvature).max() <= function.smoothness * (1 + 1e-6)
    problem = constants(wells(CENTRE), noise=2.0)
    largest = np.square(wells(CENTRE).gradient(np.random.default_rng(0).uniform(-4, 4, (20000, 3)))).sum(1).max()
    assert largest + 2.0 <= problem.grad_second_moment


@pytest.mark.timeout(400)
def test_the_papers_claims_hold(tmp_path: Path) -> None:
    found = list(claims(QUICK))
    assert [claim.name for claim in found if not claim.holds] == []
    slopes = {c.name[-2:].strip(): c.measured for c in found if "slope" in c.name}
    assert slopes["1"] < slopes["4"] < slopes["64"]
    assert all(len(claim.name) <= 48 for claim in found)
    page = verified.write(found, QUICK, tmp_path)
    assert len(json.loads((tmp_path / "verify.json").read_text())) == len(found)
    for key in ("speedup", "one-shot", "two-wells", "drift", "communication"):
        assert (tmp_path / "figures" / f"{key}.png").stat().st_size > 5000
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        tab = browser.new_page()
        problems: list[str] = []
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.goto(page.as_uri())
        assert tab.locator("svg.chart").count() == 5
        assert tab.locator("[data-chart=speedup] .curve path.line").count() == 4
        assert tab.locator("[data-chart=speedup] .ring").count() >= 6  # where the guarantee reaches
        assert tab.locator(".claims tbody tr").count() == len(found)
        assert problems == []
        browser.close()


def test_a_claim_that_does_not_hold_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [
        Claim("fine", 1.0, 0.0, 2.0),
        Claim("false", 3.0, 0.0, 2.0, note="by far"),
        Claim("more", 3.0, 0.0, 2.0, True),
    ]
    assert [claim.holds for claim in made] == [True, False, True]
    monkeypatch.setattr("prsgd.theory.verify.claims", lambda _: iter(made))
    assert main(["verify"]) == 1
    shown = capsys.readouterr().out
    assert "2 of 3 claims hold; not: false" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert main(["verify", "--json"]) == 1
