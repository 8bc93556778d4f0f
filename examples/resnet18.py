"""ResNet-18 as for CIFAR (3x3 stem, no pooling before the blocks) on 8x8 digits: `python examples/resnet18.py`.

He et al., "Deep Residual Learning for Image Recognition" (arXiv:1512.03385).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F
from training import Batch, digit_batches, print_accuracy, train

import irongrad as ig


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: float32 [N, inputs, H, W] -> [N, outputs, H / stride, W / stride]."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return relu(residual + shortcut)."""
        hidden = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(hidden)) + self.shortcut(x))


class ResNet18(nn.Module):
    """Four stages of two blocks with `width`, 2, 4 and 8 times `width` channels: float32 [N, C, H, W] -> [N, 10]."""

    def __init__(self, width: int, colours: int = 1) -> None:
        super().__init__()
        stem = nn.Conv2d(colours, width, 3, padding=1, bias=False)
        self.stem = nn.Sequential(stem, nn.BatchNorm2d(width), nn.ReLU())
        channels = [width, width, 2 * width, 4 * width, 8 * width]
        blocks = []
        for stage in range(4):
            inputs, outputs = channels[stage : stage + 2]
            blocks += [BasicBlock(inputs, outputs, 1 if stage == 0 else 2), BasicBlock(outputs, outputs, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(8 * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one logit a class."""
        features = self.blocks(self.stem(x))
        return self.classifier(F.adaptive_avg_pool2d(features, 1).flatten(1))


def make_step(batch: int = 64, width: int = 16, image: tuple[int, int, int] | None = None) -> ig.TrainStep:
    """SGD with Nesterov momentum.

    Args:
        batch: how many images.
        width: how many channels the first stage has; the network of the paper has 64.
        image: colours, height and width of random images in place of the digits; CIFAR's are [3, 32, 32].
    """
    torch.manual_seed(0)
    if image is None:
        model = ResNet18(width)
        example = {name: torch.from_numpy(array) for name, array in next(batches(batch)).items()}
    else:
        model = ResNet18(width, colours=image[0])
        example = {"x": torch.randn(batch, *image), "y": torch.randint(10, (batch,))}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    return ig.TrainStep(model, nn.CrossEntropyLoss(), optimizer, example)


def batches(batch: int = 64, seed: int = 0, *, train: bool = True) -> Iterator[Batch]:
    """Yield one epoch of digits: `x` float32 [batch, 1, 8, 8], `y` int64 [batch]."""
    for digits in digit_batches(batch, seed, train=train):
        yield {"x": digits["x"][:, None], "y": digits["y"]}


def main() -> None:
    """Compile, train and test."""
    session = ig.compile(make_step(), "build/resnet18", entry_points=("train_step", "eval_step", "predict")).load()
    train(session, batches, epochs=5)
    print_accuracy(session, batches)


if __name__ == "__main__":
    main()
