"""Steps over a quantised base: stored packed, trained as eager PyTorch trains on the dequantised weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import irongrad as ig
from irongrad.quantisation.modules import QuantizedEmbedding, QuantizedLinear
from irongrad.runtime import load
from irongrad.runtime.manifest_file import read_manifest

ROWS, SIZE, LAYERS = 16, 256, 4


class Adapted(nn.Module):
    """A table and layers that are frozen, with a low-rank adapter beside each layer."""

    def __init__(self, size: int = SIZE, layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(32, size)
        self.base = nn.ModuleList(nn.Linear(size, size) for _ in range(layers))
        self.requires_grad_(requires_grad=False)
        self.down = nn.ModuleList(nn.Linear(size, 4, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(4, size, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = x + torch.tanh(base(x) + up(down(x)))
        return x


def inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"x": torch.randint(0, 32, (ROWS,)), "y": torch.randn(ROWS, SIZE)}


def step_of(model: nn.Module) -> ig.TrainStep:
    trained = [p for p in model.parameters() if p.requires_grad]
    return ig.TrainStep(model, F.mse_loss, torch.optim.SGD(trained, lr=0.5), inputs())


def dequantised(model: Any, dtype: torch.dtype, layers: int = LAYERS) -> nn.Module:
    """The model with float layers in place of quantised ones, with the same values."""
    plain: Any = Adapted(layers=layers)
    plain.load_state_dict(
        {n: t for n, t in model.state_dict().items() if "packed" not in n and "scale" not in n}, False
    )
    for mine, layer in ((plain.table, model.table), *zip(plain.base, model.base, strict=True)):
        mine.weight.data = layer.dequantised()
    return plain.to(dtype)


def eager(model: nn.Module, steps: int, dtype: torch.dtype) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of the first steps, and the trained parameters after them."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for seed in range(steps):
        batch = inputs(seed)
        loss = F.mse_loss(model(batch["x"]), batch["y"].to(dtype))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


FORMS: dict[str, Callable[[Any], nn.Module]] = {
    "float32": lambda model: model,
    "int8": lambda model: ig.quantize(model, "int8"),
    "int8 in groups": lambda model: ig.quantize(model, "int8", group=32),
    "int4": lambda model: ig.quantize(model, "int4"),
    "bf16": lambda model: ig.quantize(model, "bf16"),
}


SLOW = ("float32", "int8 in groups")
PARAMETERS = [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in FORMS]


@pytest.fixture(name="artifact", scope="module", params=PARAMETERS)
def artifact_fixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("quantised") / "net"
    ig.compile(step_of(FORMS[request.param](Adapted())), folder)
    return request.param, folder


# Bytes of the frozen matrices, as a fraction of float32's, with scales.
STORED = {"float32": 1.0, "int8": 0.255, "int8 in groups": 0.2813, "int4": 0.1407, "bf16": 0.5}


def test_the_state_is_stored_packed(artifact: tuple[str, Path]) -> None:
    form, folder = artifact
    matrices = 4 * SIZE * (32 + LAYERS * SIZE)
    others = 4 * SIZE * LAYERS * (1 + 2 * 4)  # biases and adapters
    padding = 64 * (2 + 5 * LAYERS) * 3
    assert (folder / "state.irpa").stat().st_size <= matrices * STORED[form] + others + padding + 8192


def test_no_layer_is_held_wide(artifact: tuple[str, Path]) -> None:
    """Without quantisation the kernels of products hold one layer in blocks."""
    form, folder = artifact
    manifest = read_manifest(folder)
    (target,) = manifest.targets
    activations = 4 * ROWS * SIZE * LAYERS * 6
    assert target.transients["train_step"] <= (form == "float32") * 4 * SIZE * SIZE + activations


def test_it_trains_as_eager_does_on_the_dequantised_weights(artifact: tuple[str, Path]) -> None:
    form, folder = artifact
    plain = Adapted().double() if form == "float32" else dequantised(FORMS[form](Adapted()), torch.float64)
    losses, parameters = eager(plain, 5, torch.float64)
    with load(folder) as session:
        found = [session.train_step(**{n: t.numpy() for n, t in inputs(seed).items()}) for seed in range(5)]
        state = session.state()
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for name, value in parameters.items():
        error = np.abs(state[name] - value.numpy()).max()
        assert error <= 2e-5 * value.abs().max(), name


def test_checkpoints_leave_the_packed_base_out(artifact: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = artifact
    batch = {n: t.numpy() for n, t in inputs().items()}
    with load(folder) as session:
        session.train_step(**batch)
        session.save(tmp_path / "net.safetensors")
        after = session.eval_step(**batch)
    assert (tmp_path / "net.safetensors").stat().st_size < 4 * SIZE * LAYERS * (2 * 4 + 2) + 8192
    with load(folder, checkpoint=tmp_path / "net.safetensors") as session:
        assert session.eval_step(**batch) == after


def test_the_layers_are_quantised() -> None:
    model: Any = ig.quantize(Adapted(), "int4")
    assert isinstance(model.table, QuantizedEmbedding)
    assert all(isinstance(layer, QuantizedLinear) for layer in model.base)
    assert all(type(layer) is nn.Linear for layer in (*model.down, *model.up))


def test_in_half_precision(tmp_path: Path) -> None:
    """The weights' values are rounded to bfloat16 for the products, as autocast does."""
    model = ig.quantize(Adapted(), "int8")
    trained = [p for p in model.parameters() if p.requires_grad]
    step = ig.TrainStep(model, F.mse_loss, torch.optim.SGD(trained, lr=0.5), inputs(), precision="bf16")
    ig.compile(step, tmp_path / "net")  # and verifies it


def test_with_a_batch_of_any_size(tmp_path: Path) -> None:
    """The backward of functions of any size dequantises again, too."""
    model = ig.quantize(Adapted(64, 2), "int4")
    example = {"x": torch.randint(0, 32, (ROWS,)), "y": torch.randn(ROWS, 64)}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    step = ig.TrainStep(model, F.mse_loss, optimizer, example, dynamic={"x": {0: "B"}, "y": {0: "B"}})
    expected = F.mse_loss(model(example["x"][:5]), example["y"][:5]).item()
    ig.compile(step, tmp_path / "net", entry_points=["train_step"])  # and verifies it
    with load(tmp_path / "net") as session:
        loss = session.train_step(**{name: tensor[:5].numpy() for name, tensor in example.items()})
    assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_large_layers_compile_with_a_batch_of_any_size(form: str, tmp_path: Path) -> None:
    """`compile` compares it with eager; IREE's own products would take minutes to compile here."""
    step = step_of(FORMS[form](Adapted(layers=1)))
    dynamic = {"x": {0: "B"}, "y": {0: "B"}}
    any_size = ig.TrainStep(step.model, step.loss, step.optimizers, inputs(), dynamic=dynamic)
    session = ig.compile(any_size, tmp_path / "net", entry_points=["train_step"]).load()
    batch = {n: t.numpy() for n, t in inputs().items()}
    expected, _ = eager(dequantised(FORMS[form](Adapted(layers=1)), torch.float64, layers=1), 1, torch.float64)
    assert session.train_step(**batch) == pytest.approx(expected[0], rel=1e-5)
