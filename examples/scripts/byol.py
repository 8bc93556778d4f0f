"""Bootstrap your own latent on handwritten digits, after byol-pytorch: `python examples/scripts/byol.py`."""

import copy
import math

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import irongrad as ig


def make_step(batch: int = 128, width: int = 128, dim: int = 32) -> ig.TrainStep:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, dim))
    predictor = nn.Sequential(nn.Linear(dim, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, dim))
    online, target = nn.Sequential(encoder, predictor), copy.deepcopy(encoder)

    def loss(prediction: torch.Tensor, view1: torch.Tensor, view2: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted1, wanted2 = target(view1), target(view2)
        similar = F.cosine_similarity(prediction, wanted2, dim=-1) + F.cosine_similarity(online(view2), wanted1, dim=-1)
        return (4 - 2 * similar).mean()

    def update_moving_average(online: nn.Module, tau: float = 0.99) -> None:
        for slow, fast in zip(target.parameters(), online[0].parameters(), strict=True):
            slow.data = slow.data * tau + fast.data * (1 - tau)

    x = torch.rand(batch, 64)
    return ig.TrainStep(
        online, loss, torch.optim.SGD(online.parameters(), lr=0.1, momentum=0.9), {"view1": x, "view2": x.flip(0)},
        model_inputs=["view1"], loss_inputs=["view1", "view2"], modules={"target": target},
        after_step=update_moving_average, entries={"embed": (encoder, {"x": torch.rand(256, 64)})},
    )  # fmt: skip


def augmented(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    moved = np.stack([np.roll(i, rng.integers(-1, 2, 2), (0, 1)) for i in images.reshape(-1, 8, 8)]).reshape(-1, 64)
    return np.float32(moved * rng.uniform(0.7, 1.0, (len(moved), 1)) + rng.normal(0, 0.1, moved.shape))


def train(session, steps: int = 600, batch: int = 128) -> None:
    images, rng = load_digits().data / 16, np.random.default_rng(0)
    for step in range(steps):
        rows, tau = rng.integers(0, len(images), batch), 1 - 0.01 * (math.cos(math.pi * step / steps) + 1) / 2
        views = {"view1": augmented(images[rows], rng), "view2": augmented(images[rows], rng)}
        loss = session.train_step(**views, tau=tau)
        print(f"step {step}: loss {loss:.3f}", end="\n" if step % 100 == 99 else "\r")
    found = session.call("embed", x=np.float32(images[:256]))
    units, labels = found / np.linalg.norm(found, axis=1, keepdims=True), load_digits().target[:256]
    same = labels[(units @ units.T - 2 * np.eye(256)).argmax(1)] == labels
    print(f"nearest neighbours have the same digit: {same.mean():.1%}")


if __name__ == "__main__":
    train(ig.compile(make_step(), "build/byol").load())
