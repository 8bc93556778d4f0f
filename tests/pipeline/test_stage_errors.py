"""Every error of a stage names the stage or the user's line, and `check` reports the errors of `compile`."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad import onnx
from irongrad.diagnostics.source_lines import is_user_file
from irongrad.diagnostics.stage_errors import refusals_name, reported
from irongrad.frontends.import_bundle import import_bundle
from irongrad.pipeline import driver, front
from irongrad.pipeline.check_step import check
from irongrad.runtime.errors import CaptureError, InternalError, IronGradError, UserError
from irongrad.targets import parse_target

HERE = str(Path(__file__).resolve())


# Like the model of test_check_step.py: refusals have to name lines of the file of the test.
class Model(nn.Module):
    def __init__(self, body: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(3, dtype=dtype))
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x @ self.w)


def of(body: Callable[[torch.Tensor], torch.Tensor], optimizer: Any = torch.optim.SGD, **inputs: Any) -> ig.TrainStep:
    model = Model(body)
    return ig.TrainStep(
        model, lambda y, *_: y.sum(), optimizer(model.parameters(), 0.1), {"x": torch.ones(2, 3), **inputs}
    )


def error_of(step: ig.TrainStep, folder: Path) -> IronGradError:
    with pytest.raises(IronGradError) as caught:
        ig.compile(step, folder / "out", cache=False)
    return caught.value


def raises(y):
    raise KeyError("mine")


class Counting(Model):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def counting():
    model = Counting(lambda y: y)
    return ig.TrainStep(model, lambda y: y.sum(), torch.optim.SGD(model.parameters()), {"x": torch.ones(2, 3)})


def branches(y):
    return y * 2 if y.sum() > 0 else y


class Raising(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        return self.param_groups[0]["params"][0].no_such_thing


class Deciding(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad.unique().sum())


def hooked():
    step = of(lambda y: y)
    step.model.register_full_backward_hook(lambda *a: None)
    return step


def sparse():
    table = nn.Embedding(4, 3, sparse=True)
    return ig.TrainStep(
        table, lambda y: y.sum(), torch.optim.SparseAdam(table.parameters()), {"i": torch.tensor([0, 1])}
    )


FAILING: dict[str, Callable[[], ig.TrainStep]] = {
    "a branch": lambda: of(branches),
    "an exception of the forward": lambda: of(raises),
    "two operators": lambda: of(lambda y: torch.special.airy_ai(y.detach()) + torch.special.bessel_j0(y.detach()) + y),
    "a size from values": lambda: of(lambda y: y[y > 0]),
    "no scalar": lambda: ig.TrainStep(
        m := Model(lambda y: y), lambda y: y, torch.optim.SGD(m.parameters()), {"x": torch.ones(2, 3)}
    ),
    "an unused input": lambda: of(lambda y: y, z=torch.ones(1)),
    "a hook": hooked,
    "a random number": lambda: of(lambda y: y * random.random()),
    "an exception of the optimizer": lambda: of(lambda y: y, Raising),
    "a decision of the optimizer": lambda: of(lambda y: y, Deciding),
    "LBFGS": lambda: of(lambda y: y, torch.optim.LBFGS),
    "sparse gradients": sparse,
    "a side effect": counting,
}


@pytest.mark.parametrize("make", FAILING.values(), ids=FAILING)
def test_check_says_what_compile_says(make: Callable[[], ig.TrainStep], tmp_path: Path) -> None:
    report = check(make(), [parse_target("llvm-cpu")])
    error = error_of(make(), tmp_path)
    assert isinstance(error, UserError), repr(error)
    assert (type(report.error), str(report.error)) == (type(error), str(error))
    assert report.refusals
    assert HERE in str(error) or make in (FAILING["LBFGS"], FAILING["sparse gradients"])


def test_a_step_that_compiles_has_no_error() -> None:
    assert check(of(lambda y: y)).error is None


@pytest.mark.parametrize("stage", ["differentiate", "add_optimizer", "add_guards"])
def test_an_error_that_a_stage_does_not_expect_is_an_internal_error_with_its_name(
    stage: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object) -> None:
        raise TypeError("no such thing\nand more")

    monkeypatch.setattr(front, stage, broken)
    monkeypatch.setattr(broken, "__code__", broken.__code__.replace(co_filename="<ours>"))
    name = stage.removeprefix("add_")
    error = error_of(of(lambda y: y), tmp_path)
    assert isinstance(error, InternalError)
    assert str(error).startswith(f"the stage {name!r} failed: TypeError: no such thing. ")
    assert isinstance(error.__cause__, TypeError)
    assert str(check(of(lambda y: y)).error) == str(error)


def test_the_stages_after_the_graph_are_named_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(driver, "pack_together", eval("lambda graphs: graphs.no_such_attribute"))
    error = error_of(of(lambda y: y), tmp_path)
    assert isinstance(error, InternalError)
    assert "the stage 'passes' failed: AttributeError" in str(error)


def test_an_error_of_the_users_own_code_names_their_line() -> None:
    with (
        pytest.raises(CaptureError, match=r"this line fails in a test: ValueError: mine") as caught,
        reported(lambda: "a test"),
    ):
        mine()
    assert str(caught.value).startswith(f"{HERE}:{mine.__code__.co_firstlineno + 1}: ")


def mine() -> None:
    raise ValueError("mine")


def test_an_error_below_the_users_line_is_internal_and_names_the_line() -> None:
    with pytest.raises(InternalError) as caught, reported(lambda: "a test"):
        parse_target(3)  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"{HERE}:")
    assert "a test failed: " in str(caught.value)


def test_our_own_errors_pass() -> None:
    with pytest.raises(UserError) as caught, reported(lambda: "a test"):
        raise UserError("as it is")
    assert str(caught.value) == "as it is"


def test_a_refusal_without_a_line_names_the_line_that_makes_the_step(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model.register_buffer("alias", model[0].weight.data)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = ig.TrainStep(model, nn.functional.mse_loss, optimizer, {"x": torch.ones(2, 3), "y": torch.ones(2, 3)})
    with pytest.raises(CaptureError, match="share memory") as caught:
        ig.compile(step, tmp_path / "step")
    assert f"in the step that is made at {HERE}:" in str(caught.value)
    assert str(check(step).error) == str(caught.value)


def test_a_refusal_at_a_line_of_a_package_names_the_line_that_makes_the_step() -> None:
    """As for a loss of a package, which no line of the user's calls."""
    package = f"{sysconfig.get_paths()['purelib']}/some_package/losses.py"
    for place, is_named in ((package, True), (HERE, False)):
        with pytest.raises(UserError) as caught, refusals_name("train.py:7"):
            raise UserError(f"{place}:12: if len(pairs) == 0:\n  a decision")
        assert ("made at train.py:7" in str(caught.value)) is is_named


def test_a_step_that_cannot_be_made_names_its_line() -> None:
    with pytest.raises(CaptureError, match="holds no parameters") as caught:
        of(lambda y: y, lambda *_: torch.optim.SGD([{"params": []}], 0.1))
    assert f"{HERE}:" in str(caught.value)


def test_checking_a_step_that_is_refused_leaves_it_as_it_was() -> None:
    class Keeps(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = x
            return super().forward(x)

    model = Keeps(lambda y: y * random.random())
    step = ig.TrainStep(model, lambda y: y.sum(), torch.optim.SGD(model.parameters(), 0.1), {"x": torch.ones(2, 3)})
    before = random.getstate()
    assert check(step).error is not None
    assert not hasattr(model, "seen")
    assert random.getstate() == before


@pytest.mark.parametrize("function", [ig.compile_function, import_bundle, onnx.load])
def test_a_call_with_wrong_arguments_is_the_callers_mistake(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        function(nonsense=1)


def test_the_command_of_a_package_is_no_file_of_the_user() -> None:
    """`irongrad import` makes the step of an ONNX file itself, and no line of the user's calls it."""
    commands = Path(sysconfig.get_path("scripts"))
    assert not is_user_file(str(commands / "irongrad"))
    assert is_user_file(str(commands.parent / "step.py"))
