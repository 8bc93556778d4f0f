"""Assertions about values, and decisions that only raise: guards of the step, checked before it changes anything.

PYTEST_DONT_REWRITE, because pytest would make other code of the assertions that are under test.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import irongrad as ig
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.guards.step_indices import step_indices
from irongrad.runtime import Session
from irongrad.runtime.errors import CaptureError, GuardError
from irongrad.runtime.manifest import EARLY


def _asserts(m: Assertive, x: Tensor) -> None:
    assert (x > -9).all(), "x is too small"  # here


def _asserts_the_contrary(m: Assertive, x: Tensor) -> None:
    assert not (x <= -9).any()


def _calls_assert(m: Assertive, x: Tensor) -> None:
    torch._assert((x > -9).all(), "x is too small")  # here


def _calls_assert_async(m: Assertive, x: Tensor) -> None:
    torch._assert_async((x > -9).all(), "x is too small")  # here


def _raises(m: Assertive, x: Tensor) -> None:
    if x.min() <= -9 or x.isnan().any():
        raise ValueError(f"x is {x}")  # pragma: no cover


def _raises_without_gradient(m: Assertive, x: Tensor) -> None:
    with torch.no_grad():
        if not bool_of(x):
            raise ValueError("x is too small")


def bool_of(x: Tensor) -> Tensor:
    return (x > -9).all()


def _of_a_buffer(m: Assertive, x: Tensor) -> None:
    assert (x > m.least).all(), "x is too small"  # here


class Assertive(nn.Module):
    """A layer behind an assertion about its input."""

    def __init__(self, asserts: Callable[[Assertive, Tensor], None]) -> None:
        super().__init__()
        self.layer, self.asserts = nn.Linear(4, 1), asserts
        self.register_buffer("least", torch.tensor(-9.0))

    def forward(self, x: Tensor) -> Tensor:
        self.asserts(self, x)
        return self.layer(x)


def _loss(output: Tensor) -> Tensor:
    return output.square().mean()


def marked(function: object) -> str:
    """`file:line: ` of the line in `function` that ends with `# here`."""
    lines, start = inspect.getsourcelines(function)
    return next(f"{__file__}:{start + i}: " for i, text in enumerate(lines) if text.rstrip().endswith("# here"))


def _step(asserts: Callable[[Assertive, Tensor], None], **options: Any) -> ig.TrainStep:
    torch.manual_seed(0)
    model = Assertive(asserts)
    return ig.TrainStep(model, _loss, torch.optim.SGD(model.parameters(), 0.1), {"x": torch.randn(6, 4)}, **options)


def _refuses(session: Session, call: Callable[..., object], x: np.ndarray, says: str) -> None:
    """Check that a call refuses an input, and leaves the state as it is."""
    before = {n: v.copy() for n, v in session.state().items()}
    with pytest.raises(GuardError, match=says) as refused:
        call(x=x)
    assert "one for a false condition" not in str(refused.value)
    after: Mapping[str, np.ndarray] = session.state()
    assert all(np.array_equal(after[n], v) for n, v in before.items())


HELD = [
    (_asserts, "x is too small"),
    (_asserts_the_contrary, r"test_assertions.py:\d+: .*the condition does not hold"),
    (_calls_assert, "x is too small"),
    (_calls_assert_async, "x is too small"),
    (_raises, r"if x.min\(\) <= -9 or x.isnan\(\).any\(\)"),
    (_raises_without_gradient, "x is too small"),
    (_of_a_buffer, "x is too small"),
]


@pytest.mark.parametrize(("asserts", "says"), HELD)
def test_a_false_assertion_refuses_the_step(
    asserts: Callable[[Assertive, Tensor], None], says: str, tmp_path: Path
) -> None:
    session = ig.compile(_step(asserts), tmp_path / "a", cache=False).load()
    x = np.ones((6, 4), np.float32)
    session.train_step(x=x)
    x[3, 2] = -10
    for call in (session.train_step, session.predict, session.eval_step):
        _refuses(session, call, x, says)
    stacked = np.stack([np.ones_like(x), x])
    _refuses(session, session.train_steps, stacked, says)


def test_a_nan_that_a_decision_looks_for_is_refused(tmp_path: Path) -> None:
    session = ig.compile(_step(_raises), tmp_path / "a", entry_points=("train_step",), cache=False).load()
    x = np.ones((6, 4), np.float32)
    x[0, 0] = np.nan
    _refuses(session, session.train_step, x, "isnan")


def test_every_micro_batch_is_checked(tmp_path: Path) -> None:
    step = _step(_asserts, accumulate=3)
    session = ig.compile(step, tmp_path / "a", entry_points=("train_step",), cache=False).load()
    for row in (0, 3, 5):
        x = np.ones((6, 4), np.float32)
        session.train_step(x=x)
        x[row] = -10
        _refuses(session, session.train_step, x, "too small")


@pytest.mark.parametrize("fallback", ["", "dynamic"])
def test_padding_breaks_no_assertion(tmp_path: Path, fallback: str) -> None:
    def is_positive(m: Assertive, x: Tensor) -> None:
        assert (x > 0).all(), "x must be positive"

    model = Assertive(is_positive)
    step = ig.TrainStep(
        model,
        _loss,
        torch.optim.SGD(model.parameters(), 0.1),
        {"x": torch.rand(6, 4) + 1},
        dynamic={"x": {0: "B"}},
        buckets=({"B": 8},),
        bucket_fallback=fallback,
    )
    session = ig.compile(step, tmp_path / "a", entry_points=("train_step",), cache=False).load()
    for rows in (5, 8, *([11] if fallback else [])):
        x = np.ones((rows, 4), np.float32)
        session.train_step(x=x)
        x[-1] = -1
        _refuses(session, session.train_step, x, "x must be positive")


def test_an_assertion_is_listed_with_the_indices() -> None:
    found = [i for i in step_indices(capture(_step(_asserts))).specs if i.operator == "assert"]
    assert [(i.range, i.how) for i in found] == [("true", EARLY)]
    assert 'assert (x > -9).all(), "x is too small"' in found[0].line


def _asserts_about_a_result(m: Assertive, x: Tensor) -> None:
    assert torch.isfinite(m.layer(x)).all()  # here


def test_an_assertion_about_parameters_is_refused() -> None:
    with pytest.raises(CaptureError, match="the condition depends on parameters") as refused:
        step_indices(capture(_step(_asserts_about_a_result)))
    assert str(refused.value).startswith(marked(_asserts_about_a_result))


def _catches_itself(m: Assertive, x: Tensor) -> None:
    try:
        if (x < -9).any():  # here
            raise ValueError
    except ValueError:
        m.least.zero_()


def _goes_on_either_way(m: Assertive, x: Tensor) -> None:
    if (x < -9).any():  # here
        if m.training:
            raise ValueError
        m.least.zero_()


@pytest.mark.parametrize("asserts", [_catches_itself, _goes_on_either_way])
def test_a_decision_after_which_the_step_goes_on_is_refused(asserts: Callable[[Assertive, Tensor], None]) -> None:
    with pytest.raises(CaptureError, match="a Python decision") as refused:
        capture(_step(asserts))
    assert str(refused.value).startswith(marked(asserts))


def test_a_function_is_guarded_too() -> None:
    def root(x: Tensor) -> Tensor:
        assert (x >= 0).all(), "no root"
        return x.sqrt()

    call = ig.compile_function(root, [torch.rand(3)])
    assert np.allclose(call(np.full(3, 4, np.float32)), 2)
    with pytest.raises(GuardError, match="no root"):
        call(np.full(3, -4, np.float32))
