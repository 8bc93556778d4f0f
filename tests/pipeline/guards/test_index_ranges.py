"""Indices out of range are refused, by name and range, before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given as given_values
from hypothesis import settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import irongrad as ig
from irongrad.graph.step_graph import Range
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.driver import build
from irongrad.pipeline.guards.range_checks import most_out_of_range
from irongrad.pipeline.guards.step_indices import _decided, step_indices
from irongrad.pipeline.options import make_options
from irongrad.runtime import Session
from irongrad.runtime.errors import GuardError
from irongrad.runtime.manifest import TensorSpec
from irongrad.runtime.refusals import out_of_range

WORDS, CLASSES, IGNORED = 11, 5, -100


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens).tanh()).flatten(0, 1)


def tag_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, y.flatten())


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    torch.manual_seed(0)
    model = Tagger()
    inputs = {"tokens": torch.randint(0, WORDS, (2, 3)), "y": torch.randint(0, CLASSES, (2, 3))}
    step = ig.TrainStep(model, tag_loss, torch.optim.Adam(model.parameters()), inputs)
    return ig.compile(step, tmp_path_factory.mktemp("ranges") / "artifact").load()


def batch(token: int = 1, label: int = 1) -> dict[str, np.ndarray]:
    tokens, y = np.ones((2, 3), np.int64), np.ones((2, 3), np.int64)
    tokens[1, 2], y[0, 1] = token, label
    return {"tokens": tokens, "y": y}


ENTRIES = ("train_step", "train_steps", "grad_step", "eval_step", "predict")


def call(session: Session, entry: str, given: dict[str, np.ndarray]) -> Any:
    if entry == "predict":
        return session.predict(tokens=given["tokens"])
    if entry == "train_steps":  # the last of three batches is the wrong one
        return session.train_steps(**{n: np.stack([batch()[n], batch()[n], a]) for n, a in given.items()})
    return getattr(session, entry)(**given)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (batch(token=WORDS), r"tokens: every value must be in \[0, 10\].*: .* expected 10 but have 11;"),
        (batch(token=-1), r"tokens: every value must be in \[0, 10\].* below 0, .* expected 0 but have 1;"),
        (batch(label=CLASSES), r"y: every value must be in \[0, 4\] \(or -100\).*: .* expected 4 but have 5;"),
        (batch(label=-3), r"y: every value must be in \[0, 4\] \(or -100\).* below 0, .* expected 0 but have 3;"),
    ],
    ids=["token above", "token below", "label above", "label below"],
)
def test_out_of_range(entry: str, given: dict[str, np.ndarray], says: str, session: Session) -> None:
    if entry == "predict" and "y:" in says:
        call(session, entry, given)
        return
    before, (sums, count) = session.state(), session.gradients()
    with pytest.raises(GuardError, match=says) as caught:
        call(session, entry, given)
    assert str(caught.value).startswith(f"{entry}: ")
    assert all((before[n] == a).all() for n, a in session.state().items())
    assert session.gradients()[1] == count
    assert all((sums[n] == a).all() for n, a in session.gradients()[0].items())


@pytest.mark.parametrize("entry", ENTRIES)
def test_range_ends_and_ignored_labels(entry: str, session: Session) -> None:
    for given in (batch(token=0, label=0), batch(token=WORDS - 1, label=CLASSES - 1), batch(label=IGNORED)):
        assert np.isfinite(call(session, entry, given)).all()


def test_manifest_has_the_ranges(session: Session) -> None:
    inputs = {s.name: s for s in session.manifest.entry_point("train_step").inputs}
    assert (inputs["tokens"].minimum, inputs["tokens"].maximum, inputs["tokens"].exempt) == (0, WORDS - 1, None)
    assert (inputs["y"].minimum, inputs["y"].maximum, inputs["y"].exempt) == (0, CLASSES - 1, IGNORED)


# --- uses of an index ---------------------------------------------------------------------------------------------


class Uses(nn.Module):
    """Applies `use` to the output of a linear layer and the index `i`."""

    def __init__(self, use: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.table, self.use = nn.Linear(4, 6), nn.Embedding(9, 6), use

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return self.use(self, self.layer(x), i)


def ranges_of(use: Callable[..., torch.Tensor], index: torch.Tensor | None = None) -> list[Range]:
    model = Uses(use)
    index = torch.tensor([0, 1, 2, 0]) if index is None else index
    inputs = {"x": torch.randn(4, 4), "i": index}
    step = ig.TrainStep(model, lambda o: o.sum(), torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    return list(step_indices(capture(step)).ranges)


# h has shape [4, 6], i has shape [4], m.table has 9 rows. The minimum is negative if eager takes negative indices.
USES: dict[str, tuple[Callable[..., torch.Tensor], int, int]] = {
    "index": (lambda m, h, i: h[i], -4, 3),
    "index second dimension": (lambda m, h, i: h[:, i], -6, 5),
    "index two dimensions": (lambda m, h, i: h[i, i], -4, 3),
    "index_put": (lambda m, h, i: h.index_put((i,), h.new_zeros(())), -4, 3),
    "gather": (lambda m, h, i: h.gather(1, i[:, None]), 0, 5),
    "gather negative dimension": (lambda m, h, i: h.gather(-1, i[:, None]), 0, 5),
    "scatter_add": (lambda m, h, i: torch.zeros(4, 6).scatter_add(0, i[:, None].expand(4, 6), h), 0, 3),
    "scatter in place": (lambda m, h, i: h.clone().scatter_(1, i[:, None], 0.0), 0, 5),
    "index_select": (lambda m, h, i: h.index_select(1, i), 0, 5),
    "index_add": (lambda m, h, i: torch.zeros(7, 6).index_add(0, i, h), 0, 6),
    "take_along_dim": (lambda m, h, i: torch.take_along_dim(h, i[:, None], 1), -6, 5),
    "one_hot": (lambda m, h, i: h * functional.one_hot(i, 6), 0, 5),
    "embedding": (lambda m, h, i: m.table(i) + h, 0, 8),
    "embedding without gradient": (lambda m, h, i: h + torch.no_grad()(m.table)(i), 0, 8),
    "several": (lambda m, h, i: m.table(i) + h[i], 0, 3),
    "after reshaping": (lambda m, h, i: m.table(i.view(2, 2).t().reshape(4).to(torch.int32)) + h, 0, 8),
    "padded": (lambda m, h, i: m.table(functional.pad(i, (0, 1), value=3)[1:]) + h, 0, 8),
    "broadcast": (lambda m, h, i: h.gather(1, torch.broadcast_tensors(i[:, None], h)[0][:, :1]), 0, 5),
    "log_prob": (lambda m, h, i: torch.distributions.Categorical(logits=h).log_prob(i), 0, 5),
    "parts": (lambda m, h, i: m.table(torch.cat(i.split(2)[::-1])) + h, 0, 8),
}


@pytest.mark.parametrize(("use", "minimum", "maximum"), USES.values(), ids=USES.keys())
def test_uses(use: Callable[..., torch.Tensor], minimum: int, maximum: int) -> None:
    assert ranges_of(use) == [Range("i", minimum, maximum)]


def test_ignored_index() -> None:
    assert ranges_of(lambda m, h, i: functional.nll_loss(h.log_softmax(-1), i, ignore_index=7)) == [Range("i", 0, 5, 7)]


def test_an_input_that_is_no_index_has_no_range() -> None:
    assert ranges_of(lambda m, h, i: h * i[:, None]) == []
    assert ranges_of(lambda m, h, i: h * i[:, None], torch.tensor([True, False, True, True])) == []


def test_an_index_without_elements_goes_into_an_empty_tensor() -> None:
    assert ranges_of(lambda m, h, i: h + h[:0].take(i).sum(), torch.zeros(0, dtype=torch.int64)) == []


def test_an_index_used_in_evaluation_only() -> None:
    found = ranges_of(lambda m, h, i: h + i[:, None] if m.training else h + m.table(i))
    assert found == [Range("i", 0, 8)]


def test_negative_indices_end_to_end(compiled: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = Uses(lambda m, h, i: h[i])
    inputs = {"x": torch.randn(4, 4), "i": torch.tensor([-4, 3, -1, 0])}
    step = ig.TrainStep(model, lambda o: o.square().sum(), torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    session = compiled(step, "train_step", "predict").load()
    found = session.predict(**{n: t.numpy() for n, t in inputs.items()})
    np.testing.assert_allclose(found, model.layer(inputs["x"])[inputs["i"]].detach().numpy(), rtol=1e-5, atol=1e-6)
    with pytest.raises(GuardError, match=r"i: every value must be in \[-4, 3\].* below -4, .* but have 1;"):
        session.predict(x=inputs["x"].numpy(), i=np.array([0, 0, 0, -5]))


VALUES = st.one_of(st.integers(-12, 12), st.sampled_from([2**63 - 1, -(2**63), 2**31, -(2**31)]))


@settings(max_examples=60, deadline=None)
@given_values(
    values=st.lists(VALUES, min_size=1, max_size=4), low=st.integers(-4, 0), exempt=st.sampled_from([None, -9, 9])
)
def test_a_check_measures_a_value_that_is_out_of_range(values: list[int], low: int, exempt: int | None) -> None:
    limit = Range("i", low, 5, exempt)
    wrong = [v for v in values if not low <= v <= 5 and v != exempt]
    distance = int(most_out_of_range(torch.tensor(values), limit))
    assert (0 <= distance <= 5 - low) == (not wrong)
    found = (distance + low + 2**63) % 2**64 - 2**63  # distances wrap around at the ends of int64
    assert not wrong or found in wrong


def test_the_check_of_a_three_dimensional_input_takes_two_kernels(tmp_path: Path) -> None:
    model = nn.Embedding(WORDS, 8)
    inputs = {"tokens": torch.randint(0, WORDS, (2, 3, 4))}
    step = ig.TrainStep(model, torch.sum, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    built = build(step, make_options(tmp_path / "table", entry_points=("predict",)))
    gather, maximum, sign = 1, 1, 1
    assert built.statistics["llvm-cpu"].by_function["predict"] == gather + maximum + sign


def test_texts_of_refusals() -> None:
    y = TensorSpec("y", "int64", (4,), 0, 9, -100)
    said = "y: every value must be in [0, 9] (or -100); the step was not run; "
    numbers = "shape dimension 0 mismatch; expected"
    assert out_of_range(y, 12) == f"{said}a value, written as a shape: {numbers} 9 but have 12"
    assert out_of_range(y, -3) == f"{said}how far a value is below 0, written as a shape: {numbers} 0 but have 3"


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.head(x) * mask[torch.arange(x.shape[0])[:]]


@pytest.mark.parametrize(("rows", "is_proved"), [("B", True), ("C", False)])
def test_a_size_bounds_an_index_into_another_input_of_that_size(rows: str, is_proved: bool) -> None:
    """torch.export gives the sizes of two inputs two symbols; transformers so indexes the mask of attention."""
    model = Rows()
    inputs = {"x": torch.randn(6, 4), "mask": torch.rand(6, 1), "y": torch.randint(0, CLASSES, (6,))}
    dynamic = {"x": {0: "B"}, "mask": {0: rows}, "y": {0: "B"}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(model, functional.cross_entropy, optimizer, inputs, dynamic=dynamic)
    program = capture(step).train
    functional_form, made = _decided(program, tuple(inputs), step.dynamic, ())
    assert (functional_form is program) == is_proved
    assert bool(made.verdicts.open) != is_proved or made.verdicts.conditions
