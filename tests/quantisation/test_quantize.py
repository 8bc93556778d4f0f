"""`irongrad.quantize`: which layers it replaces, and that the replaced model is the one of the rounded weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.quantisation.modules import QuantizedEmbedding, QuantizedLinear
from irongrad.runtime.errors import UserError


class Net(nn.Module):
    """A table, a linear layer, and a head that is tied to the table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(12, 64, padding_idx=0)
        self.body = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
        self.head = nn.Linear(64, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.table(x)))


@pytest.mark.parametrize("form", ["int8", "int4", "bf16"])
def test_the_model_computes_with_the_rounded_weights(form: str) -> None:
    model, plain, x = ig.quantize(Net(), form), Net(), torch.arange(12)
    plain.table.weight.data = model.table.dequantised()
    plain.body[0].weight.data = model.body[0].dequantised()
    torch.testing.assert_close(model(x), plain(x))
    assert isinstance(model.table, QuantizedEmbedding)
    assert isinstance(model.head, QuantizedLinear)
    assert f"form={form}" in repr(model.body[0])


def test_tied_weights_stay_tied_and_are_stored_once() -> None:
    model = ig.quantize(Net(), "int8")
    assert model.head.packed is model.table.packed
    assert model.head.scale is model.table.scale
    assert [name for name, _ in model.named_parameters() if "packed" in name] == ["table.packed", "body.0.packed"]


def test_only_biases_are_trained() -> None:
    model = ig.quantize(Net(), "int4", group=32)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["body.0.bias"]
    assert model.body[0].scale.shape == (64, 2)


def test_a_state_dict_goes_to_another_quantised_model() -> None:
    model, other = ig.quantize(Net(), "int4"), ig.quantize(Net(), "int4")
    nn.init.zeros_(other.body[0].packed)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(torch.arange(12)), model(torch.arange(12)))


def test_trained_weights_stay_if_others_are_frozen() -> None:
    model = Net()
    model.table.requires_grad_(requires_grad=False)
    ig.quantize(model, "int8")
    assert type(model.body[0]) is nn.Linear
    assert isinstance(model.head, QuantizedLinear)


def test_skipped_modules_stay() -> None:
    model = ig.quantize(Net(), "int8", skip=["body"])
    assert type(model.body[0]) is nn.Linear
    assert isinstance(model.table, QuantizedEmbedding)


def test_a_module_with_two_names_stays_one_module() -> None:
    layer = nn.Linear(8, 8)
    model = ig.quantize(nn.ModuleDict({"a": layer, "b": layer}), "int8")
    assert model["a"] is model["b"]
    assert isinstance(model["a"], QuantizedLinear)


def test_a_model_may_be_a_layer() -> None:
    assert isinstance(ig.quantize(nn.Linear(8, 8), "int8"), QuantizedLinear)


def test_the_layers_of_gpt2() -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model, x = nn.Sequential(Conv1D(16, 8)), torch.randn(3, 8)
    before, rows = model(x), model[0].weight.mT
    ig.quantize(model, "int8")
    assert (model[0].in_features, model[0].out_features) == (8, 16)
    assert (model[0].dequantised() - rows).abs().max() <= rows.abs().max() / 127
    torch.testing.assert_close(model(x), before, rtol=0.1, atol=0.01)


def test_values_that_code_casts_to_the_packed_dtype_are_refused() -> None:
    """As T5 does: `hidden.to(self.wo.weight.dtype)`."""
    layer = ig.quantize(nn.Linear(64, 8), "int4")
    with pytest.raises(TypeError, match="takes floating-point values, and got torch.uint8"):
        layer(torch.randn(2, 64).to(layer.weight.dtype))


@pytest.fixture(params=["PEFT first", "quantised first"], name="adapted")
def adapted_fixture(request: pytest.FixtureRequest) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["0"])
    if request.param == "PEFT first":
        return ig.quantize(get_peft_model(Net(), config), "int8")
    return get_peft_model(ig.quantize(Net(), "int8"), config)


def test_peft_adapts_quantised_layers(adapted: Any) -> None:
    trained = {name.rsplit(".", 3)[1] for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained == {"lora_A", "lora_B"}
    base = adapted.base_model.model.body[0].base_layer
    assert isinstance(base, QuantizedLinear)
    adapted(torch.arange(12)).sum().backward()
    assert adapted.base_model.model.body[0].lora_B["default"].weight.grad.abs().sum() > 0


def test_an_adapter_that_is_not_trained_stays_as_it_is() -> None:
    """As `PeftModel.from_pretrained` loads it."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(Net(), LoraConfig(r=2, target_modules=["0"], modules_to_save=["table"]))
    model.requires_grad_(requires_grad=False)
    base = ig.quantize(model, "int4").base_model.model
    assert isinstance(base.body[0].base_layer, QuantizedLinear)
    assert type(base.body[0].lora_A["default"]) is nn.Linear
    assert type(base.table.modules_to_save["default"]) is nn.Embedding


def test_an_adapter_cannot_be_merged_into_a_quantised_layer_in_silence(adapted: Any) -> None:
    with pytest.raises(RuntimeError, match="can't be cast to the desired output type Char"):
        adapted.merge_and_unload()


def test_refusals() -> None:
    with pytest.raises(UserError, match="no form 'int3' of quantised weights; the forms are int8, int4, bf16"):
        ig.quantize(Net(), "int3")
    with pytest.raises(UserError, match="group=64: a group is .* with the form int8 or int4"):
        ig.quantize(Net(), "bf16", group=64)
    with pytest.raises(UserError, match="group=0: a group is a positive number"):
        ig.quantize(Net(), "int4", group=0)
    with pytest.raises(UserError, match="skip names 'lm_head', and the model has no such module"):
        ig.quantize(Net(), "int8", skip=["lm_head"])
    with pytest.raises(UserError, match="give a list of names"):
        ig.quantize(Net(), "int8", skip="head")
    with pytest.raises(UserError, match="Tanh has no linear layer .* so there is nothing to quantise"):
        ig.quantize(nn.Tanh(), "int8")
    with pytest.raises(UserError, match="with max_norm, the embedding changes its table.*skip="):
        ig.quantize(nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)), "int8")


def test_a_layer_that_does_not_fit_is_named_and_nothing_is_changed() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(40, 8))
    with pytest.raises(UserError, match="the weight of '1' .* 40 columns cannot be divided into groups of 64.*skip="):
        ig.quantize(model, "int4")
    assert type(model[0]) is nn.Linear
