"""A CSV: prsgd compare --task examples/tasks/csv_task.py"""

import csv
from pathlib import Path

import torch
from torch import nn

import prsgd

with (Path(__file__).parent / "seeds.csv").open() as file:
    rows = list(csv.DictReader(file))
kinds = sorted({row["kind"] for row in rows})
columns = ("length_mm", "width_mm", "groove_mm", "weight_mg")
x = torch.tensor([[float(row[column]) for column in columns] for row in rows])
x = (x - x.mean(dim=0)) / x.std(dim=0)
y = torch.tensor([kinds.index(row["kind"]) for row in rows])

task = prsgd.task(
    model=lambda: nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)),
    train=(x[:192], y[:192]),
    test=(x[192:], y[192:]),
    loss=nn.functional.cross_entropy,
    batch_size=4,
)
