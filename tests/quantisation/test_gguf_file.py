"""`irongrad.load_gguf`: a model has the numbers of the file, exactly as the package gguf reads them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.runtime.errors import UserError

Q8, Q4, Q5 = (gguf.GGMLQuantizationType[n] for n in ("Q8_0", "Q4_0", "Q5_0"))
F16, BF16 = (gguf.GGMLQuantizationType[n] for n in ("F16", "BF16"))


class Net(nn.Module):
    """A table with a head that is tied to it, a linear layer and a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(8, 64)
        self.body = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(self.table(x))))


def written(path: Path, **tensors: tuple[tuple[int, ...], gguf.GGMLQuantizationType | None]) -> dict[str, np.ndarray]:
    """Write a file of random tensors, and return their values; names have `_` for each dot."""
    random, values = np.random.default_rng(0), {}
    writer = gguf.GGUFWriter(path, "test")
    for spelled, (shape, kind) in tensors.items():
        name, array = spelled.replace("_", "."), random.standard_normal(shape, np.float32)
        if kind is None:
            writer.add_tensor(name, array)
            values[name] = array
        else:
            blocks = gguf.quantize(array, kind)
            writer.add_tensor(name, blocks, raw_dtype=kind)
            values[name] = gguf.dequantize(blocks, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.mark.parametrize("kind", [Q8, Q4], ids=["Q8_0", "Q4_0"])
def test_quantised_tensors_keep_their_numbers(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    values = written(tmp_path / "net.gguf", table_weight=((8, 64), kind), body_weight=((64, 64), kind))
    model = ig.load_gguf(Net(), tmp_path / "net.gguf")
    np.testing.assert_array_equal(model.table.dequantised(), values["table.weight"])
    np.testing.assert_array_equal(model.body.dequantised(), values["body.weight"])
    assert model.body.scale.dtype is torch.float16
    assert model.body.form == ("int8, group=32" if kind is Q8 else "int4, group=32")
    assert model.head.packed is model.table.packed
    model(torch.arange(8)).sum().backward()


def test_plain_tensors_are_copied(tmp_path: Path) -> None:
    tensors = {"norm_weight": ((64,), None), "norm_bias": ((64,), F16), "body_bias": ((64,), BF16)}
    values = written(tmp_path / "net.gguf", **tensors)
    model = ig.load_gguf(Net(), tmp_path / "net.gguf")
    for name, value in values.items():
        np.testing.assert_array_equal(model.get_parameter(name).detach(), value)
    assert type(model.body) is nn.Linear


@pytest.mark.parametrize("spelled", ["mapping", "function"])
def test_names_of_the_file_and_of_the_model(tmp_path: Path, spelled: str) -> None:
    values = written(tmp_path / "net.gguf", blk_0_weight=((64, 64), Q8), other=((3,), None))
    names = {"blk.0.weight": "body.weight"}
    model = ig.load_gguf(Net(), tmp_path / "net.gguf", names if spelled == "mapping" else names.get)
    np.testing.assert_array_equal(model.body.dequantised(), values["blk.0.weight"])


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"body_weight": ((64, 64), Q5)}, "'body.weight' is stored as Q5_0, which cannot be read; Q8_0, Q4_0, F32"),
        ({"body_weight": ((32, 64), Q8)}, r"has the shape \(32, 64\), and 'body.weight' in the model has \(64, 64\)"),
        ({"other_weight": ((64, 64), Q8)}, "has no such parameter; names= maps the names"),
        ({"norm_weight": ((64,), Q8)}, "'norm.weight' is not the weight of a linear layer or an embedding"),
    ],
)
def test_refusals_leave_the_model_alone(tmp_path: Path, tensors: dict, message: str) -> None:
    written(tmp_path / "net.gguf", body_bias=((64,), None), **tensors)
    model, before = Net(), Net()
    with pytest.raises(UserError, match=message):
        ig.load_gguf(model, tmp_path / "net.gguf")
    assert torch.equal(model.body.bias, before.body.bias)
    assert type(model.body) is nn.Linear


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "net.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(UserError, match="net.gguf cannot be read as a GGUF file"):
        ig.load_gguf(Net(), tmp_path / "net.gguf")
    with pytest.raises(UserError, match="missing.gguf cannot be read as a GGUF file"):
        ig.load_gguf(Net(), tmp_path / "missing.gguf")
    written(tmp_path / "other.gguf", other=((3,), None))
    with pytest.raises(UserError, match="no tensor to which names= gives a name"):
        ig.load_gguf(Net(), tmp_path / "other.gguf", {})


def test_a_transposed_layer_is_refused(tmp_path: Path) -> None:
    from transformers.pytorch_utils import Conv1D

    written(tmp_path / "net.gguf", **{"0_weight": ((64, 64), None)})
    with pytest.raises(UserError, match="the weight of a Conv1D in the model, which has rows and columns exchanged"):
        ig.load_gguf(nn.Sequential(Conv1D(64, 64)), tmp_path / "net.gguf")
