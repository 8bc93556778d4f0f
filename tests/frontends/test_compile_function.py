"""`ig.compile_function`: structures, dtypes, special values, gradients, guards, constants, saving."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad, hessian, jvp, vjp, vmap

import irongrad as ig
from irongrad.frontends.compile_function import flat_function, trace_function
from irongrad.runtime import load_function
from irongrad.runtime.errors import ArtifactError, CaptureError, GuardError, UserError

X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.0, -1.5]])
ARRAY = X.numpy()


def nested(pair, options):
    """Nested inputs and outputs, constants, and outputs that are inputs, repeated or constant."""
    x, (y, scale) = pair
    total = x * scale + y
    total[0] += 1  # its own intermediate
    return {"total": total, "same": [x, x], "fixed": torch.arange(3), "name": options["name"], "rank0": total.sum()}


def test_structures():
    y = torch.ones(3)
    compiled = ig.compile_function(nested, [(X, [y, 2.0]), {"name": "n", "unused": None}])
    result = compiled((ARRAY, [y.numpy(), 2.0]), {"name": "n", "unused": None})
    expected = nested((X, [y, 2.0]), {"name": "n"})
    assert list(result) == ["total", "same", "fixed", "name", "rank0"]
    assert result["name"] == "n"
    assert result["rank0"].shape == ()
    np.testing.assert_array_equal(result["total"], expected["total"])
    np.testing.assert_array_equal(result["same"][1], ARRAY)
    np.testing.assert_array_equal(result["fixed"], [0, 1, 2])
    assert result["fixed"].dtype == np.int64
    # Inputs may have any strides, and are not written.
    column_order, before = np.asfortranarray(ARRAY), ARRAY.copy()
    again = compiled((column_order, [y.numpy(), 2.0]), {"name": "n", "unused": None})
    np.testing.assert_array_equal(again["total"], expected["total"])
    np.testing.assert_array_equal(ARRAY, before)


def test_other_structures_are_refused():
    compiled = ig.compile_function(lambda x, pair: x + pair[0] * pair[1], [X, (X, 2.0)])
    for arguments, says in [
        ((ARRAY,), "takes 2 arguments, 1 were given"),
        ((ARRAY, ARRAY), "compiled for (array, 2.0)"),
        ((ARRAY, (ARRAY, 3.0)), "compiled for (array, 2.0)"),
        ((ARRAY[:1], (ARRAY, 2.0)), "expected 2 but have 1"),
        ((ARRAY.astype(np.float64), (ARRAY, 2.0)), "x"),
    ]:
        with pytest.raises(GuardError) as caught:
            compiled(*arguments)
        assert says in str(caught.value)


def every_dtype(half, brain, double, wide, narrow, byte, flag, empty, scalar):
    return (
        half * 2, brain + 1, double / 3, wide // 2, narrow * narrow, byte + 1, ~flag, empty * 2, empty.sum(),
        scalar.exp(), torch.where(flag, double, double.new_tensor(float("nan"))), half / 0, wide.float().mean(),
    )  # fmt: skip


def test_dtypes_and_special_values():
    arguments = [
        torch.tensor([1.0, -2.0], dtype=torch.float16), torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        torch.tensor([1.0, 1e300], dtype=torch.float64), torch.tensor([7, -7]), torch.tensor([3, -4], dtype=torch.int8),
        torch.tensor([255, 1], dtype=torch.uint8), torch.tensor([True, False]), torch.zeros(0, 3), torch.tensor(1.0),
    ]  # fmt: skip
    compiled = ig.compile_function(every_dtype, arguments)
    given = [
        a.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if a.dtype == torch.bfloat16 else a.numpy()
        for a in arguments
    ]
    for found, expected in zip(compiled(*given), every_dtype(*arguments), strict=True):
        assert found.shape == tuple(expected.shape)
        assert str(found.dtype) == str(expected.dtype).removeprefix("torch.")
        np.testing.assert_allclose(found.astype(np.float64), expected.double(), rtol=1e-6)


def transforms(x, direction):
    def loss(v):
        return (v.sin() * v).sum()

    _, pull = vjp(torch.sin, x)
    return (
        grad(loss)(x),
        jvp(loss, (x,), (direction,))[1],
        pull(direction)[0],
        vmap(torch.dot)(x, direction),
        hessian(loss)(x[0]),
    )


def test_transforms_inside():
    direction = torch.flip(X, [1])
    found = ig.compile_function(transforms, [X, direction])(ARRAY, direction.numpy())
    for a, b in zip(found, transforms(X, direction), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def asks_for_the_mode(x, y):
    flags = [torch.is_grad_enabled(), x.requires_grad, y.requires_grad, (x @ y.T).requires_grad]
    return torch.stack([x.sum() * (k + 1) for k, flag in enumerate(flags) if flag] or [x.mean()])


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_function_runs_in_the_mode_of_its_caller(mode, follows):
    x = X.clone().requires_grad_(follows)
    with mode():
        y = X.clone()
        compiled = ig.compile_function(asks_for_the_mode, [x, y])
        expected = asks_for_the_mode(x, y).detach()
    np.testing.assert_allclose(compiled(ARRAY, ARRAY), expected, rtol=1e-6)


def gradient_of_its_argument(x):
    return torch.autograd.grad((x * x.exp()).sum(), [x])[0]


def test_autograd_follows_the_arguments_that_require_a_gradient():
    x = X.clone().requires_grad_()
    compiled = ig.compile_function(gradient_of_its_argument, [x])
    np.testing.assert_allclose(compiled(ARRAY), gradient_of_its_argument(x), rtol=1e-6)
    assert x.grad is None
    for mode, example in ((torch.no_grad, x), (torch.enable_grad, X)):
        with mode(), pytest.raises(CaptureError, match=r"torch.autograd.grad.*\n.*does not require grad"):
            ig.compile_function(gradient_of_its_argument, [example])


@torch.inference_mode()
def infers(x):
    y = x * 2
    with torch.inference_mode(False):
        z = X.clone().requires_grad_()
        (of_z,) = torch.autograd.grad((z * z).sum(), [z])
    return y + of_z


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_inference_mode_inside(mode):
    with mode():
        compiled = ig.compile_function(infers, [X])
        expected = infers(X)
    np.testing.assert_allclose(compiled(ARRAY), expected, rtol=1e-6)


def with_extras(x, table, index):
    chosen = table[index]
    return (x @ chosen).square().mean(), {"chosen": chosen}


def test_gradients_extra_outputs_and_index_guards():
    table, index = torch.rand(4, 3), torch.tensor([1, 3, 1])
    compiled = ig.compile_function(with_extras, [X, table, index], gradients=True)
    (value, extra), (of_x, of_table, of_index) = compiled(ARRAY, table.numpy(), index.numpy())
    a, b = X.clone().requires_grad_(), table.clone().requires_grad_()
    loss, _ = with_extras(a, b, index)
    loss.backward()
    np.testing.assert_allclose(value, loss.detach(), rtol=1e-6)
    np.testing.assert_array_equal(extra["chosen"], table[index])
    np.testing.assert_allclose(of_x, a.grad, rtol=1e-5)
    np.testing.assert_allclose(of_table, b.grad, rtol=1e-5, atol=1e-7)
    assert of_index is None
    assert np.array_equal(compiled(ARRAY, table.numpy(), index.numpy() - 4)[1][1], of_table)  # from the end, as eager
    with pytest.raises(GuardError, match=r"index: every value must be in \[-4, 3\]"):
        compiled(ARRAY, table.numpy(), np.array([0, 4, 0]))


def writes(x):
    x[0].zero_()
    return x + 1


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (writes, "writes into its argument 'x'"),
        (lambda x: {1, 2}, "a set is neither a tensor"),
        (lambda x: None, "returns no tensor"),
        (lambda x: torch.from_numpy(x.numpy()), ".numpy()"),
    ],
)
def test_functions_that_cannot_be_compiled_are_refused_at_their_line(function, says):
    with pytest.raises(CaptureError) as caught:
        ig.compile_function(function, [X])
    assert f"{__file__}:" in str(caught.value)
    assert says in str(caught.value)


def test_gradients_need_a_scalar():
    with pytest.raises(CaptureError, match="gradients=True needs a floating-point scalar"):
        ig.compile_function(lambda x: x * 2, [X], gradients=True)
    with pytest.raises(CaptureError, match="a floating-point tensor among the arguments"):
        ig.compile_function(lambda n: n.sum() * 1.0, [torch.arange(3)], gradients=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """A saved module, whose weights are too large for literals."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2)).eval()
    directory = tmp_path_factory.mktemp("functions") / "model"
    ig.compile_function(model, [X]).save(directory)
    return directory, model


def test_a_module_is_a_function_whose_weights_are_constants(saved):
    directory, model = saved
    compiled = load_function(directory)
    np.testing.assert_allclose(compiled(ARRAY), model(X).detach(), rtol=1e-5, atol=1e-6)
    assert [(s.role, s.shape) for s in compiled.manifest.state] == [("constant", (40, 3)), ("constant", (2, 40))]
    with pytest.raises(UserError, match="exists already"):
        compiled.save(directory)


def test_a_saved_function_runs_without_torch(saved):
    directory, model = saved
    code = f"""
import sys, numpy as np
from irongrad.runtime import load_function
print(load_function({str(directory)!r})(np.array({ARRAY.tolist()}, np.float32)).tolist())
assert not [m for m in sys.modules if m.split(".")[0] in ("torch", "torch_mlir") or m.startswith("iree.compiler")]
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    np.testing.assert_allclose(json.loads(result.stdout), model(X).detach(), rtol=1e-5, atol=1e-6)


def test_the_command_line_knows_saved_functions(saved, tmp_path):
    directory, model = saved
    np.save(tmp_path / "x.npy", ARRAY)

    def irongrad(*arguments: object) -> str:
        command = [sys.executable, "-m", "irongrad", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "call(input: float32[2, 3]) -> (result0: float32[2, 2])" in irongrad("inspect", directory)
    assert "passed" in irongrad("verify", directory)
    out = tmp_path / "y.npy"
    irongrad("run", directory, "call", "--input", f"input={tmp_path / 'x.npy'}", "--output", out)
    np.testing.assert_allclose(np.load(out), model(X).detach(), rtol=1e-5, atol=1e-6)


def test_a_training_step_is_no_function(mlp_artifact):
    with pytest.raises(ArtifactError, match=r"use irongrad\.runtime\.load"):
        load_function(mlp_artifact)


def test_distributions_do_not_look_at_the_values_of_their_arguments() -> None:
    def sample(mean: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(mean, mean.abs() + 1).rsample()

    flat = flat_function(sample, (torch.ones(3),), gradients=False)
    checks = torch.distributions.Distribution._validate_args
    trace_function(flat, sample)
    assert torch.distributions.Distribution._validate_args is checks


def test_a_function_that_draws_outside_of_pytorch_is_refused_at_its_line() -> None:
    def noisy(x):
        return x * random.random()

    with pytest.raises(CaptureError, match="random number is drawn from Python's random module") as caught:
        ig.compile_function(noisy, [X])
    assert str(caught.value).startswith(f"{__file__}:{noisy.__code__.co_firstlineno + 1}: ")
