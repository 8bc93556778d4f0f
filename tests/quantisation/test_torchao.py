"""Weights that torchao has quantised, from stand-ins with the classes' names and attributes of torchao 0.18.

torchao itself is not a requirement of the tests. Its classes are told by their module and name.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.quantisation.weights import dequantised
from irongrad.runtime.errors import UserError


class _Wrapper(torch.Tensor):
    """A wrapper subclass, as torchao's are: it has a shape and a dtype, and no values of its own."""

    @staticmethod
    def __new__(cls, *, shape: tuple[int, ...], **attributes: Any) -> _Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    def __init__(self, *, shape: tuple[int, ...], **attributes: Any) -> None:
        vars(self).update(attributes)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


def torchao(name: str) -> type[_Wrapper]:
    return type(name, (_Wrapper,), {"__module__": "torchao.quantization"})


def model_with(name: str, **attributes: Any) -> nn.Linear:
    layer = nn.Linear(attributes["shape"][1], attributes["shape"][0])
    layer.weight = nn.Parameter(torchao(name)(**attributes), requires_grad=False)
    return layer


def int8(**changes: Any) -> nn.Linear:
    torch.manual_seed(0)
    attributes: dict[str, Any] = {
        "shape": (6, 8),
        "qdata": torch.randint(-128, 128, (6, 8), dtype=torch.int8),
        "scale": torch.rand(6, 1),
        "zero_point": torch.zeros(6, 1, dtype=torch.int8),
        "block_size": [1, 8],
        "act_quant_kwargs": None,
        "act_pre_scale": None,
    }
    return model_with("Int8Tensor", **attributes | changes)


def int4() -> nn.Linear:
    """Numbers -8 to 7 in two's complement, the even column's in the low bits."""
    torch.manual_seed(0)
    low, high = torch.arange(-8, 8, dtype=torch.int8).view(2, 8), torch.arange(7, -9, -1, dtype=torch.int8).view(2, 8)
    packed = (low & 15) | (high << 4)
    scale, zero = torch.rand(4, 2), torch.rand(4, 2)
    return model_with("Int4Tensor", shape=(2, 16), qdata=packed, scale=scale, zero_point=zero, block_size=[1, 4])


def values(layer: Any) -> torch.Tensor:
    return dequantised(layer.packed, layer.scale, layer.offset)


def test_int8_for_each_row() -> None:
    layer = int8()
    weight = layer.weight
    assert torch.equal(values(ig.quantize(layer)), weight.qdata.float() * weight.scale)
    assert ig.quantize(int8()).offset is None


def test_int8_with_a_zero_point() -> None:
    zero = torch.arange(6, dtype=torch.int8).unsqueeze(1)
    layer = int8(zero_point=zero)
    weight = layer.weight
    expected = (weight.qdata.float() - zero) * weight.scale
    torch.testing.assert_close(values(ig.quantize(layer)), expected)


def test_int8_in_groups_and_for_a_whole_tensor() -> None:
    groups = int8(scale=torch.rand(6, 2), zero_point=torch.zeros(6, 2), block_size=[1, 4])
    expected = groups.weight.qdata.float() * groups.weight.scale.repeat_interleave(4, 1)
    assert torch.equal(values(ig.quantize(groups)), expected)
    whole = int8(scale=torch.rand(1, 1), zero_point=None, block_size=[6, 8])
    expected = whole.weight.qdata.float() * whole.weight.scale
    assert torch.equal(values(ig.quantize(whole)), expected)


def test_int4() -> None:
    layer = int4()
    weight = layer.weight
    numbers = torch.stack([(weight.qdata << 4) >> 4, weight.qdata >> 4], -1).flatten(1).float()
    scale, zero = (t.mT.repeat_interleave(4, 1) for t in (weight.scale, weight.zero_point))
    torch.testing.assert_close(values(ig.quantize(layer)), numbers * scale + zero)


def test_other_layers_stay_without_a_form_and_are_quantised_with_one() -> None:
    model = ig.quantize(nn.Sequential(int8(), nn.Linear(6, 6)))
    assert type(model[1]) is nn.Linear
    model = ig.quantize(nn.Sequential(int8(), nn.Linear(6, 6)), "int8")
    assert model[1].form == "int8, group=6"


def test_refusals() -> None:
    unknown = model_with("Int4TilePackedTo4dTensor", shape=(2, 16))
    with pytest.raises(UserError, match="Int4TilePackedTo4dTensor has a layout that cannot be read; Int8Tensor and"):
        ig.quantize(unknown)
    with pytest.raises(UserError, match=r"Int8Tensor quantises or scales activations too \(act_pre_scale\)"):
        ig.quantize(int8(act_pre_scale=torch.ones(1)))
    with pytest.raises(UserError, match="blocks of 2 x 8 numbers"):
        ig.quantize(int8(block_size=[2, 8]))
    with pytest.raises(UserError, match="no weight that torchao has quantised"):
        ig.quantize(nn.Linear(4, 4))


def test_a_step_with_such_a_tensor_is_refused_with_the_way_out() -> None:
    model = nn.Sequential(int8(), nn.Linear(6, 1))
    with pytest.raises(UserError, match=r"'0.weight' of the model is a Int8Tensor of torchao.*quantize\(model\)"):
        ig.TrainStep(
            model,
            nn.functional.mse_loss,
            torch.optim.SGD(model[1].parameters(), lr=0.1),
            {"x": torch.randn(2, 8), "y": torch.randn(2, 1)},
        )
