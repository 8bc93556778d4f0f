"""A Transformer that guesses hidden words, on sentences of every length: `python examples/sentences.py`.

It reads the whole sentence, to both sides of a hidden word, as that of Devlin et al., "BERT: Pre-training of Deep
Bidirectional Transformers for Language Understanding" (2019). A batch holds sentences of one length, as many as there
are up to 16: no batch is padded here. The compiled step pads each to a bucket, and trains as if it had not.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import text
import torch
from rich.progress import Progress
from torch import nn
from torch.nn import functional as F
from training import Batch, Eager

import irongrad as ig
from irongrad.runtime.session import Session

UNKNOWN, HIDDEN = 0, 1  # the codes of a rare word and of one to be guessed
KNOWN = -100  # the label of a word that is not to be guessed, cross_entropy's ignore_index
VOCABULARY = 1024


@functools.cache
def coded() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The sentences as codes, int64 [words] each: those to train on, and every tenth, which is held out."""
    sentences = text.sentences()
    counts = Counter(word for number, s in enumerate(sentences) if number % 10 for word in s)
    codes = {word: code for code, (word, _) in enumerate(counts.most_common(VOCABULARY - 2), 2)}
    arrays = [np.array([codes.get(word, UNKNOWN) for word in s], np.int64) for s in sentences]
    return [a for n, a in enumerate(arrays) if n % 10], arrays[::10]


class Reader(nn.Module):
    """int64 [B, T] -> float32 [B, T, vocabulary], from what stands on both sides."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(64, width)
        how = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, heads, 4 * width, **how) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        for embedding in (self.words, self.positions):
            nn.init.normal_(embedding.weight, std=0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one logit a word, at every place."""
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.words(x) + self.positions(places))))


def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the hidden words: float32 [B, T, vocabulary], int64 [B, T] -> scalar."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=KNOWN)


def lengths() -> list[int]:
    """The length of every sentence to train on, up to the next multiple of 8: vectors divide such sizes."""
    return [-(-len(codes) // 8) * 8 for codes in coded()[0]]


def make_step(
    width: int = 64,
    heads: int = 4,
    layers: int = 2,
    rows: Sequence[int] = (8, 16),
    words: Sequence[int] | None = None,
) -> ig.TrainStep:
    """AdamW, bucketed on both sizes.

    Args:
        width: of the Transformer.
        heads: of its attention.
        layers: how many blocks.
        rows: the sizes of the buckets in B.
        words: those in T; by default the three that waste least on the sentences there are.
    """
    torch.manual_seed(0)
    model = Reader(width, heads, layers)
    sizes = ig.choose_buckets(lengths(), max_buckets=3) if words is None else words
    example = next(b for b in batches() if b["x"].shape[0] == max(rows) and b["x"].shape[1] <= max(sizes))
    dims = {0: "B", 1: "T"}
    return ig.TrainStep(
        model,
        loss,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        {name: torch.from_numpy(array) for name, array in example.items()},
        dynamic={"x": dims, "y": dims},
        buckets={"B": rows, "T": sizes},
        clip_grad_norm=1.0,
    )


def batches(seed: int = 0, *, train: bool = True, batch: int = 16) -> Iterator[Batch]:
    """Yield all sentences once, int64 [B, T]: `x` with a sixth of the words hidden, `y` with those; B up to `batch`."""
    rng = np.random.default_rng(seed)
    sentences = coded()[0 if train else 1]
    by_length: dict[int, list[np.ndarray]] = {}
    for number in rng.permutation(len(sentences)):
        by_length.setdefault(len(sentences[number]), []).append(sentences[number])
    groups = [s[i : i + batch] for s in by_length.values() for i in range(0, len(s), batch)]
    for number in rng.permutation(len(groups)):
        codes = np.stack(groups[number])
        hidden = rng.permuted(np.tile(np.arange(codes.shape[1]) < -(-codes.shape[1] // 6), (len(codes), 1)), axis=1)
        yield {"x": np.where(hidden, HIDDEN, codes), "y": np.where(hidden, codes, KNOWN)}


def compare(session: Session, step: ig.TrainStep, epochs: int) -> None:
    """Train the compiled step and eager side by side, and print both curves and how far they are apart."""
    eager, exact = Eager(step), Eager(step, torch.float64)
    shapes, words, elements = set(), 0, 0
    curves: list[tuple[float, float, float]] = []
    with Progress() as progress:
        for epoch in progress.track(range(epochs), description="training"):
            for batch in batches(seed=epoch):
                curves.append((session.train_step(**batch), eager.train_step(**batch), exact.train_step(**batch)))
                shapes.add(batch["x"].shape)
                words += batch["x"].size
                elements += elements_of_bucket(step, *batch["x"].shape)
            mean = np.mean(curves[-len(list(batches())) :], axis=0)
            held_out = np.mean([session.eval_step(**batch) for batch in batches(train=False)])
            progress.console.print(
                f"epoch {epoch + 1:2}: loss {mean[0]:.5f}, eager's {mean[1]:.5f}; held-out loss {held_out:.4f}"
            )
    found, reference, truth = np.array(curves).T
    print(f"largest difference of a step's loss from eager float64: {np.abs(found - truth).max():.1e}")
    print(f"that of eager float32, for comparison:                  {np.abs(reference - truth).max():.1e}")
    print(f"{len(curves)} steps at {len(shapes)} sizes in {len(step.bucket_list)} buckets, none compiled anew")
    print(f"of what ran, {1 - words / elements:.1%} was padding")


def elements_of_bucket(step: ig.TrainStep, rows: int, words: int) -> int:
    """How many elements a batch has once it is padded to its bucket."""
    bucket = next(b for b in step.bucket_list if rows <= b["B"] and words <= b["T"])
    return bucket["B"] * bucket["T"]


def main(epochs: int = 10) -> None:
    """Compile, and train beside eager."""
    step = make_step()
    session = ig.compile(step, "build/sentences", entry_points=("train_step", "eval_step")).load()
    compare(session, step, epochs)


if __name__ == "__main__":
    main()
