"""Handwritten digits with a scheduler, after pytorch/examples/mnist: `python examples/scripts/mnist.py`."""

import warnings

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

import irongrad as ig

warnings.filterwarnings("ignore", "Detected call of `lr_scheduler")  # the eager optimizer does not step


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, width, 3), nn.Conv2d(width, 2 * width, 3)
        self.dropout, self.fc1, self.fc2 = nn.Dropout(0.25), nn.Linear(8 * width, 64), nn.Linear(64, 10)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(data))))
        x = self.dropout(torch.flatten(F.max_pool2d(x, 2), 1))
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def nll(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return F.nll_loss(output, target), {"correct": (output.argmax(1) == target).sum()}


def make_step(batch: int = 32, width: int = 16) -> ig.TrainStep:
    torch.manual_seed(1)
    model = Net(width)
    inputs = {"data": torch.rand(batch, 1, 8, 8), "target": torch.arange(batch) % 10}
    return ig.TrainStep(model, nll, torch.optim.Adadelta(model.parameters(), lr=1.0), inputs)


def train(session, optimizer: torch.optim.Optimizer, epochs: int = 8, batch: int = 32) -> None:
    digits = load_digits()
    batches = [
        {"data": np.float32(digits.images[i : i + batch, None] / 16), "target": digits.target[i : i + batch]}
        for i in range(0, 1797 - batch, batch)
    ]
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(epochs):
        losses = [session.train_step(**b, **ig.hypers(optimizer))[0] for b in batches[:-10]]
        scheduler.step()
        correct = sum(session.eval_step(**b)[1]["correct"] for b in batches[-10:])
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}, test accuracy {correct / (10 * batch):.1%}")


if __name__ == "__main__":
    step = make_step()
    train(ig.compile(step, "build/mnist").load(), step.optimizer)
