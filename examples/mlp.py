"""A multilayer perceptron on scikit-learn's handwritten digits, trained with Adam: `python examples/mlp.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from training import Batch, digit_batches, print_accuracy, train

import irongrad as ig


def make_step(batch: int = 64, hidden: int = 128) -> ig.TrainStep:
    """Two hidden layers over `x` float32 [batch, 8, 8]; the labels are `y` int64 [batch]."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.Tanh(),
        nn.Linear(hidden, 10),
    )
    example = {name: torch.from_numpy(array) for name, array in next(batches(batch)).items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return ig.TrainStep(model, nn.CrossEntropyLoss(label_smoothing=0.05), optimizer, example)


def batches(batch: int = 64, seed: int = 0, *, train: bool = True) -> Iterator[Batch]:
    """Yield one epoch of digits: `x` float32 [batch, 8, 8], `y` int64 [batch]."""
    return digit_batches(batch, seed, train=train)


def main() -> None:
    """Compile, train and test."""
    session = ig.compile(make_step(), "build/mlp").load()
    train(session, batches, epochs=20)
    print_accuracy(session, batches)


if __name__ == "__main__":
    main()
