"""Which operators only move values: one table, by how they move them."""

from __future__ import annotations

from enum import Flag, auto
from functools import cache

import torch
from torch._ops import OpOverload


class Movement(Flag):
    """How an operator moves the elements of its operands; none of them computes on an element."""

    COPY = auto()
    WRITE = auto()
    RESHAPE = auto()
    CUT = auto()
    SPLIT = auto()
    TRANSPOSE = auto()
    JOIN = auto()
    REPEAT = auto()
    PAD = auto()
    CAST = auto()
    GATHER = auto()
    PLACE = auto()
    MASK = auto()
    FILL = auto()


_TABLE = {
    Movement.COPY: "alias clone contiguous detach lift_fresh_copy",
    # Whose result has the shape of the first operand, and the elements of the second.
    Movement.WRITE: "copy copy_",
    Movement.RESHAPE: "_reshape_alias _unsafe_view expand expand_as flatten reshape squeeze unflatten unsqueeze view "
    "view_as",
    Movement.CUT: "select slice",
    Movement.SPLIT: "chunk split split_with_sizes unbind",
    Movement.TRANSPOSE: "movedim permute swapaxes t transpose",
    Movement.JOIN: "cat stack",
    Movement.REPEAT: "flip repeat roll",
    Movement.PAD: "constant_pad_nd pad",
    Movement.CAST: "_to_copy convert_element_type to",
    Movement.GATHER: "_unsafe_index embedding gather index index_select",
    # Among zeros, or among the elements of another tensor.
    Movement.PLACE: "diag_embed diagonal_scatter select_backward select_scatter slice_backward slice_scatter",
    Movement.MASK: "masked_fill tril triu where",
    # The elements are given as numbers, or are undefined.
    Movement.FILL: "empty_like fill full_like new_empty new_empty_strided new_full new_ones new_zeros ones_like "
    "zeros_like",
}

# Whose result has the elements of the first operand, some of them or several times, and no others.
OF_ONE_TENSOR = Movement.COPY | Movement.RESHAPE | Movement.CUT | Movement.SPLIT | Movement.TRANSPOSE | Movement.REPEAT
ANY = ~Movement(0)


@cache
def operators(kinds: Movement) -> frozenset[OpOverload]:
    """All overloads, in ATen and prims, of the operators that move values in one of some ways."""
    return frozenset(
        getattr(packet, overload)
        for name in names(kinds)
        for namespace in (torch.ops.aten, torch.ops.prims)
        if (packet := getattr(namespace, name, None)) is not None
        for overload in packet.overloads()
    )


@cache
def names(kinds: Movement) -> frozenset[str]:
    """Names of these operators without namespace and overload, such as `slice`."""
    return frozenset(name for kind in kinds for name in _TABLE[kind].split())
