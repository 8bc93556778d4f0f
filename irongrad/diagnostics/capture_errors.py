"""Translate errors of torch.export into messages that name the user's line and what to write instead."""

from __future__ import annotations

import re

from irongrad.diagnostics.advice import KEEP_SHAPE, ONLY_THE_OPTIMIZER, VALUES_AS_SHAPE, refused_at_capture
from irongrad.diagnostics.source_lines import LONGEST, NODE, located, place_of
from irongrad.runtime.errors import CaptureError, UnsupportedOpError, UserError

_DEVICE = re.compile(r"not compiled with \w+ enabled|not linked with support for \w+ devices|No CUDA GPU|NVIDIA driver")

DECISION = (
    "a Python decision (if, while, assert, bool(), int(), float()) depends on the value of a tensor, which is not "
    "known at compile time. Write it with torch.where(condition, a, b), a mask, or torch.cond"
)


def capture_error(error: Exception, module: object, line: str = "") -> UserError:
    """Return the error that names the user's line and what to write instead of the code that failed.

    Args:
        error: what failed.
        module: what was captured.
        line: the user's line, if it is known; it is taken from `error` otherwise.
    """
    if isinstance(error, UnsupportedOpError):
        return located(error, place_of(error, module))
    if isinstance(error, UserError):
        return type(error)(str(error).partition(NODE)[0])
    place = line or place_of(error, module)
    if refused := refused_at_capture(error):
        return UnsupportedOpError(f"{place}\n  {refused}")
    return CaptureError(f"{place}\n  {by_values(error) or _advice(type(error).__name__, str(error).strip())}")


def by_values(error: Exception) -> str:
    """Return what to write instead of code that needs values of tensors while it is traced; empty for other code."""
    kind, text = type(error).__name__, str(error)
    if "Size-like symbols: u" in text or "unbacked symbol" in text:
        return f"{VALUES_AS_SHAPE} {KEEP_SHAPE}"
    return DECISION if "data-dependent" in text or "DataDependent" in kind or "control flow" in text.lower() else ""


def _advice(kind: str, text: str) -> str:
    first = (text.splitlines()[0] if text else kind)[:LONGEST]
    if ".numpy()" in text or ".tolist()" in text:
        return "a tensor leaves PyTorch (.numpy(), .tolist()); its values are not known at compile time. Use torch"
    if "a leaf Variable that requires grad" in text:
        return f"an operator writes into a parameter. {ONLY_THE_OPTIMIZER}"
    if "modified by an inplace operation" in text:
        return (
            "the backward needs a tensor that this line reads, and that is overwritten in place before the backward. "
            "Read a copy of it (tensor.clone()) here, or write the new value into another tensor"
        )
    if _DEVICE.search(text):
        return (
            "the step uses a device that PyTorch does not have here. A step is captured on the CPU, whatever it "
            "is compiled for: leave the device out, or take that of a tensor (x.device)"
        )
    if "were assigned during export" in text:
        return f"{first}. Register it with self.register_buffer(...) and update it in place, or return it"
    return f"the step could not be captured: {kind}: {first}"
