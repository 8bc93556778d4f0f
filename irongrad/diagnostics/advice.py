"""Advice on what to use instead of an operator that cannot be compiled."""

from __future__ import annotations

import re

import torch

VALUES_AS_SHAPE = "a tensor's shape depends on values, such as that of x[mask], nonzero or unique."

KEEP_SHAPE = "Keep the shape: multiply by the mask, or use torch.where(mask, x, 0)"

ONLY_THE_OPTIMIZER = "Only the optimizer may update parameters; compute a new tensor"


NO_LOWERING = "has no lowering: it is no core operator, and has no decomposition here"
_REGISTER = "give it a decomposition with irongrad.register_decomposition({operator})(function)"

# By a prefix of the operator's name without namespace and leading underscore; the longest match counts.
_HINTS = {
    "bincount": "compare with torch.arange(n): (x[:, None] == torch.arange(n)).sum(0)",
    "eig": "torch.linalg.eigh, if the matrix is symmetric",
    "equal": "(a == b).all(), which stays a tensor",
    "linalg_eig": "torch.linalg.eigh, if the matrix is symmetric",
    "linalg_eigvals": "torch.linalg.eigvalsh, if the matrix is symmetric",
    "local_scalar_dense": "the tensor itself: arithmetic takes a tensor of no dimensions wherever it takes a number",
    "masked_select": KEEP_SHAPE,
    "nested": "padded tensors with a mask",
    "nonzero": KEEP_SHAPE,
    "pack_padded_sequence": "padded sequences with a mask over the time steps",
    "pad_packed_sequence": "padded sequences with a mask over the time steps",
    "quantize": "float tensors; quantise the trained weights afterwards",
    "repeat_interleave": "a number of repeats, or the argument output_size with torch.gather",
    "sparse": "dense tensors",
    "to_sparse": "dense tensors",
    "unique": "torch.sort and a comparison of neighbours, which keep the shape",
}

DENSE = "x.to_dense() outside"
COMPLEX = "torch.view_as_real(x) outside the function and torch.view_as_complex(x) inside it"


def advice(operator: str) -> str:
    """Return what to use instead of `operator`, such as `aten.unique_dim.default`: a sentence without its full stop."""
    return known(operator) or f"Write it with other operators, or {_REGISTER.format(operator=f'torch.ops.{operator}')}"


def known(operator: str) -> str | None:
    """Return what to use instead of `operator`, if this module has a hint for it."""
    name = operator.partition(".")[2].lstrip("_")
    fitting = [prefix for prefix in _HINTS if name.startswith(prefix)]
    return f"Use {_HINTS[max(fitting, key=len)]}".replace("Use Keep", "Keep") if fitting else None


def reason(target: torch._ops.OpOverload) -> str:
    """Return why `target` cannot be compiled."""
    if target.namespace not in ("aten", "prims"):
        return "is a custom operator without a decomposition"
    if torch.Tag.nondeterministic_seeded in target.tags:
        return "draws random numbers in a way that a compiled program cannot repeat"
    if torch.Tag.dynamic_output_shape in target.tags:
        return f"cannot be compiled: {VALUES_AS_SHAPE.rstrip('.')}"
    if torch.Tag.data_dependent_output in target.tags:
        return "gives a Python value that depends on the values of a tensor, which are not known at compile time"
    return NO_LOWERING


# Exceptions that name the operator: its output shape depends on values, or it has no kernel or formula at all.
_NAMED = frozenset({"DynamicOutputShapeException", "DataDependentOutputException", "UnsupportedOperatorException"})
_NO_FORMULA = re.compile(r"trying to backward through (\S+?)(?:\.\w+)? but no autograd formula", re.IGNORECASE)
# torch.export names a size that depends on values u0, u1, ...
_UNKNOWN_SIZE = re.compile(r"size of tensor .*\(u\d+\)")
_NO_FAKE = re.compile(r"no fake impl registered for <CustomOpDef\((\w+)::(\w+)\)>")
_WRITES = re.compile(r"custom \(non-ATen\) operator whose output has alias annotations: (\w+)::(\w+)")
_NO_KERNEL = re.compile(
    r"Could not run '(\w+)::([\w.]+)' with arguments from the '(Sparse|Nested|Quantized)\w*' backend"
)


def refused_at_capture(error: Exception) -> str | None:
    """Return the operator that PyTorch's tracing error is about, with reason and advice; None if it names none."""
    target = getattr(error, "func", None)
    if type(error).__name__ in _NAMED and isinstance(target, torch._ops.OpOverload):
        if target is torch.ops.aten._local_scalar_dense.default:
            return None  # a Python decision, for which `capture_errors` has a message
        return f"{target} {reason(target)}. {advice(str(target))}"
    text = str(error)
    if _UNKNOWN_SIZE.search(text):
        return f"an operator after this one needs its size, but {VALUES_AS_SHAPE} {KEEP_SHAPE}"
    if "setStorage" in text and "out of bounds" in text:
        return (
            "as_strided reads elements beyond those of its tensor, from the storage that this is a view of; compiled "
            "code gets arrays. Take the view inside, of the whole tensor"
        )
    if match := _NO_FORMULA.search(text):
        name = match[1].replace("::", ".")
        return f"{name} has no autograd formula. Register one, or {_REGISTER.format(operator=f'torch.ops.{name}')}"
    if match := _NO_FAKE.search(text):
        name = f"{match[1]}.{match[2]}"
        return f"{name} is a custom operator without a decomposition. {advice(f'{name}.default')}"
    if match := _WRITES.search(text):
        name = f"{match[1]}.{match[2]}"
        return f"{name} is a custom operator that writes into its arguments. {advice(name)}"
    if match := _NO_KERNEL.search(text):
        kind = match[3].lower()
        return f"{match[1]}.{match[2]} on {kind} tensors cannot be compiled. Use {_HINTS.get(kind, _HINTS['quantize'])}"
    return None
