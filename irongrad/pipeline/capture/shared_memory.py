"""Tensors of a step that share memory: a compiled step keeps each tensor of its state apart, so that is refused.

Two names of one tensor object (tied weights) are one tensor of the state. Two tensor objects over one storage are not:
eager shows a write into one of them in the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.export import ExportedProgram

from irongrad.diagnostics.source_lines import where
from irongrad.pipeline.capture.side_effects import written_state
from irongrad.pipeline.capture.step_modules import name_of
from irongrad.runtime.errors import CaptureError
from irongrad.step.train_step import TrainStep


def refuse_shared_memory(step: TrainStep, module: nn.Module, program: ExportedProgram) -> None:
    """Refuse tensors that share memory, if the step writes into one of them.

    Args:
        step: the step.
        module: the model with its loss, as `program` was exported from it.
        program: the training program.

    Raises:
        CaptureError: names both tensors.
    """
    named = dict(_named(module, program))
    updated = set(map(id, step.trained))
    written = {name for name, tensor in named.items() if id(tensor) in updated} | written_state(program)
    ranges = sorted((*_range(tensor), name) for name, tensor in named.items() if _has_memory(tensor))
    for number, (_, end, name) in enumerate(ranges):
        for other_start, _, other in ranges[number + 1 :]:
            if other_start >= end:
                break
            if named[name] is not named[other] and {name, other} & written:
                raise CaptureError(
                    f"{where(step.model)}: {_spelled(name)} and {_spelled(other)} share memory (one is an alias, or a "
                    "view, of the other). A compiled step keeps them apart, so a write into one would not show in the "
                    "other. Make one of them a copy, .clone(), or use one tensor under both names"
                )


def _named(module: nn.Module, program: ExportedProgram) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
    for name, constant in program.constants.items():
        if isinstance(constant, torch.Tensor):
            yield f"the constant {name}", constant


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0 and tensor.device.type != "meta"


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of a tensor and of the first after it."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _spelled(name: str) -> str:
    return name if name.startswith("the constant") else repr(name_of(name))
