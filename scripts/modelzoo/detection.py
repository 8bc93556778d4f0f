"""Object detectors as training steps; which prediction answers to which target comes in as an input.

That matching (Hungarian for DETR, task-aligned for YOLOv8) is data-dependent, and runs outside of the step.
"""

from __future__ import annotations

import importlib.metadata
from unittest import mock

import numpy as np
import torch
import transformers as hf
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import irongrad as ig

CLASSES = 4
BATCH = 2
QUERIES = 6
BINS = 16  # of YOLOv8's distribution over each side's distance


class _AlwaysClamps(TorchFunctionMode):
    """DETR's encoder clamps hidden states `if not torch.isfinite(states).all()`; here it clamps them always.

    A Python decision on values cannot be compiled. Finite numbers are within the bounds and stay as they are, so the
    decision saves time only.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return np.False_ if func is torch.isfinite else func(*args, **(kwargs or {}))


class _Detr(nn.Module):
    """DETR's network alone: class logits and boxes (centre, size) of every query."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.detr = model

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with _AlwaysClamps():
            output = self.detr(pixel_values=pixel_values)
        return output.logits, output.pred_boxes


def _corners(boxes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    centre, size = boxes[..., :2], boxes[..., 2:]
    return centre - size / 2, centre + size / 2


def _generalized_iou(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Rezatofighi et al., arXiv:1902.09630, of boxes given by centre and size."""
    (low1, high1), (low2, high2) = _corners(one), _corners(other)
    area = one[..., 2:].prod(-1) + other[..., 2:].prod(-1)
    inside = (torch.minimum(high1, high2) - torch.maximum(low1, low2)).clamp(min=0).prod(-1)
    hull = (torch.maximum(high1, high2) - torch.minimum(low1, low2)).prod(-1)
    union = area - inside
    return inside / union - (hull - union) / hull


def _detr_loss(output: tuple[torch.Tensor, torch.Tensor], classes: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """DETR's set loss (Carion et al., arXiv:2005.12872) given matched targets.

    `classes` [B, queries] holds `CLASSES` for a query that matches nothing; `boxes` [B, queries, 4].
    """
    logits, predicted = output
    weight = torch.ones(CLASSES + 1, dtype=logits.dtype)
    weight[-1] = 0.1
    matched = (classes != CLASSES).to(logits.dtype)
    count = matched.sum().clamp(min=1)
    label = functional.cross_entropy(logits.transpose(1, 2), classes, weight)
    distance = ((predicted - boxes).abs().sum(-1) * matched).sum() / count
    overlap = ((1 - _generalized_iou(predicted, boxes)) * matched).sum() / count
    return label + 5 * distance + 2 * overlap


def detr() -> ig.TrainStep:
    """Carion et al., arXiv:2005.12872, over a small ResNet."""
    backbone = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = hf.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone,
        num_queries=QUERIES, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=64, decoder_ffn_dim=64,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
        num_labels=CLASSES,
    )  # fmt: skip
    model = _Detr(hf.DetrForObjectDetection(config))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    classes = torch.full((BATCH, QUERIES), CLASSES)
    classes[:, 1], classes[0, 3] = 2, 0
    boxes = torch.rand(BATCH, QUERIES, 4) * 0.4 + 0.3
    inputs = {"pixel_values": torch.randn(BATCH, 3, 32, 32), "classes": classes, "boxes": boxes}
    return ig.TrainStep(model=model, loss=_detr_loss, optimizer=optimizer, inputs=inputs)


class _Yolo(nn.Module):
    """YOLOv8's network alone: class logits and box distributions; in evaluation the decoded boxes too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.yolo = model

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            raw, decoded = self.yolo(x), {}
        else:
            boxes, raw = self.yolo(x)
            decoded = {"predictions": boxes}
        return {"scores": raw["scores"], "boxes": raw["boxes"], **decoded}


def _yolo_loss(output: dict[str, torch.Tensor], scores: torch.Tensor, sides: torch.Tensor) -> torch.Tensor:
    """YOLOv8's classification and distribution focal loss, given assigned targets.

    `scores` [B, CLASSES, anchors] are the assigner's soft class targets, zero where nothing is assigned; `sides`
    [B, 4, anchors] are the distances to the box's sides in strides, within [0, BINS - 1). Distribution focal loss: Li
    et al., arXiv:2006.04388.
    """
    total = scores.sum().clamp(min=1)
    label = functional.binary_cross_entropy_with_logits(output["scores"], scores, reduction="sum") / total
    logits = output["boxes"].unflatten(1, (4, BINS)).log_softmax(2)
    left = sides.floor()
    above = sides - left
    index = left.long().unsqueeze(2)
    lower = logits.gather(2, index).squeeze(2) * (1 - above)
    upper = logits.gather(2, index + 1).squeeze(2) * above
    weight = scores.sum(1)
    spread = -((lower + upper).mean(1) * weight).sum() / total
    places = torch.arange(BINS, dtype=logits.dtype)
    predicted = (logits.exp() * places.view(1, 1, -1, 1)).sum(2)
    inside = torch.minimum(predicted, sides)
    overlap = (inside[:, 0] + inside[:, 2]) * (inside[:, 1] + inside[:, 3])
    area = (predicted[:, 0] + predicted[:, 2]) * (predicted[:, 1] + predicted[:, 3])
    wanted = (sides[:, 0] + sides[:, 2]) * (sides[:, 1] + sides[:, 3])
    box = ((1 - overlap / (area + wanted - overlap)) * weight).sum() / total
    return 0.5 * label + 1.5 * spread + 7.5 * box


def yolov8() -> ig.TrainStep:
    """The network of ultralytics' YOLOv8 (nano)."""
    version = importlib.metadata.version
    # It asks for torchvision's version at import, and calls nothing of it here; there is no build that loads.
    with mock.patch("importlib.metadata.version", lambda name: "0.28.0" if name == "torchvision" else version(name)):
        from ultralytics.nn.tasks import DetectionModel
    model = _Yolo(DetectionModel("yolov8n.yaml", nc=CLASSES, verbose=False))
    x = torch.randn(BATCH, 3, 64, 64)
    with torch.no_grad():
        model.eval()(x)  # it keeps its anchors, which it makes for each new size in Python
    model.train()
    anchors = sum((64 // stride) ** 2 for stride in (8, 16, 32))
    scores = torch.zeros(BATCH, CLASSES, anchors)
    scores[:, 1, ::7] = torch.rand(BATCH, len(range(0, anchors, 7)))
    inputs = {"x": x, "scores": scores, "sides": torch.rand(BATCH, 4, anchors) * 3 + 0.5}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)
    return ig.TrainStep(model=model, loss=_yolo_loss, optimizer=optimizer, inputs=inputs, model_inputs=["x"])


MODELS = {"DETR": detr, "YOLOv8": yolov8}
