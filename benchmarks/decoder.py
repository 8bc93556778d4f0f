"""A decoder as models from research often are: every layer computes the same mask and rotary angles again.

Rotary positions are those of Su et al., "RoFormer" (arXiv:2104.09864).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import irongrad as ig

VOCABULARY = 96


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Queries or keys, float32 [B, heads, T, width], turned by angles that grow with the place."""
    length, width = x.shape[-2:]
    rates = 1.0 / 10000 ** (torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(length).float(), rates).repeat(1, 2)
    left, right = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-right, left], -1) * angles.sin()


class Layer(nn.Module):
    """Causal attention and a two-layer network: float32 [B, T, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.project = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, shaped as its input."""
        normed = self.norm1(x)
        q, k, v = (f(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotated(q), rotated(k)
        later = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
        scores = (q @ k.transpose(-1, -2) / k.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
        x = x + self.project((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def make_step(batch: int = 8, length: int = 32, width: int = 64, heads: int = 4, layers: int = 2) -> ig.TrainStep:
    """AdamW, with gradients clipped to norm 1, on random characters."""
    torch.manual_seed(0)
    stack = [Layer(width, heads) for _ in range(layers)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, width), *stack, nn.Linear(width, VOCABULARY))
    x = torch.randint(0, VOCABULARY, (batch, length))

    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return ig.TrainStep(model, loss, optimizer, {"x": x, "y": x.roll(-1, 1)}, clip_grad_norm=1.0)
