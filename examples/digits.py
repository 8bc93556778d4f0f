"""A small convolutional network on scikit-learn's handwritten digits.

irongrad compile examples/digits.py:make_step -o build/digits
python examples/digits.py build/digits      # writes the data, trains, saves a checkpoint
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

BATCH = 32


def load_digits() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return training and held-out data: x float32 [N, 1, 8, 8] in [0, 1], y int64 [N] in [0, 9]."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = (digits.images / 16).astype(np.float32)[:, None]
    y = digits.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(x))
    held_out, train = order[:320], order[320:]
    return {"x": x[train], "y": y[train]}, {"x": x[held_out], "y": y[held_out]}


def make_step():
    """The training step: two convolutions with BatchNorm, a linear layer, AdamW."""
    import torch
    from torch import nn

    import irongrad as ig

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 10),
    )
    data, _ = load_digits()
    return ig.TrainStep(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3),
        inputs={n: torch.from_numpy(a[:BATCH]) for n, a in data.items()},
    )


def accuracy(session, data: dict[str, np.ndarray]) -> float:
    """The share of `data` that the compiled model classifies right, over its whole batches."""
    batches = range(0, len(data["x"]) - BATCH + 1, BATCH)
    right = [session.predict(x=data["x"][i : i + BATCH]).argmax(1) == data["y"][i : i + BATCH] for i in batches]
    return float(np.mean(right))


def main(directory: Path, epochs: int = 12) -> None:
    """Train the artifact in `directory` with a one-cycle learning rate; no PyTorch from here on."""
    from rich.progress import track

    import irongrad.runtime

    train, held_out = load_digits()
    session = irongrad.runtime.load(directory)
    rng = np.random.default_rng(1)
    steps = epochs * (len(train["x"]) // BATCH)
    orders = np.concatenate([rng.permutation(len(train["x"]))[: steps // epochs * BATCH] for _ in range(epochs)])
    for step in track(range(steps), description="training the compiled step"):
        rows = orders[step * BATCH : (step + 1) * BATCH]
        lr = 5e-3 * np.sin(np.pi * (step + 1) / (steps + 1))
        loss = session.train_step(x=train["x"][rows], y=train["y"][rows], lr=lr)
    print(f"last loss {loss:.4f}, held-out accuracy {accuracy(session, held_out):.2%}")
    session.save(directory / "trained.safetensors")
    for name, array in held_out.items():
        np.save(directory / f"{name}.npy", array[:BATCH])
    if accuracy(session, held_out) < 0.97:
        sys.exit("held-out accuracy is below 97 %")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/digits"))
