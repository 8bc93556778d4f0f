"""A small DETR that finds digits in scenes: `python examples/detr.py`.

Carion et al., "End-to-End Object Detection with Transformers" (2020): a convolutional backbone, a Transformer whose
queries each give one box, and a loss over the cheapest matching of queries with objects. Only Python has that matching,
as scipy's `linear_sum_assignment`. So the step is compiled in two pieces, and Python is between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch
from rich.progress import Progress
from scipy.optimize import linear_sum_assignment
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from training import Batch, Eager

import irongrad as ig
from irongrad.runtime.session import Session

SIZE = 32  # of a scene, in pixels
OBJECTS = 3  # at most in a scene
NONE = 10  # the class of a query without an object, and of an object that a scene lacks
BOXES, OVERLAP = 5.0, 2.0  # weights of the loss's parts, as in the paper; that of the class is 1


class DETR(nn.Module):
    """float32 [B, 1, 32, 32] -> `logits` float32 [B, queries, 11] and `boxes` float32 [B, queries, 4] in 0 to 1."""

    def __init__(self, width: int, heads: int, layers: int, queries: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width // 2, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width // 2),
            nn.ReLU(),
            nn.Conv2d(width // 2, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )
        self.places = nn.Parameter(torch.randn((SIZE // 4) ** 2, width))
        self.queries = nn.Parameter(torch.randn(queries, width))
        block = nn.TransformerDecoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(block, layers)
        self.classes = nn.Linear(width, NONE + 1)
        self.boxes = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a class and a box (centre, width, height, as parts of the scene) of every query."""
        features = self.backbone(image).flatten(2).transpose(1, 2) + self.places
        found = self.decoder(self.queries.expand(len(image), -1, -1), features)
        return {"logits": self.classes(found), "boxes": self.boxes(found).sigmoid()}


def overlap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The generalised intersection over union of boxes [..., 4], Rezatofighi et al. (2019): [...] in -1 to 1."""
    low_a, high_a = a[..., :2] - a[..., 2:] / 2, a[..., :2] + a[..., 2:] / 2
    low_b, high_b = b[..., :2] - b[..., 2:] / 2, b[..., :2] + b[..., 2:] / 2
    shared = (torch.minimum(high_a, high_b) - torch.maximum(low_a, low_b)).clamp(min=0).prod(-1)
    union = a[..., 2:].prod(-1) + b[..., 2:].prod(-1) - shared
    hull = (torch.maximum(high_a, high_b) - torch.minimum(low_a, low_b)).prod(-1)
    return shared / union - (hull - union) / hull


def loss(
    outputs: dict[str, torch.Tensor], classes: torch.Tensor, boxes: torch.Tensor, owner: torch.Tensor
) -> torch.Tensor:
    """Cross entropy of every query's class, and how far the boxes of queries with an object are from it.

    Args:
        outputs: the model's.
        classes: of the objects, int64 [B, objects].
        boxes: of the objects, float32 [B, objects, 4].
        owner: which object each query has, int64 [B, queries]; the number of objects where it has none.
    """
    wanted = F.pad(classes, (0, 1), value=NONE).gather(1, owner)
    rare = torch.where(torch.arange(NONE + 1) == NONE, 0.1, 1.0)
    by_class = F.cross_entropy(outputs["logits"].flatten(0, 1), wanted.flatten(), rare.to(boxes.dtype))
    taken = (owner < classes.shape[1]).to(boxes.dtype)
    target = F.pad(boxes, (0, 0, 0, 1), value=0.5).gather(1, owner.unsqueeze(-1).expand(-1, -1, 4))
    distance = (outputs["boxes"] - target).abs().sum(-1)
    by_box = BOXES * distance + OVERLAP * (1 - overlap(outputs["boxes"], target))
    return by_class + (by_box * taken).sum() / taken.sum()


def match(outputs: dict[str, np.ndarray], classes: np.ndarray, boxes: np.ndarray) -> Batch:
    """The `owner` of every query, so that the cost over a scene is the least: what only Python can do."""
    logits, found = (np.asarray(outputs[name], np.float64) for name in ("logits", "boxes"))
    scores = np.exp(logits - logits.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    owner = np.full(found.shape[:2], classes.shape[1], np.int64)
    for scene, real in enumerate(classes != NONE):
        target = torch.from_numpy(boxes[scene][real].astype(np.float64))
        pairs = torch.from_numpy(found[scene])[:, None], target[None]
        cost = BOXES * (pairs[0] - pairs[1]).abs().sum(-1) - OVERLAP * overlap(*pairs)
        queries, objects = linear_sum_assignment(cost.numpy() - scores[scene][:, classes[scene][real]])
        owner[scene, queries] = objects
    return {"owner": owner}


def make_step(batch: int = 16, width: int = 48, heads: int = 4, layers: int = 2, queries: int = 8) -> ig.TrainStep:
    """AdamW, in two pieces: `owner` is what Python finds between the model and the loss."""
    torch.manual_seed(0)
    model = DETR(width, heads, layers, queries)
    example = {name: torch.from_numpy(array) for name, array in next(batches(batch)).items()}
    example["owner"] = torch.arange(queries).clamp(max=OBJECTS).expand(batch, -1).contiguous()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    return ig.pieces(ig.TrainStep(model, loss, optimizer, example, clip_grad_norm=0.5), between=["owner"])


def batches(batch: int = 16, seed: int = 0, *, train: bool = True) -> Iterator[Batch]:
    """Yield scenes of one to three handwritten digits on an empty ground, without overlap.

    `image` is float32 [batch, 1, 32, 32], `classes` int64 [batch, 3], `boxes` float32 [batch, 3, 4]. Of the digits, the
    last 360 are held out.
    """
    data = load_digits()
    part = slice(None, -360) if train else slice(-360, None)
    rng = np.random.default_rng(seed if train else 1_000_000)
    for _ in range(100 if train else 20):
        scenes = [scene(data.images[part] / 16, data.target[part], rng) for _ in range(batch)]
        yield {name: np.stack([s[name] for s in scenes]) for name in scenes[0]}


def scene(images: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> Batch:
    """One scene; digits stand in different quarters of it, each 8 to 16 pixels high and wide."""
    image = np.zeros((1, SIZE, SIZE), np.float32)
    classes, boxes = np.full(OBJECTS, NONE, np.int64), np.full((OBJECTS, 4), 0.5, np.float32)
    for number, quarter in enumerate(rng.permutation(4)[: rng.integers(1, OBJECTS + 1)]):
        chosen = rng.integers(len(labels))
        height, width = rng.integers(8, SIZE // 2 + 1, 2)
        top = SIZE // 2 * (quarter // 2) + rng.integers(SIZE // 2 - height + 1)
        left = SIZE // 2 * (quarter % 2) + rng.integers(SIZE // 2 - width + 1)
        rows, columns = np.arange(height) * 8 // height, np.arange(width) * 8 // width
        image[0, top : top + height, left : left + width] = images[chosen][np.ix_(rows, columns)]
        classes[number] = labels[chosen]
        boxes[number] = np.array([left + width / 2, top + height / 2, width, height]) / SIZE
    return {"image": image, "classes": classes, "boxes": boxes}


def held_out(session: Session) -> tuple[float, float]:
    """The loss in evaluation mode on held-out scenes, and the share of their objects that are found.

    One is found where the query that it is matched with has its class, and a box that overlaps it by half.
    """
    losses, hits = list[float](), list[np.ndarray]()
    for batch in batches(train=False):
        outputs = session.predict(image=batch["image"])
        owner = match(outputs, batch["classes"], batch["boxes"])["owner"]
        losses.append(session.eval_step(**batch, owner=owner))
        scenes, queries = np.nonzero(owner < OBJECTS)
        objects = owner[scenes, queries]
        right = outputs["logits"][scenes, queries].argmax(-1) == batch["classes"][scenes, objects]
        boxes = outputs["boxes"][scenes, queries], batch["boxes"][scenes, objects]
        hits.append(right & (overlap(*map(torch.from_numpy, boxes)).numpy() > 0.5))
    return float(np.mean(losses)), float(np.concatenate(hits).mean())


def main(epochs: int = 12) -> None:
    """Compile, train beside eager for a while, then alone."""
    step = make_step()
    session = ig.compile(step, "build/detr").load()
    eager = Eager(step)
    pairs = [(session.run_pieces(match, **b), eager.train_step(match, **b)) for b in islice(batches(), 20)]
    apart = max(abs(compiled - plain) for compiled, plain in pairs)
    print(f"the losses of 20 steps differ from eager's by at most {apart:.1e}")
    with Progress() as progress:
        for epoch in progress.track(range(epochs), description="training"):
            losses = [session.run_pieces(match, **batch) for batch in batches(seed=epoch)]
            value, found = held_out(session)
            progress.console.print(
                f"epoch {epoch + 1:2}: loss {np.mean(losses):.3f}, held-out loss {value:.3f}, {found:.0%} found"
            )


if __name__ == "__main__":
    main()
