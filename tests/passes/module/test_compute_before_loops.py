"""IREE must not compute a value after a loop that begins with what the value depends on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils.parametrizations import orthogonal

import irongrad as ig
from irongrad.mlir.tools import run_tool

_SIZE = "%c0 to %s for %s"
_ONE = f"(%{{}}[{_SIZE}]) : (!stream.resource<transient>{{{{%s}}}}) -> !stream.resource<transient>{{{{%s}}}}"
_LOOP = f"""
  %r = scf.for %t = %c0 to %s step %c1 iter_args(%i = %a) -> (!stream.resource<transient>) {{
    %n = stream.async.dispatch @e::@l{_ONE.format("i")}
    scf.yield %n : !stream.resource<transient>
  }}
"""
_OTHER = f"""
  %b = stream.async.dispatch @e::@m{_ONE.format("a")}
"""
PROGRAM = f"""
util.func public @f(%x: !stream.resource<external>, %s: index) -> !stream.resource<external> {{
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %a = stream.async.dispatch @e::@k(%x[{_SIZE}])
    : (!stream.resource<external>{{%s}}) -> !stream.resource<transient>{{%s}}
  BETWEEN
  %y = stream.async.dispatch @e::@n(%b[{_SIZE}], %r[{_SIZE}])
    : (!stream.resource<transient>{{%s}}, !stream.resource<transient>{{%s}}) -> !stream.resource<external>{{%s}}
  util.return %y : !stream.resource<external>
}}
"""


@pytest.mark.parametrize("between", [_OTHER + _LOOP, _LOOP + _OTHER])
def test_iree_still_schedules_after_a_loop_what_the_loop_begins_with(between: str, tmp_path: Path) -> None:
    """When this fails, IREE is fixed, and `compute-before-loops` can go."""
    source = tmp_path / "source.mlir"
    source.write_text(PROGRAM.replace("BETWEEN", between))
    passes = "--pass-pipeline=builtin.module(util.func(iree-stream-schedule-execution))"
    result = run_tool("iree-opt", [passes, str(source)])
    assert "circular dependency" in result.stderr


def test_a_system_whose_sides_come_from_one_kernel_is_solved() -> None:
    """`compile_function` compares with eager float64."""
    one = torch.eye(5)

    def solved(x: torch.Tensor) -> torch.Tensor:
        a = x - x.mT
        return torch.linalg.solve(one + a, one - a).square().sum()

    ig.compile_function(solved, (torch.randn(5, 5),), gradients=True, cache=False)


def test_a_matrix_is_inverted_beside_its_determinant() -> None:
    """Both factor the matrix in a loop. `compile_function` compares with eager float64."""

    def solved(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x @ w
        a = h.mT @ h / 5 + torch.eye(3)
        return h @ torch.linalg.inv(a), torch.logdet(a)

    ig.compile_function(solved, (torch.randn(5, 4), torch.randn(4, 3)), cache=False)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("cayley", (4, 4)),
        ("householder", (6, 3)),
        ("matrix_exp", (4, 4)),
        pytest.param("cayley", (6, 3), marks=pytest.mark.slow),
        pytest.param("householder", (4, 4), marks=pytest.mark.slow),
        pytest.param("matrix_exp", (6, 3), marks=pytest.mark.slow),
    ],
)
def test_an_orthogonal_layer_trains_as_eager_does(kind: str, shape: tuple[int, int], tmp_path: Path) -> None:
    def make() -> ig.TrainStep:
        torch.manual_seed(0)
        model = nn.Sequential(orthogonal(nn.Linear(*shape), orthogonal_map=kind), nn.Linear(shape[1], 2))
        inputs = {"x": torch.randn(8, shape[0]), "y": torch.randn(8, 2)}
        return ig.TrainStep(model, mse_loss, torch.optim.AdamW(model.parameters(), lr=0.01), inputs)

    artifact = ig.compile(make(), tmp_path / "artifact", entry_points=("train_step",), cache=False)
    session, step = artifact.load(), make()
    for _ in range(3):
        step.optimizer.zero_grad()
        loss = mse_loss(step.model(step.inputs["x"]), step.inputs["y"])
        loss.backward()
        step.optimizer.step()
        assert session.train_step(**step.inputs) == pytest.approx(loss.item(), rel=1e-4)
