"""Translate errors of torch.export into messages that name the user's line and what to write instead."""

from __future__ import annotations

import re

from irongrad.diagnostics.advice import KEEP_SHAPE, ONLY_THE_OPTIMIZER, VALUES_AS_SHAPE, refused_at_capture
from irongrad.diagnostics.source_lines import LONGEST, NODE, located, place_of
from irongrad.runtime.errors import CaptureError, UnsupportedOpError, UserError

_DEVICE = (
    "the step uses a device that PyTorch does not have here. A step is captured on the CPU, whatever it is compiled "
    "for: leave the device out, or take that of a tensor (x.device)"
)
# What stands for a message of PyTorch's, by a pattern that it matches.
_MESSAGES: tuple[tuple[str, str], ...] = (
    (r"not compiled with \w+ enabled|not linked with support for \w+ devices|No CUDA GPU|NVIDIA driver|NVTX", _DEVICE),
    (
        r"format string passed to F\w+Tensor",
        "text is made from the value of a tensor, which is not known at compile time. Leave it out, or return the "
        "tensor and format it after the step",
    ),
    (
        r"fake tensor in the exported program constant's list",
        "a tensor is computed where the trace does not see it, such as in another thread. Compute it in the forward "
        "itself",
    ),
    (
        r"Cannot access data pointer",
        "the step reads the address of a tensor's memory (data_ptr), and the tensors of a trace have none. Ask whether "
        "two tensors are the same with `is`, and compute with operators of PyTorch",
    ),
    (
        r"\bSym(Float|Int|Bool)\b",
        "a tensor's value is taken out as a number (.item(), int(), float()), which is not known at compile time, and "
        "given to a function that is not PyTorch's. Keep it a tensor, and use PyTorch's function",
    ),
    (
        r"class 'torch.storage",
        "the step uses the storage of a tensor, and compiled tensors have none. Use operators on the tensor itself",
    ),
    (
        r"[Cc]an('t|not) pickle",
        "the step pickles an object (torch.save, pickle), which would happen once, at capture. Save what the step "
        "returns after it; copy a layer with copy.deepcopy",
    ),
    (
        r"Couldn't swap",
        "the forward casts or moves a module, which a compiled step cannot do. Do so before compiling, once, or cast "
        "the tensors instead",
    ),
    (
        r"group cannot be None|rocess group",
        "the step calls torch.distributed, and a compiled step runs in one process alone. Leave it out",
    ),
    (
        r"Unexpected key _export_root",
        "the forward catches an exception that a layer raised, which a trace cannot follow. Decide on the shape "
        "instead: if x.shape[1] == n",
    ),
    (
        r"Tensor dtype mismatch",
        "the default dtype changes in the forward. Leave torch.set_default_dtype out, and give each new tensor its "
        "dtype",
    ),
)

# What to do after a message of PyTorch's about the kinds and values of tensors, by a pattern that it matches.
_WAYS_OUT: tuple[tuple[str, str], ...] = (
    (r"(?i)\bdouble\b", "Arrays of NumPy are float64 by default: convert the input, such as x.float()"),
    (r"\bLong\b", "Class labels and indices are int64: convert the input, such as y.long()"),
    (
        r"(?i)out of (bounds|range)",
        "Class labels are below the number of the model's outputs, and ids below the number of an embedding's rows",
    ),
    (
        r"must be Tensor, not \w",
        "Is it what the model returns? Then take the tensor out in a loss function of your own, such as "
        "lambda output, y: cross_entropy(output['logits'], y)",
    ),
)

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


def eager_error(error: Exception, module: object) -> CaptureError:
    """Return the error for a step that eager PyTorch refuses on its example inputs, such as an index out of range."""
    said = str(error).partition("\n")[0][:LONGEST]
    failed = _with_way_out(f"eager fails on the example inputs: {type(error).__name__}: {said}")
    return CaptureError(f"{place_of(error, module)}\n  {failed}")


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
        return f"an operator writes into a parameter. {ONLY_THE_OPTIMIZER}, and make layers in __init__"
    if "modified by an inplace operation" in text:
        return (
            "the backward needs a tensor that this line reads, and that is overwritten in place before the backward. "
            "Read a copy of it (tensor.clone()) here, or write the new value into another tensor"
        )
    for pattern, advice in _MESSAGES:
        if re.search(pattern, text):
            return advice
    if "were assigned during export" in text:
        return f"{first}. Register it with self.register_buffer(...) and update it in place, or return it"
    return _with_way_out(f"the step could not be captured: {kind}: {first}")


def _with_way_out(message: str) -> str:
    """A message of PyTorch's, and what to do, if that is known."""
    known = next((advice for pattern, advice in _WAYS_OUT if re.search(pattern, message)), "")
    return f"{message.rstrip('.')}. {known}" if known else message
