"""A small GPT over characters, with causal attention and tied embeddings: `python examples/gpt.py`.

The pre-norm form of Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import text
import torch
from torch import nn
from torch.nn import functional as F
from training import Batch, train

import irongrad as ig
from irongrad.runtime.session import Session


class Block(nn.Module):
    """Attention and a two-layer network, each over a normalised input and added to it: float32 [B, T, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, shaped as its input."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """int64 [B, T] -> float32 [B, T, vocabulary]; the output layer is the embedding."""

    def __init__(self, length: int, width: int, heads: int, layers: int, vocabulary: int = text.VOCABULARY) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one logit a next character, at every place."""
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions(places))))


def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross entropy of every place: float32 [B, T, vocabulary], int64 [B, T] -> scalar."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def make_step(batch: int = 16, length: int = 64, width: int = 128, heads: int = 4, layers: int = 4) -> ig.TrainStep:
    """AdamW that decays the matrices alone, as is usual; gradients are clipped to norm 1."""
    torch.manual_seed(0)
    model = GPT(length, width, heads, layers)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    example = {name: torch.from_numpy(array) for name, array in next(batches(batch, length)).items()}
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    return ig.TrainStep(model, loss, optimizer, example, clip_grad_norm=1.0)


def batches(batch: int = 16, length: int = 64, seed: int = 0, *, train: bool = True) -> Iterator[Batch]:
    """Yield windows `x` int64 [batch, length] and the characters one place on, `y` int64 [batch, length]."""
    for window in text.windows(batch, length + 1, 100 if train else 10, seed, train=train):
        yield {"x": window[:, :-1].copy(), "y": window[:, 1:].copy()}


def continuation(session: Session, prompt: str, characters: int, batch: int = 16, length: int = 64) -> str:
    """Let the trained model write on, one likely character after the other."""
    rng = np.random.default_rng(0)
    codes = list(prompt.encode("ascii"))
    for _ in range(characters):
        x = np.zeros((batch, length), np.int64)
        recent = codes[-length:]
        x[0, : len(recent)] = recent  # attention is causal, so what stands to the right does not matter
        logits = session.predict(x=x)[0, len(recent) - 1].astype(np.float64) / 0.7
        probabilities = np.exp(logits - logits.max())
        codes.append(int(rng.choice(len(logits), p=probabilities / probabilities.sum())))
    return text.decode(np.array(codes))


def main() -> None:
    """Compile, train and let the model write."""
    session = ig.compile(make_step(), "build/gpt", entry_points=("train_step", "eval_step", "predict")).load()
    train(session, batches, epochs=10)
    print(continuation(session, "The class ", 400))


if __name__ == "__main__":
    main()
