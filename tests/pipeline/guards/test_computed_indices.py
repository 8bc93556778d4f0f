"""Indices that a step computes. In range, results are right. Where eager raises, the step refuses before any change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import irongrad as ig
from irongrad.graph.step_graph import Range
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.guards.decisions import Indices
from irongrad.pipeline.guards.step_indices import step_indices
from irongrad.runtime import Session
from irongrad.runtime.errors import CaptureError, GuardError
from irongrad.runtime.manifest import BY_INPUT, EARLY, PROVED

ROWS = 7


class Lookup(nn.Module):
    """Looks up rows of a table at the indices that `places` computes."""

    def __init__(self, places: Callable[..., Tensor]) -> None:
        super().__init__()
        self.table, self.places = nn.Parameter(torch.randn(ROWS, 3)), places
        self.register_buffer("order", torch.tensor([2, 0, 5, 1]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, i: Tensor) -> Tensor:
        return self.table[self.places(self, i)]


def _loss(rows: Tensor) -> Tensor:
    return (rows * torch.linspace(1, 2, rows.numel()).reshape(rows.shape)).sum()


def _step(places: Callable[..., Tensor], i: Tensor, **options: Any) -> ig.TrainStep:
    torch.manual_seed(0)
    model = Lookup(places)
    return ig.TrainStep(model, _loss, torch.optim.SGD(model.parameters(), lr=0.1), {"i": i}, **options)


def _indices(places: Callable[..., Tensor], i: Tensor | None = None) -> Indices:
    return step_indices(capture(_step(places, torch.tensor([0, 1, 2, 0]) if i is None else i)))


def _in_place(m: Lookup, i: Tensor) -> Tensor:
    j = torch.zeros_like(i)
    j += i
    j[0] = 2
    return j * 2


def _counted(m: Lookup, i: Tensor) -> Tensor:
    m.calls += 1
    return i + m.calls


def _without_gradient(m: Lookup, i: Tensor) -> Tensor:
    with torch.no_grad():
        return i * 2


HOW: dict[str, tuple[Callable[..., Tensor], set[str], list[Range]]] = {
    "an input": (lambda m, i: i, {BY_INPUT}, [Range("i", -7, 6)]),
    "an input and a number": (lambda m, i: i + 2, {BY_INPUT}, [Range("i", -9, 4)]),
    "a number and an input": (lambda m, i: torch.tensor(2) + i - 1, {BY_INPUT}, [Range("i", -8, 5)]),
    "with a constant in place": (lambda m, i: functional.pad(i - 1, (0, 1), value=3), {BY_INPUT}, [Range("i", -6, 7)]),
    "with a computed part": (lambda m, i: torch.cat([i, i * 3]), {EARLY}, []),
    "a product": (lambda m, i: i * 2, {EARLY}, []),
    "a sum of inputs": (lambda m, i: i + i.flip(0), {EARLY}, []),
    "a sum with a buffer": (lambda m, i: i - m.order, {EARLY}, []),
    "one column": (lambda m, i: i.view(2, 2)[:, 0], {EARLY}, []),
    "without a gradient": (_without_gradient, {EARLY}, []),
    "written in place": (_in_place, {EARLY}, []),
    "a remainder": (lambda m, i: i % ROWS, {PROVED}, []),
    "a buffer": (lambda m, i: m.order + 0 * i.clamp(0, 0), {PROVED}, []),
    "in range of the input's own range": (
        lambda m, i: m.table.new_ones(4).long() * m.order[i],
        {BY_INPUT, PROVED},
        [Range("i", -4, 3)],
    ),
    "random": (lambda m, i: (torch.rand(4) * ROWS).long() + 0 * i.clamp(0, 0), {PROVED}, []),
    "a counter's remainder": (lambda m, i: _counted(m, i) % ROWS, {PROVED}, []),
}


@pytest.mark.parametrize(("places", "how", "ranges"), HOW.values(), ids=HOW.keys())
def test_how_an_index_is_kept_in_range(places: Callable[..., Tensor], how: set[str], ranges: list[Range]):
    found = _indices(places)
    assert {spec.how for spec in found.specs} == how
    assert list(found.ranges) == ranges


REFUSED: dict[str, Callable[..., Tensor]] = {
    "depends on parameters": lambda m, i: (m.table[:4, 0] / 9).long() + i * 0,
    "buffers that a step writes": _counted,
    "depends on random numbers": lambda m, i: torch.randint(0, 3, (4,)) + i,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_an_index_that_nothing_can_check_is_refused(reason: str):
    with pytest.raises(
        CaptureError, match=rf"test_computed_indices.py:\d+: .*\n.*{reason}.* index.clamp\(0, size - 1\)"
    ):
        _indices(REFUSED[reason])


def test_a_target_less_one_has_a_range_with_its_ignored_value():
    model = nn.Linear(3, 5)

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(output, y - 1)

    inputs = {"x": torch.randn(4, 3), "y": torch.tensor([1, 2, 5, 3])}
    found = step_indices(capture(ig.TrainStep(model, loss, torch.optim.SGD(model.parameters()), inputs)))
    assert found.ranges == (Range("y", 1, 5, -99),)


class Positions(nn.Module):
    """Adds words and positions; `places` computes the positions from the number of words."""

    def __init__(self, places: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.table, self.places = nn.Parameter(torch.randn(ROWS, 3)), places

    def forward(self, i: Tensor) -> Tensor:
        return self.table[i % ROWS] + self.table[self.places(i.shape[0])]


def _indices_of(model: nn.Module, **options: Any) -> Indices:
    inputs, optimizer = {"i": torch.zeros(4, dtype=torch.int64)}, torch.optim.SGD(model.parameters())
    step = ig.TrainStep(model, lambda rows: rows.square().sum(), optimizer, inputs, **options)
    return step_indices(capture(step))


def test_an_index_that_depends_on_no_input_is_computed_at_compile_time():
    found = _indices_of(Positions(lambda size: (torch.arange(1, size + 1).float().log2() * 3).ceil().long()))
    assert {spec.how for spec in found.specs} == {PROVED}
    with pytest.raises(CaptureError, match="index"):
        _indices_of(Positions(lambda size: (torch.arange(1, size + 1).float().log2() * 4).ceil().long()))


def test_positions_limit_the_sizes_of_a_call():
    found = _indices_of(Positions(lambda size: torch.arange(size) + 2), dynamic={"i": {0: "T"}})
    assert {spec.how for spec in found.specs} == {PROVED}
    (condition,) = found.conditions
    assert [bool(condition.subs(dict.fromkeys(condition.free_symbols, t))) for t in (5, 6)] == [True, False]


def test_an_example_out_of_range_is_refused_with_its_line(tmp_path: Path):
    step = _step(lambda m, i: 2 * i, torch.tensor([0, 4]))
    with pytest.raises(CaptureError, match=r"test_computed_indices.py:\d+: .*\n.*IndexError: index 8 is out of bounds"):
        ig.compile(step, tmp_path / "a")
    with pytest.raises(CaptureError, match=r"test_computed_indices.py:\d+: .*\n.*IndexError: index 8 is out of bounds"):
        ig.compile(step, tmp_path / "a", entry_points=("train_step",))


# --- compiled steps -----------------------------------------------------------------------------------------------


def _unchanged(session: Session, before: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(before[n], a) for n, a in session.state().items())


@pytest.fixture(scope="module")
def doubled(tmp_path_factory: pytest.TempPathFactory) -> Session:
    step = _step(lambda m, i: m.order[i] + 2 * i, torch.tensor([0, 1, -4, 0]))
    return ig.compile(step, tmp_path_factory.mktemp("computed") / "a", opt_level=0).load()


@pytest.mark.parametrize("entry", ["train_step", "train_steps", "grad_step", "eval_step", "predict"])
@pytest.mark.parametrize(
    ("value", "says"),
    [
        (2, r"test_computed_indices.py:\d+: .*index.*must be in \[-7, 6\].* expected 6 but have 9;"),
        (-4, r""),
        (4, r"(i|index): every value must be in (\[-4, 3\]|\[-7, 6\])"),
        (1 << 40, r"(i|index): every value must be in (\[-4, 3\]|\[-7, 6\])"),
    ],
)
def test_every_entry_point_refuses(doubled: Session, entry: str, value: int, says: str):
    right, wrong = np.array([0, 1, -4, 0]), np.array([0, 1, value, 0])
    given = {"i": np.stack([right, wrong]) if entry == "train_steps" else wrong}
    before = doubled.state()
    if not says:
        doubled.call(entry, given)
        return
    with pytest.raises(GuardError, match=says):
        doubled.call(entry, given)
    assert _unchanged(doubled, before)


def test_inspect_lists_the_indices(doubled: Session):
    found = [(spec.operator, spec.range, spec.how) for spec in doubled.manifest.indices]
    assert sorted(found) == [("index", "[-4, 3]", BY_INPUT), ("index", "[-7, 6]", EARLY)]
    assert all(spec.line.startswith("test_computed_indices.py:") for spec in doubled.manifest.indices)


def test_each_micro_batch_is_checked(tmp_path: Path):
    step = _step(lambda m, i: 2 * i + i.shape[0] - 2, torch.tensor([0, 1, 2, 0]), accumulate=2)
    entries = ("train_step",)
    session = ig.compile(step, tmp_path / "a", opt_level=0, entry_points=entries).load()
    before = session.state()
    for place in range(4):
        wrong = np.array([0, 1, 2, 0])
        wrong[place] = 4
        with pytest.raises(GuardError, match=r"must be in \[-7, 6\].* expected 6 but have 8;"):
            session.train_step(i=wrong)
    assert _unchanged(session, before)


class Words(nn.Module):
    """Looks up words, and the last word of each sentence, with computed indices."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(12, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(2 * x + 1)
        last = h[torch.arange(x.shape[0]), x[:, 0] - 1]
        return self.head(h + last[:, None])


def _word_loss(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), (y - 1).flatten())


def _batch(b: int, t: int) -> dict[str, Tensor]:
    x = torch.arange(b * t).reshape(b, t) % 4 + 1
    x[:, 0] = 1
    return {"x": x, "y": torch.arange(b * t).reshape(b, t) % 5 + 1}


@pytest.mark.parametrize("sizes", [{"buckets": {"B": [4], "T": [4, 8]}}, {}], ids=["buckets", "any size"])
def test_sizes_that_vary(sizes: dict[str, Any], tmp_path: Path):
    """Padding is zeros. Here zero is no valid target, and the last word that it leads to is out of range."""
    torch.manual_seed(0)
    model = Words()
    names = {n: {0: "B", 1: "T"} for n in "xy"}
    step = ig.TrainStep(
        model, _word_loss, torch.optim.SGD(model.parameters(), lr=0.1), _batch(3, 4), dynamic=names, **sizes
    )
    twin = copy.deepcopy(model)
    session = ig.compile(step, tmp_path / "a", opt_level=0, entry_points=("train_step", "eval_step")).load()
    for b, t in ((2, 3), (4, 4), (3, 7)):
        batch = _batch(b, t)
        loss = session.eval_step(**{n: v.numpy() for n, v in batch.items()})
        assert loss == pytest.approx(_word_loss(twin(batch["x"]), batch["y"]).item(), rel=1e-5)
    before = session.state()
    for name, place, value, says in (
        ("y", (1, 2), 0, r"y: every value must be in \[1, 5\]"),
        ("x", (1, 2), 6, r"must be in \[0, 11\].* expected 11 but have 13;"),
        ("x", (1, 0), 4, r"must be in \[0, T - 1\].* expected 2 but have 3;"),
    ):
        wrong = {n: v.numpy().copy() for n, v in _batch(2, 3).items()}
        wrong[name][place] = value
        with pytest.raises(GuardError, match=says):
            session.train_step(**wrong)
    assert _unchanged(session, before)


def test_an_index_computed_from_nan_stays_in_the_table(tmp_path: Path):
    step = _step(lambda m, i: (i.sigmoid() * 6).long(), torch.tensor([0.1, 0.5]))
    session = ig.compile(step, tmp_path / "a", opt_level=0, entry_points=("predict",)).load()
    rows = session.predict(i=np.array([np.nan, 0.5], np.float32))
    table = step.model.get_parameter("table").detach().numpy()
    assert all((row == table).all(1).any() for row in rows)


def test_a_compiled_function_checks_computed_indices():
    table = torch.randn(ROWS, 2)
    compiled = ig.compile_function(lambda i: table[3 * i], (torch.tensor([0, 1, -2]),))
    np.testing.assert_array_equal(compiled(np.array([2, -2, 1])), table[torch.tensor([6, -6, 3])].numpy())
    with pytest.raises(GuardError, match=r"must be in \[-7, 6\].* expected 6 but have 9;"):
        compiled(np.array([0, 3, 0]))


def test_torch_compile_checks_computed_indices():
    table = torch.randn(ROWS, 2)
    compiled = torch.compile(lambda i: table[3 * i], backend="irongrad")
    torch.testing.assert_close(compiled(torch.tensor([2, -2, 1])), table[[6, -6, 3]])
    with pytest.raises(GuardError, match=r"must be in \[-7, 6\]"):
        compiled(torch.tensor([0, 3, 0]))


# --- random arithmetic --------------------------------------------------------------------------------------------

TABLE = torch.tensor([4, 0, -3, 6, 1])

_UNARY: list[Callable[[Tensor], Tensor]] = [
    lambda a: a + 2,
    lambda a: 3 - a,
    lambda a: a * 2,
    lambda a: torch.div(a, 2, rounding_mode="floor"),
    lambda a: a % 5,
    lambda a: a.clamp(-2, 4),
    lambda a: a.cumsum(0),
    lambda a: a.argsort(stable=True),
    lambda a: TABLE[a % 5],
    lambda a: TABLE.gather(0, a.clamp(0, 4)),
    lambda a: TABLE[a],
]
_BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: torch.where(a < 3, b, 1),
    lambda a, b: torch.where((a >= 0) & (a < 6), a, b),
    torch.minimum,
]
_EXPRESSIONS: st.SearchStrategy[Callable[[Tensor], Tensor]] = st.recursive(
    st.just(lambda i: i),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(_UNARY), inner).map(lambda p: lambda i: p[0](p[1](i))),
        st.tuples(st.sampled_from(_BINARY), inner, inner).map(lambda p: lambda i: p[0](p[1](i), p[2](i))),
    ),
    max_leaves=4,
)


PROGRAMS = 12  # in one compiled step


class Lookups(nn.Module):
    """Several lookups, each with an input and a table of its own, between buffers that nothing may write."""

    def __init__(self, expressions: Sequence[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.expressions = list(expressions)
        self.tables = nn.ParameterList([torch.randn(ROWS, 3) for _ in expressions])
        for n in range(len(expressions)):
            self.register_buffer(f"canary{n}", torch.full((ROWS, 3), float(n)))

    def lookup(self, number: int, i: Tensor) -> Tensor:
        return _loss(self.tables[number][self.expressions[number](i)])

    def forward(self, *indices: Tensor) -> Tensor:
        return torch.stack([self.lookup(n, i) for n, i in enumerate(indices)])


def _eager(model: Lookups, number: int, i: np.ndarray) -> float | None:
    try:
        return model.lookup(number, torch.tensor(i)).item()
    except (IndexError, RuntimeError):
        return None


def _batches(rng: np.random.Generator) -> list[np.ndarray]:
    near = [rng.integers(-width, width + 1, 4) for width in (2, 4, 8, 16) for _ in range(4)]
    return [*near, np.array([1 << 40, 0, 0, 0])]


def _check_arithmetic(expressions: Sequence[Callable[[Tensor], Tensor]], seed: int, directory: Path) -> None:
    """Run each lookup of a step in and out of range, with all others in range, and compare with eager."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(0)
    batches = _batches(rng)
    model = Lookups(expressions)
    fitting = [next((b for b in batches if _eager(model, n, b) is not None), None) for n in range(len(expressions))]
    model = Lookups([e for e, b in zip(expressions, fitting, strict=True) if b is not None])
    inside = {f"i{n}": batch for n, batch in enumerate(b for b in fitting if b is not None)}
    trained = copy.deepcopy(model)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    step = ig.TrainStep(
        trained,
        lambda y: y.sum(),
        optimizer,
        {n: torch.tensor(i) for n, i in inside.items()},
        model_inputs=tuple(inside),
    )
    session = ig.compile(step, directory, opt_level=0, entry_points=("train_step",)).load()
    start = session.initial_state()
    usual = [_eager(model, n, i) for n, i in enumerate(inside.values())]
    for number in range(len(inside)):
        for batch in batches:
            expected = _eager(model, number, batch)
            given = inside | {f"i{number}": batch}
            session.load_state(start)
            if expected is not None:
                others = sum(value for n, value in enumerate(usual) if n != number)
                assert session.train_step(**given) == pytest.approx(others + expected, rel=1e-5, abs=1e-4)
                assert all(np.array_equal(a, start[n]) for n, a in session.state().items() if "canary" in n)
            else:
                with pytest.raises(GuardError, match=f"i{number}|computed"):
                    session.train_step(**given)
                assert _unchanged(session, start)


_MANY = st.lists(_EXPRESSIONS, min_size=PROGRAMS, max_size=PROGRAMS)


@settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(expressions=_MANY, seed=st.integers(0, 99))
def test_random_arithmetic_gives_eagers_numbers_or_its_refusals(
    expressions: list[Callable[[Tensor], Tensor]], seed: int, tmp_path_factory: pytest.TempPathFactory
):
    _check_arithmetic(expressions, seed, tmp_path_factory.mktemp("random") / "a")


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(expressions=_MANY, seed=st.integers(0, 9999))
def test_much_random_arithmetic(
    expressions: list[Callable[[Tensor], Tensor]], seed: int, tmp_path_factory: pytest.TempPathFactory
):
    _check_arithmetic(expressions, seed, tmp_path_factory.mktemp("random") / "a")
