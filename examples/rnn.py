"""Character-level LSTM and GRU: `python examples/rnn.py lstm`, or `gru`, each also with `--bidirectional`.

One direction predicts every next character. Both directions together guess one hidden character in the middle of
a window from what stands before and after it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import text
import torch
from torch import nn
from torch.nn import functional as F
from training import Batch, train

import irongrad as ig

MASK = 0  # a code that no text has stands for the hidden character


class CharacterRNN(nn.Module):
    """Embedding, LSTM or GRU, and a linear layer: int64 [batch, length] -> float32 [batch, length, vocabulary]."""

    def __init__(self, cell: str, *, bidirectional: bool, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(text.VOCABULARY, width)
        kind = {"lstm": nn.LSTM, "gru": nn.GRU}[cell]
        self.rnn = kind(width, width, layers, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(width * (2 if bidirectional else 1), text.VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one logit a character, at every place."""
        return self.head(self.rnn(self.embedding(x))[0])


def next_character_loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross entropy of every place: float32 [batch, length, vocabulary], int64 [batch, length] -> scalar."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def middle_character_loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the middle place: float32 [batch, length, vocabulary], int64 [batch] -> scalar."""
    return F.cross_entropy(logits[:, logits.shape[1] // 2], y)


def make_step(
    cell: str = "lstm",
    *,
    bidirectional: bool = False,
    batch: int = 32,
    length: int = 16,
    width: int = 64,
    layers: int = 1,
) -> ig.TrainStep:
    """Adam with gradient clipping; the loop over `length` characters is unrolled into the compiled step."""
    torch.manual_seed(0)
    model = CharacterRNN(cell, bidirectional=bidirectional, width=width, layers=layers)
    first = next(batches(batch, length, bidirectional=bidirectional))
    example = {name: torch.from_numpy(array) for name, array in first.items()}
    loss = middle_character_loss if bidirectional else next_character_loss
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return ig.TrainStep(model, loss, optimizer, example, clip_grad_norm=1.0)


def batches(
    batch: int = 32, length: int = 16, seed: int = 0, *, bidirectional: bool = False, train: bool = True
) -> Iterator[Batch]:
    """Yield windows `x` int64 [batch, length] and what to predict.

    `y` is int64 [batch, length], the characters one place on; with `bidirectional` int64 [batch], the middle one.
    """
    for window in text.windows(batch, length + 1, 200 if train else 20, seed, train=train):
        x, y = window[:, :-1].copy(), window[:, 1:].copy()
        if bidirectional:
            y = x[:, length // 2].copy()
            x[:, length // 2] = MASK
        yield {"x": x, "y": y}


def main() -> None:
    """Compile and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cell", choices=("lstm", "gru"), nargs="?", default="lstm")
    parser.add_argument("--bidirectional", action="store_true")
    options = parser.parse_args()
    step = make_step(options.cell, bidirectional=options.bidirectional)
    session = ig.compile(step, f"build/{options.cell}", entry_points=("train_step", "eval_step")).load()
    train(session, lambda **how: batches(bidirectional=options.bidirectional, **how), epochs=10)


if __name__ == "__main__":
    main()
