"""The table of operators that move values says what they do."""

from __future__ import annotations

import torch

from irongrad.graph.movements import OF_ONE_TENSOR, Movement, names, operators

# Of the second operand they take the shape alone.
_OF_THE_SHAPE = {"expand_as", "view_as"}


def test_an_operator_that_moves_one_tensor_takes_no_other() -> None:
    for operator in operators(OF_ONE_TENSOR):
        taken = [a for a in operator._schema.arguments if not a.is_out and isinstance(a.type, torch._C.TensorType)]
        assert len(taken) <= 1 or operator._overloadpacket.__name__ in _OF_THE_SHAPE, operator


def test_an_operator_is_listed_once() -> None:
    listed = [name for kind in Movement for name in names(kind)]
    assert len(listed) == len(set(listed))


def test_an_overwrite_has_the_elements_of_its_second_operand() -> None:
    assert torch.ops.aten.copy.default(torch.zeros(2), torch.ones(2)).tolist() == [1, 1]
