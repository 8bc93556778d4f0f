"""What the examples share: scikit-learn's handwritten digits as batches, training with a progress bar, eager's step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from rich.progress import Progress
from sklearn.datasets import load_digits
from torch.nn.utils import clip_grad_norm_

import irongrad as ig
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


class Eager:
    """A step in eager PyTorch, on a copy of its model, in a dtype of choice: what the compiled one must equal.

    The first input is the model's, and the others are the loss's.
    """

    def __init__(self, step: ig.TrainStep, dtype: torch.dtype = torch.float32) -> None:
        self.model, self._optimizer = copy.deepcopy((step.model, step.optimizer))
        self.model.to(dtype)
        self._step, self._dtype = step, dtype

    def train_step(self, between: Callable[..., dict[str, Any]] | None = None, **batch: np.ndarray) -> float:
        """Train on one batch, with what Python does between model and loss. Returns the loss before the update."""
        first, *rest = self._step.inputs
        outputs = self.model(self._tensor(batch[first]))
        if between is not None:
            given = {name: array for name, array in batch.items() if name != first}
            batch |= between({name: tensor.detach().numpy() for name, tensor in outputs.items()}, **given)
        loss = self._step.loss(outputs, *(self._tensor(batch[name]) for name in rest))
        self._optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(self.model.parameters(), self._step.clip_grad_norm)
        self._optimizer.step()
        return loss.item()

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor
