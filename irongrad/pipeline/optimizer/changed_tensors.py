"""What a function of `TrainStep.after_step` changes in eager PyTorch, on the user's own objects, which are put back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from irongrad.diagnostics.source_lines import place_of, where
from irongrad.runtime.errors import CaptureError, UserError
from irongrad.step.after_step import AfterStep
from irongrad.step.borrow import borrowed
from irongrad.step.train_step import TrainStep


@dataclass(frozen=True)
class Changes:
    """The changes of one run.

    Attributes:
        names: the state that changed.
    """

    names: tuple[str, ...]


def changes_of(step: TrainStep, after: AfterStep, tensors: Mapping[str, torch.Tensor]) -> Changes:
    """Run the function once on other values than the present ones, so that a copy of equal values shows.

    Args:
        step: the step.
        after: the function.
        tensors: the tensors that are state of the step, by name.

    Raises:
        CaptureError: the function fails, or it changes a Python value, the optimizer's state or another tensor.
    """
    names = {id(tensor): name for name, tensor in tensors.items()}
    with borrowed(step) as record:
        _shift(tensors)
        before = [(t, t.detach().clone()) for t in record.tensors if t.layout is torch.strided]
        latest = record.renewed()
        groups = [(group, dict(group)) for optimizer in step.optimizers for group in optimizer.param_groups]
        try:
            after.run(step.model, {}, step.modules.values())
        except UserError:
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            place = place_of(error, after.function)
            if ".grad" in place:
                reason += ". It runs without gradients: a gradient is used up by the update before it"
            raise CaptureError(f"{place}\n  after_step fails: {reason}") from error
        numbers = [key for group, old in groups for key in group if group[key] is not old.get(key)]
        changed = [t for t, old in before if not _is_equal(t, old)]
        description = latest.changed()
    held = {id(t) for o in step.optimizers for s in o.state.values() for t in s.values() if isinstance(t, torch.Tensor)}
    if numbers:
        raise CaptureError(
            f"{where(after.function)}: after_step changes {numbers[0]!r} of the optimizer, which is an input of the "
            "step. Change it outside, and call session.train_step(..., **ig.hypers(optimizer))"
        )
    for tensor in changed:
        if id(tensor) in held:
            raise CaptureError(
                f"{where(after.function)}: after_step changes a tensor of the optimizer's state, of shape "
                f"{tuple(tensor.shape)}. The optimizer alone may change it; write the rule in its own step"
            )
        if id(tensor) not in names:
            raise CaptureError(
                f"{where(after.function)}: after_step changes a tensor of shape {tuple(tensor.shape)} that is neither "
                "in the model nor in TrainStep.modules, so it is no state of the step. Hand its module over: "
                "modules={'target': target}. Tensors that no module holds can be buffers of one"
            )
    if description:
        raise CaptureError(
            f"{where(after.function)}: after_step changes a Python value ({description}), which a compiled step would "
            "keep as it is. Keep a counter in a buffer, change tensors in place, or use ig.every(k, function)"
        )
    return Changes(tuple(names[id(t)] for t in changed))


def _shift(tensors: Mapping[str, torch.Tensor]) -> None:
    """Give each floating-point tensor values of its own."""
    with torch.no_grad():
        for number, tensor in enumerate(tensors.values()):
            if tensor.is_floating_point():
                tensor.add_(0.01 * (number + 1))


def _is_equal(tensor: torch.Tensor, old: torch.Tensor) -> bool:
    return bool(tensor.shape == old.shape and torch.equal(tensor.detach(), old))
