"""The own step of an optimizer: where it is written, a call of it, and which steps no compiled step can have."""

from __future__ import annotations

from inspect import signature, unwrap

import torch

from irongrad.diagnostics.source_lines import place_of
from irongrad.runtime.errors import CaptureError, UserError
from irongrad.step.optimizer_slots import Slot, own_attributes

_CLOSURE = (
    "An optimizer whose step needs a closure, to evaluate the loss again, cannot be compiled, such as LBFGS. Use one "
    "that updates from the gradients alone; for SAM, its base optimizer with TrainStep(..., sam=ig.SAM(rho=0.05))"
)


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot step without a closure, from dense gradients, or by itself.

    Raises:
        CaptureError: it is one; with its name.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise CaptureError(
            f"{name} updates from sparse gradients, and a compiled step has dense ones. Use torch.optim.Adam"
        )
    inner = next((n for n, v in own_attributes(optimizer).items() if isinstance(v, torch.optim.Optimizer)), None)
    if inner is not None:
        raise CaptureError(
            f"{step_of(optimizer)}\n  {name} wraps another optimizer, self.{inner}, whose state would be lost. Use an "
            "optimizer that has both rules in its own step"
        )
    closure = signature(unwrap(type(optimizer).step)).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is closure.empty):
        raise CaptureError(f"{name}.step needs a closure. {_CLOSURE}")


def step_of(optimizer: torch.optim.Optimizer) -> str:
    """`file:line` of an optimizer's step, also in an installed package."""
    code = unwrap(type(optimizer).step).__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


def changes_a_flag(optimizer: torch.optim.Optimizer, flag: str) -> CaptureError:
    """The refusal of an optimizer that changes a truth value or a word, named `flag`, after its first step."""
    return CaptureError(
        f"{step_of(optimizer)}\n  {type(optimizer).__name__} changes {flag} from step to step, which is neither a "
        "number nor a tensor: a compiled step would keep it. Keep a counter instead"
    )


def changes_its_layout(optimizer: torch.optim.Optimizer, slot: Slot) -> CaptureError:
    """The refusal of an optimizer that has `slot` in its state after some steps only."""
    return CaptureError(
        f"{step_of(optimizer)}\n  {type(optimizer).__name__} changes the layout of its state from step to step, at "
        f"{slot.name}; a compiled step's state has one layout. Keep tensors and numbers under the same keys from the "
        "first step on"
    )


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """Call the optimizer's own `step`, without hooks and without what a scheduler wraps around it.

    Raises:
        CaptureError: it fails; with the user's line.
    """
    step = type(optimizer).step
    try:
        getattr(step, "__wrapped__", step)(optimizer)
    except UserError:
        raise
    except Exception as error:
        needs_closure = "closure" in signature(unwrap(step)).parameters
        reason = str(error).partition("\n")[0] or type(error).__name__
        way_out = _CLOSURE if needs_closure else "It has to update from the gradients alone"
        name = type(optimizer).__name__
        raise CaptureError(
            f"{place_of(error, unwrap(step))}\n  {name}.step cannot be compiled: {reason}. {way_out}"
        ) from error
