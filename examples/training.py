"""What the examples share: scikit-learn's handwritten digits as batches, and a training loop with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from rich.progress import Progress
from sklearn.datasets import load_digits

from irongrad.runtime.session import Session

Batch = dict[str, np.ndarray]


def digit_batches(batch: int, seed: int, *, train: bool) -> Iterator[Batch]:
    """Yield the digits once, in random order: `x` float32 [batch, 8, 8] in 0 to 1, `y` int64 [batch].

    The last 360 of the 1797 images are held out; those that fill no batch are left out, as its size is compiled in.
    """
    images, labels = load_digits(return_X_y=True)
    part = slice(None, -360) if train else slice(-360, None)
    x = (images[part].reshape(-1, 8, 8) / 16).astype(np.float32)
    y = labels[part].astype(np.int64)
    order = np.random.default_rng(seed).permutation(len(y))
    for start in range(0, len(y) - batch + 1, batch):
        chosen = order[start : start + batch]
        yield {"x": x[chosen], "y": y[chosen]}


def train(session: Session, batches: Callable[..., Iterator[Batch]], epochs: int) -> None:
    """Train for `epochs` and print the mean loss of each, and the loss in evaluation mode on held-out data.

    Args:
        session: a loaded artifact with `train_step` and `eval_step`.
        batches: `batches(seed=epoch)` gives the training data, `batches(train=False)` the held-out data.
        epochs: how often to go through it.
    """
    with Progress() as progress:
        for epoch in progress.track(range(epochs), description="training"):
            losses = [session.train_step(**batch) for batch in batches(seed=epoch)]
            held_out = [session.eval_step(**batch) for batch in batches(train=False)]
            progress.console.print(
                f"epoch {epoch + 1:2}: loss {np.mean(losses):.4f}, held-out loss {np.mean(held_out):.4f}"
            )


def print_accuracy(session: Session, batches: Callable[..., Iterator[Batch]]) -> None:
    """Print which share of the held-out labels `predict`'s largest output meets."""
    hits = [session.predict(x=batch["x"]).argmax(-1) == batch["y"] for batch in batches(train=False)]
    print(f"accuracy on held-out digits: {np.mean(hits):.1%}")
