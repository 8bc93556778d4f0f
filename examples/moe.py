"""A mixture of experts with a top-2 router on scikit-learn's handwritten digits: `python examples/moe.py`.

The balancing loss is that of Fedus et al., "Switch Transformers" (arXiv:2101.03961), equation 4.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F
from training import Batch, digit_batches, print_accuracy, train

import irongrad as ig


class Experts(nn.Module):
    """Each token's two best experts, weighted by the router: float32 [tokens, width] -> [tokens, width], scalar.

    Every expert runs on every token, and the router's weights, zero for all but two, pick what counts: shapes stay
    static and the experts are one batched matrix product.
    """

    def __init__(self, width: int, experts: int, chosen: int = 2) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.into = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.back = nn.Parameter(torch.randn(experts, 2 * width, width) / (2 * width) ** 0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts' weighted sum, and the balancing loss (1 when all experts get the same share)."""
        probabilities = self.router(x).softmax(-1)
        best, index = probabilities.topk(self.chosen, dim=-1)
        weights = torch.zeros_like(probabilities).scatter(-1, index, best / best.sum(-1, keepdim=True))
        hidden = F.gelu(torch.einsum("td,edh->eth", x, self.into))
        mixed = torch.einsum("eth,ehd,te->td", hidden, self.back, weights)
        share = (weights.detach() > 0).to(x.dtype).mean(0) / self.chosen
        return mixed, probabilities.shape[-1] * (share * probabilities.mean(0)).sum()


class MixtureOfExperts(nn.Module):
    """The rows of an image as eight tokens, through two expert layers; it makes its own loss."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, width)
        self.positions = nn.Parameter(0.1 * torch.randn(8, width))
        self.layers = nn.ModuleList(Experts(width, experts) for _ in range(2))
        self.classifier = nn.Linear(8 * width, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Return `logits` float32 [N, 10] of `x` float32 [N, 8, 8] and, where there are labels int64 [N], `loss`."""
        hidden = (self.embedding(x) + self.positions).flatten(0, 1)
        balance = torch.zeros((), dtype=x.dtype)
        for layer in self.layers:
            mixed, unbalanced = layer(F.layer_norm(hidden, hidden.shape[-1:]))
            hidden, balance = hidden + mixed, balance + unbalanced
        logits = self.classifier(hidden.unflatten(0, (-1, 8)).flatten(1))
        if y is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits, y) + 0.01 * balance, "logits": logits}


def make_step(batch: int = 64, width: int = 32, experts: int = 4) -> ig.TrainStep:
    """AdamW over a model whose output has its loss in it."""
    torch.manual_seed(0)
    model = MixtureOfExperts(width, experts)
    example = {name: torch.from_numpy(array) for name, array in next(batches(batch)).items()}
    return ig.TrainStep(model, None, torch.optim.AdamW(model.parameters(), lr=2e-3), example)


def batches(batch: int = 64, seed: int = 0, *, train: bool = True) -> Iterator[Batch]:
    """Yield one epoch of digits: `x` float32 [batch, 8, 8], `y` int64 [batch]."""
    return digit_batches(batch, seed, train=train)


def main() -> None:
    """Compile, train and test."""
    session = ig.compile(make_step(), "build/moe").load()
    train(session, batches, epochs=10)
    print_accuracy(session, batches)


if __name__ == "__main__":
    main()
