"""ONNX models as `torch.nn.Module`s that can be trained.

model = irongrad.onnx.load("model.onnx")
step = irongrad.TrainStep(model=model, loss=..., optimizer=torch.optim.AdamW(model.parameters()), inputs=...)
"""

from __future__ import annotations

from irongrad.onnx.load import load as load
from irongrad.onnx.model import OnnxModel as OnnxModel

__all__ = ["OnnxModel", "load"]
