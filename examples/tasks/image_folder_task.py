"""A folder of images, one folder a class: prsgd compare --task examples/tasks/image_folder_task.py --workers 4"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import prsgd

files = sorted((Path(__file__).parent / "images").glob("*/*.png"))
classes = sorted({file.parent.name for file in files})
x = torch.stack([torch.from_numpy(np.array(Image.open(file).convert("L"))) for file in files]).unsqueeze(1) / 255
y = torch.tensor([classes.index(file.parent.name) for file in files])
held_out = torch.arange(len(x)) % 4 == 0


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Up to a pixel to either side."""
    return images.roll(int(torch.randint(-1, 2, (), generator=generator)), dims=-1)


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(72, 2))


train, test = (x[~held_out], y[~held_out]), (x[held_out], y[held_out])
task = prsgd.task(model=Net, train=train, test=test, loss=nn.functional.cross_entropy, augment=shifted, batch_size=3)
