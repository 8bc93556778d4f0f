"""The training step that CMakeLists.txt compiles."""

from __future__ import annotations

import torch
from torch import nn

import irongrad as ig


def make_step() -> ig.TrainStep:
    """A small classifier over `x` float32 [8, 4]; the labels are `y` int64 [8]."""
    from network import Network  # modules imported late count as dependencies too

    torch.manual_seed(0)
    model = Network(features=4, classes=3)
    return ig.TrainStep(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        inputs={"x": torch.randn(8, 4), "y": torch.randint(0, 3, (8,))},
    )
