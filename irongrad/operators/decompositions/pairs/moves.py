"""Operators that treat both parts alike: moves, fills, casts and linear operators with real coefficients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from irongrad.graph.recorder import Operator
from irongrad.operators.decompositions.pairs.pair import Pair, Rule, Value, as_pair, nonzero, on_pairs, real_dtype

aten = torch.ops.aten
prims = torch.ops.prims

_MOVES = """
    reshape expand permute transpose.int t slice.Tensor select.int squeeze squeeze.dim squeeze.dims unsqueeze
    as_strided unbind.int split.Tensor split_with_sizes diagonal diag_embed unfold flip roll rot90 repeat
    tril triu trace alias detach clone contiguous lift_fresh lift_fresh_copy positive
    index.Tensor _unsafe_index.Tensor index_select gather take cat stack constant_pad_nd
    reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
    reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
    replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
    index_put _unsafe_index_put index_add index_copy index_fill.int_Scalar index_fill.int_Tensor put scatter.src
    scatter.value scatter_add slice_scatter select_scatter diagonal_scatter masked_fill.Scalar
    masked_fill.Tensor masked_scatter fill.Scalar fill.Tensor copy
    slice_backward select_backward diagonal_backward unfold_backward masked_scatter_backward im2col col2im
    view_copy expand_copy permute_copy transpose_copy.int t_copy slice_copy.Tensor select_copy.int squeeze_copy
    squeeze_copy.dim unsqueeze_copy as_strided_copy diagonal_copy alias_copy detach_copy
    neg _neg_view _neg_view_copy sum sum.dim_IntList mean mean.dim nansum cumsum
    zeros _efficientzerotensor zeros_like new_zeros empty.memory_format empty_like new_empty empty_strided
    new_empty_strided empty_permuted full full_like new_full scalar_tensor
"""

# The names of the arguments that hold values, for all operators above. One of them may be real while another is
# complex. All other arguments (indices, masks, sizes) are the same for both parts.
_VALUES = frozenset(
    {"self", "other", "values", "value", "src", "source", "tensors", "input", "fill_value", "s"}
    | {"grad", "grad_output", "grad_in"}
)


def _on_both_parts(operator: torch._ops.OpOverload) -> Rule:
    names = [a.name for a in operator._schema.arguments]

    def rule(*args: Any, **kwargs: Any) -> Any:
        named = [*zip(names, args, strict=False), *kwargs.items()]
        sides = []
        for imaginary in (False, True):
            chosen = {n: _side(v, imaginary) if n in _VALUES else _with_real_dtype(v) for n, v in named}
            sides.append(operator(*(chosen[n] for n in names[: len(args)]), **{n: chosen[n] for n in kwargs}))
        re, im = sides
        return Pair(re, im) if isinstance(re, Tensor) else [Pair(*p) for p in zip(re, im, strict=True)]

    return rule


def _side(value: Any, imaginary: bool) -> Any:
    """The real or the imaginary part of a value; for a list, of each element."""
    if isinstance(value, list | tuple):
        return [_side(v, imaginary) for v in value]
    if isinstance(value, Pair):
        return value.im if imaginary else value.re
    if isinstance(value, Tensor):
        return torch.zeros_like(value) if imaginary else value
    if isinstance(value, bool | int | float | complex):
        return complex(value).imag if imaginary else complex(value).real
    return value


def _with_real_dtype(value: Any) -> Any:
    return real_dtype(value) if isinstance(value, torch.dtype) else value


def _operator(name: str) -> torch._ops.OpOverload:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


for _name in _MOVES.split():
    on_pairs(_operator(_name))(_on_both_parts(_operator(_name)))

# view requires compatible strides, which the parts of a pair need not have.
on_pairs(aten.view.default, aten._unsafe_view.default)(_on_both_parts(aten.reshape.default))


def _ones(operator: Operator) -> Rule:
    def rule(*args: Any, **kwargs: Any) -> Pair:
        args = tuple(a.re if isinstance(a, Pair) else a for a in args)
        return as_pair(operator(*args, **{n: _with_real_dtype(v) for n, v in kwargs.items()}))

    return rule


for _constructor in (aten.ones.default, aten.ones_like.default, aten.new_ones.default, aten.eye.default, aten.eye.m):
    on_pairs(_constructor)(_ones(_constructor))


@on_pairs(aten._to_copy.default)
def to_copy(self: Value, dtype: torch.dtype | None = None, **kwargs: Any) -> Value:
    """Cast `self`: complex to real drops the imaginary part, and to bool every nonzero value is true."""
    target = None if dtype is None else real_dtype(dtype)
    if not isinstance(self, Pair):
        return as_pair(aten._to_copy.default(self, dtype=target, **kwargs))
    if dtype is torch.bool:
        return nonzero(self)
    re = aten._to_copy.default(self.re, dtype=target, **kwargs)
    return re if dtype is target is not None else Pair(re, aten._to_copy.default(self.im, dtype=target, **kwargs))


@on_pairs(prims.convert_element_type.default)
def convert_element_type(a: Value, dtype: torch.dtype) -> Value:
    """Cast `a` to `dtype`."""
    return to_copy(a, dtype)
