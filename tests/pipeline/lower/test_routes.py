"""The route over StableHLO: verified results, and refusals of the operators that it cannot lower."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch_mlir.dialects.torch import register_dialect
from torch_mlir.ir import Context, Module

import irongrad as ig
from irongrad.frontends.compile_function import flat_function, trace_function
from irongrad.pipeline.driver import build
from irongrad.pipeline.dump import readable
from irongrad.pipeline.lower.importer import import_functions
from irongrad.pipeline.lower.routes import _TO_STABLEHLO, _torch_mlir_opt
from irongrad.pipeline.options import make_options
from irongrad.runtime.errors import ToolchainError, UnsupportedOpError, UserError

EXAMPLES = Path(__file__).parents[3] / "examples"


class Net(nn.Module):
    """Operators whose lowerings differ most: gather and scatter, convolution, pooling, normalisation, random bits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 8)
        self.convolution = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(4 * 4 * 2, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = self.tokens(x).unsqueeze(1)  # [B, 1, T, 8]
        hidden = nn.functional.gelu(self.norm(self.convolution(images)))
        return self.last(self.drop(nn.functional.max_pool2d(hidden, 2).flatten(1)))


def make_step() -> ig.TrainStep:
    torch.manual_seed(0)
    model = Net()
    return ig.TrainStep(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        inputs={"x": torch.randint(0, 7, (3, 4)), "y": torch.randint(0, 5, (3,))},
        clip_grad_norm=1.0,
    )


def test_a_step_over_stablehlo_trains(tmp_path):
    """Compilation compares three steps with eager float64, as on the other route."""
    step = make_step()
    artifact = ig.compile(step, tmp_path / "out", route="stablehlo", entry_points=("train_step",))
    assert artifact.manifest.route == "stablehlo"
    assert artifact.reports["llvm-cpu"].passed
    session = artifact.load()
    losses = [session.train_step(**{n: t.numpy() for n, t in step.inputs.items()}) for _ in range(5)]
    assert losses[-1] < losses[0]


def test_the_module_in_stablehlo_is_dumped_and_names_the_users_lines(tmp_path):
    options = make_options(tmp_path / "out", route="stablehlo", dump_dir=tmp_path / "dump", stop_after="assemble")
    build(make_step(), options)
    text = (tmp_path / "dump" / "06_import.stablehlo.mlir").read_text()
    assert "stablehlo.dot_general" in text
    assert "stablehlo.convolution" not in text
    assert "test_routes.py" in text
    linalg = (tmp_path / "dump" / "06_import.linalg.mlir").read_text()
    assert "stablehlo." not in linalg
    assert "test_routes.py" in linalg
    assert "@main" not in (tmp_path / "dump" / "07_assemble.mlir").read_text()


def test_an_unknown_route_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no route 'tosa'; the routes are linalg, stablehlo"):
        make_options(tmp_path / "out", route="tosa")


def test_an_operator_without_stablehlo_is_refused_with_the_other_route(tmp_path):
    def branches(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.exp(), (x,))

    graph = trace_function(flat_function(branches, (torch.rand(4),), gradients=False), branches)
    with pytest.raises(
        UnsupportedOpError, match=r"(?s)test_routes.py:\d+: return torch.cond.*prim\.If cannot.*with --route linalg"
    ):
        import_functions(graph, tmp_path, "stablehlo")


def test_the_route_turns_a_shift_by_a_number_into_one_by_a_tensor(tmp_path):
    """When the first `raises` fails, torch-mlir lowers the shift: `irongrad.pipeline.lower.stablehlo` can go."""

    def shifted(x: torch.Tensor) -> torch.Tensor:
        return x >> 3

    graph = trace_function(flat_function(shifted, (torch.tensor([-9, 64]),), gradients=False), shifted)
    torch_text = dict(readable(import_functions(graph, tmp_path)))[".torch.mlir"]
    assert "__rshift__.Scalar" in torch_text
    module = torch_text.replace("module {\n", "module {\n  func.func @main() {\n    return\n  }\n", 1)
    with pytest.raises(ToolchainError, match="failed to legalize"):
        to_stablehlo(module, tmp_path)
    assert b"stablehlo.shift_right_arithmetic" in import_functions(graph, tmp_path, "stablehlo").modules.stablehlo
    # The route rewrites a copy of the graph.
    assert "__rshift__.Scalar" in dict(readable(import_functions(graph, tmp_path)))[".torch.mlir"]


def to_stablehlo(module: str, scratch: Path) -> None:
    with Context() as context:
        register_dialect(context)
        _torch_mlir_opt(Module.parse(module), [f"--pass-pipeline={_TO_STABLEHLO}"], scratch / "out.mlir")


TWO_FUNCTIONS = """
func.func @f(%x: !torch.vtensor<[4],f32>) -> !torch.vtensor<[4],f32> {
  return %x : !torch.vtensor<[4],f32>
}
func.func @g(%x: !torch.vtensor<[4],f32>) -> !torch.vtensor<[4],f32> {
  return %x : !torch.vtensor<[4],f32>
}
"""


def test_torch_mlir_still_wants_a_main(tmp_path):
    """When this fails, torch-mlir takes several functions: `_add_main` and `_without_main` can go."""
    with pytest.raises(ToolchainError, match="no more than one function or a `main` function"):
        to_stablehlo(TWO_FUNCTIONS, tmp_path)


SMALL: dict[str, dict[str, Any]] = {
    "mlp": {"batch": 8, "hidden": 16},
    "digits": {},
    "resnet18": {"batch": 4, "width": 4},
    "rnn": {"batch": 4, "length": 4, "width": 8},
    "gpt": {"batch": 2, "length": 8, "width": 16, "heads": 2, "layers": 1},
    "moe": {"batch": 8, "width": 16},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_every_example_compiles_over_stablehlo(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    step = importlib.import_module(name).make_step(**SMALL[name])
    assert ig.compile(step, tmp_path / name, route="stablehlo").reports["llvm-cpu"].passed
