"""`irongrad compare`: counts that can be made by hand, and compilers that cannot compile."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import irongrad as ig
from irongrad.cli import compare as verb
from irongrad.cli.common import console
from irongrad.peers.comparison import Comparison, compare, differences
from irongrad.peers.kernels import LOSS, OPTIMIZER, Kernel
from irongrad.peers.process import PEERS
from irongrad.peers.torch_steps import check_comparable
from irongrad.runtime.errors import UserError

BATCH, INTO, HIDDEN, OUT = 4, 8, 16, 3
NAME = "[red]odd[/]"

needs_inductor = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler: g++")
needs_xla = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")


def make_step() -> ig.TrainStep:
    torch.manual_seed(0)
    layers = {NAME: nn.Linear(INTO, HIDDEN), "tanh": nn.Tanh(), "head": nn.Linear(HIDDEN, OUT)}
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    inputs = {"x": torch.randn(BATCH, INTO), "y": torch.randn(BATCH, OUT)}
    return ig.TrainStep(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), inputs)


class Breaks(nn.Module):
    """torch.compile runs a part of it eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(INTO, OUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.layer(x)


def breaks() -> ig.TrainStep:
    model, step = Breaks(), make_step()
    return replace(step, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def fails() -> ig.TrainStep:
    raise ValueError("first line\nsecond line")


@pytest.fixture(scope="module")
def found() -> Comparison:
    return compare(make_step, PEERS, one_thread=True, rounds=2)


def kernels(found: Comparison, peer: str) -> list[Kernel]:
    column = found.column(peer)
    assert column is not None, found.missing
    return list(column.compiled.kernels)


def product_traffic(kernels: list[Kernel]) -> list[tuple[int, int]]:
    return sorted((k.read, k.written) for k in kernels if k.library)


@needs_inductor
@needs_xla
def test_every_compiler_takes_the_same_steps(found: Comparison) -> None:
    assert [c.compiled.peer for c in found.columns] == list(PEERS)
    model = make_step()
    expected = float(model.loss(model.model(model.inputs["x"]), model.inputs["y"]).detach())
    for column in found.columns:
        assert column.compiled.loss == pytest.approx(expected, rel=1e-5)
        assert 0 < column.least_seconds <= column.median_seconds
        assert column.cpu_seconds > 0


def test_own_kernels_move_what_the_step_needs(found: Comparison) -> None:
    """Each update reads a parameter and its gradient, and writes the parameter."""
    parameters = 4 * (INTO * HIDDEN + HIDDEN + HIDDEN * OUT + OUT)
    update = [k for k in kernels(found, "irongrad") if k.layer == OPTIMIZER]
    assert parameters <= sum(k.written for k in update if not k.intermediates) <= parameters + 64
    assert all(k.intermediate_bytes <= k.written for k in kernels(found, "irongrad"))


@needs_inductor
def test_inductors_products_are_counted_as_by_hand(found: Comparison) -> None:
    """addmm twice in the forward; in the backward two products of the head, and one of the first layer."""
    first = 4 * (BATCH * INTO + INTO * HIDDEN + HIDDEN), 4 * BATCH * HIDDEN
    head = 4 * (BATCH * HIDDEN + HIDDEN * OUT + OUT), 4 * BATCH * OUT
    of_hidden = 4 * (BATCH * OUT + OUT * HIDDEN), 4 * BATCH * HIDDEN
    of_head = 4 * (BATCH * OUT + BATCH * HIDDEN), 4 * OUT * HIDDEN
    of_first = 4 * (BATCH * HIDDEN + BATCH * INTO), 4 * HIDDEN * INTO
    assert product_traffic(kernels(found, "inductor")) == sorted([first, head, of_hidden, of_head, of_first])
    update = [k for k in kernels(found, "inductor") if k.phase == "update"]
    parameters = 4 * (INTO * HIDDEN + HIDDEN + HIDDEN * OUT + OUT)
    assert sum(k.written for k in update) == parameters
    assert sum(k.read for k in update) == 2 * parameters
    assert not any(k.intermediates for k in update)


@needs_inductor
def test_inductors_flops_are_those_that_pytorch_counts(found: Comparison) -> None:
    step = make_step()
    with FlopCounterMode(display=False) as counter:
        step.loss(step.model(step.inputs["x"]), step.inputs["y"]).backward()
    column = found.column("inductor")
    assert column is not None
    assert column.compiled.flops == counter.get_total_flops()


class Remembers(nn.Module):
    """Changes itself in the first step, so Dynamo traces it again, as it does the classifiers of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(INTO, OUT)
        self.kind: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind is None:
            self.kind = "known"
        return self.layer(x)


def traced_again() -> ig.TrainStep:
    model, step = Remembers(), make_step()
    return replace(step, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.slow
@needs_inductor
def test_inductors_graphs_are_counted_when_it_compiles_them_twice() -> None:
    (column,) = compare(traced_again, ("inductor",), rounds=1).columns
    assert {k.phase for k in column.compiled.kernels} == {"forward", "backward", "update"}
    assert column.compiled.flops > 0


@needs_inductor
def test_inductors_kernels_know_their_layers(found: Comparison) -> None:
    layers = {(k.phase, k.layer) for k in kernels(found, "inductor")}
    assert layers == {
        *((phase, layer) for phase in ("forward", "backward") for layer in ("Linear", "Tanh", LOSS)),
        ("update", OPTIMIZER),
    }


@needs_xla
def test_xlas_kernels_know_their_layers_and_write_the_state(found: Comparison) -> None:
    rows = kernels(found, "xla")
    assert {("forward", "Linear"), ("backward", "Linear"), ("update", OPTIMIZER)} <= {(k.phase, k.layer) for k in rows}
    state = 4 * (INTO * HIDDEN + HIDDEN + HIDDEN * OUT + OUT) + 8  # and the count of steps, int64
    assert sum(k.written for k in rows if not k.intermediates) == state + 4  # and the loss
    column = found.column("xla")
    assert column is not None
    assert column.compiled.flops > 2 * BATCH * INTO * HIDDEN


def test_layers_are_compared_where_they_differ_most(found: Comparison) -> None:
    rows = differences(found)
    spreads = [max(sizes) - min(sizes) for sizes in ([t.nbytes for t in row.totals.values()] for row in rows)]
    assert spreads == sorted(spreads, reverse=True)
    for column in found.columns:
        peer = column.compiled.peer
        assert sum(row.totals[peer].count for row in rows if peer in row.totals) == column.compiled.totals.count


def test_the_tables_show_every_compiler(found: Comparison) -> None:
    with console.capture() as capture:
        verb._print(replace(found, missing={"xla": "[red]jax is not installed"}))
        verb._print_differences(found, differences(found))
    shown = capture.get()
    assert "xla: [red]jax is not installed" in shown
    assert all(c.compiled.peer in shown for c in found.columns)


def test_a_compiler_that_fails_says_why_in_one_line() -> None:
    with pytest.raises(UserError, match=r"irongrad: ValueError: first line\n"):
        compare(fails, ("irongrad",))


@needs_inductor
def test_inductor_has_no_column_for_a_model_that_it_compiles_in_part() -> None:
    with pytest.raises(UserError, match=r"inductor: Unsupported: .*graph_break"):
        compare(breaks, ("inductor",))


def test_a_step_that_others_would_run_in_part_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "import torch, irongrad as ig\n"
        "def make_step():\n"
        "    model = torch.nn.Linear(2, 2)\n"
        "    inputs = {'x': torch.zeros(4, 2), 'y': torch.zeros(4, 2)}\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    return ig.TrainStep(model, torch.nn.functional.mse_loss, optimizer, inputs, accumulate=2)\n"
    )
    result = CliRunner().invoke(verb.command, [f"{file}:make_step", "--json"])
    assert isinstance(result.exception, UserError)
    assert "net.py:6" in str(result.exception)
    assert "accumulate" in str(result.exception)


@pytest.mark.parametrize("field", [{"clip_grad_value": 1.0}, {"precision": "f16"}, {"sam": ig.SAM(rho=0.05)}])
def test_only_what_every_compiler_runs_is_compared(field: dict[str, object]) -> None:
    check_comparable(make_step())
    with pytest.raises(UserError, match=next(iter(field))):
        check_comparable(replace(make_step(), **field))
