"""Operators that no target compiles are refused by name and line, before torch-mlir and IREE are started."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.runtime.errors import CaptureError, UnsupportedOpError

X = torch.rand(3, 3)


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))


def line_of(function: Callable[..., Any], marker: str = "# here") -> str:
    lines, start = inspect.getsourcelines(function)
    return f"{__file__}:{start + next(i for i, text in enumerate(lines) if marker in text)}:"


def refusal(function: Callable[..., Any], *arguments: Any, gradients: bool = False) -> str:
    """Return the message that refuses `function`; check that no compiler runs and no file is left."""
    with mock.patch("subprocess.run", side_effect=AssertionError("a compiler was started")):  # noqa: SIM117
        with pytest.raises(UnsupportedOpError) as caught:
            ig.compile_function(function, arguments or (X,), gradients=gradients)
    assert list(Path(tempfile.gettempdir()).iterdir()) == []
    return str(caught.value)


def general_eigenvalues(x):
    return torch.linalg.eigvals(x).real  # here


def selects(x):
    return torch.masked_select(x, x > 0)  # here


def masks(x):
    return x[x > 0]  # here


def uniques(x):
    return torch.unique(x)  # here


def compares(x):
    return x if torch.equal(x, x.flip(0)) else -x  # here


def sparse(x):
    return torch.sparse.sum(x.to_sparse())  # here


def packed(x):
    return nn.utils.rnn.pack_padded_sequence(x[..., None], torch.tensor([3, 3, 3]))[0]  # here


def nested(x):
    return torch.nested.nested_tensor([x, x]).sum()  # here


def quantised(x):
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()  # here


def narrow(x):
    return x.to(torch.float8_e4m3fn).float()  # here


CASES = [
    (general_eigenvalues, "aten.linalg_eig", "torch.linalg.eigh"),
    (selects, "masked_select", "torch.where"),
    (masks, "shape depends on values", "torch.where"),
    (uniques, "unique", "torch.sort"),
    (compares, "aten.equal", "(a == b).all()"),
    (sparse, "aten._to_sparse", "dense tensors"),
    (packed, "aten._pack_padded_sequence", "padded sequences"),
    (nested, "nested tensors", "padded tensors"),
    (quantised, "aten.quantize_per_tensor", "float tensors"),
    (narrow, "torch.float8_e4m3fn", "torch.float32"),
]


@pytest.mark.parametrize(("function", "operator", "instead"), CASES, ids=lambda c: getattr(c, "__name__", None))
def test_an_operator_is_refused_by_name_with_an_alternative(function, operator, instead):
    message = refusal(function)
    assert line_of(function) in message
    assert operator in message
    assert instead in message


def test_inputs_that_no_target_takes_are_refused():
    assert "'x'" in refusal(lambda x: x.abs(), X.to_sparse())
    assert "float8" in refusal(lambda x: x.float(), X.to(torch.float8_e4m3fn))


def several(x):
    y = torch.special.bessel_j0(x)  # first
    return torch.special.airy_ai(y) + torch.special.bessel_y1(x)  # second


def test_all_refusals_are_reported_at_once():
    message = refusal(several)
    assert message.startswith("3 operators cannot be compiled:")
    assert f"{line_of(several, '# first')}" in message
    assert message.count(line_of(several, "# second")) == 2


class Foreign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return torch.special.bessel_j1(ctx.saved_tensors[0]) * gradient


def only_backward(x):
    y = Foreign.apply(x)  # here
    return y.sum()


def test_a_backward_operator_is_refused_at_the_forwards_line():
    message = refusal(only_backward, gradients=True)
    assert "bessel_j1" in message
    assert line_of(only_backward) in message


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        hidden = Foreign.apply(self.linear(x))  # here
        return torch.special.airy_ai(x) + hidden  # there


def test_a_step_is_refused_with_all_its_operators(tmp_path):
    model = Model()
    step = ig.TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters()), {"x": X, "y": X})
    with pytest.raises(UnsupportedOpError) as caught:
        ig.compile(step, tmp_path / "out")
    message = str(caught.value)
    assert "bessel_j1" in message
    assert "airy_ai" in message
    assert line_of(Model, "# there") in message
    assert list(tmp_path.iterdir()) == []


def branches(x):
    return x if x.sum() > 0 else -x  # here


def raises(x):
    raise ValueError("no such thing")  # here


@pytest.mark.parametrize(("function", "says"), [(branches, "torch.where"), (raises, "no such thing")])
def test_other_capture_errors_name_the_users_line(function, says):
    with pytest.raises(CaptureError) as caught:
        ig.compile_function(function, (X,))
    assert str(caught.value).startswith(line_of(function))
    assert says in str(caught.value)
