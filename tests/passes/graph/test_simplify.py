"""Simplification: each rule has a proof that it applies and keeps every value, infinities, nan and -0.0 too."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Interpreter

from irongrad.passes.graph.simplify import Simplify
from irongrad.passes.manager import run_passes
from irongrad.passes.pipelines import passes_at
from irongrad.passes.rules import RULES, apply_rules, arithmetic
from irongrad.passes.rules.patterns import Rule
from irongrad.pipeline.driver import step_graph
from irongrad.step.train_step import TrainStep

aten, prims = torch.ops.aten, torch.ops.prims

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32)
NUMBERS = (*FLOATS, *INTEGERS)
BOOLEANS = (torch.bool,)
SPECIAL = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, 3e38, 0.1, -7.3, 65504.0)


@dataclass(frozen=True)
class Source:
    """Draws the examples of a proof."""

    draw: Any

    def one_of(self, *values):
        return self.draw(st.sampled_from(values))

    def shape(self, least=0, most=4):
        return self.draw(st.lists(st.integers(1, 3), min_size=least, max_size=most))

    def tensor(self, shape=None, dtypes=FLOATS):
        shape = self.shape() if shape is None else shape
        dtype = self.one_of(*dtypes)
        generator = torch.Generator().manual_seed(self.draw(st.integers(0, 999)))
        if not dtype.is_floating_point:
            return torch.randint(0, 5, shape, generator=generator).to(dtype)
        special = torch.tensor(SPECIAL, dtype=torch.float64)
        return special[torch.randint(0, len(SPECIAL), shape, generator=generator)].to(dtype)

    def alike(self, count, shape=None, dtypes=FLOATS):
        """Tensors of one shape and dtype."""
        shape = self.shape() if shape is None else shape
        dtype = self.one_of(*dtypes)
        return [self.tensor(shape, (dtype,)) for _ in range(count)]

    def broadcast(self, dtypes=FLOATS):
        """A shape, a tensor of that shape, and one of the same dtype that expands to it."""
        shape = self.shape(1)
        dtype = self.one_of(*dtypes)
        smaller = [s if self.draw(st.booleans()) else 1 for s in shape]
        return shape, self.tensor(shape, (dtype,)), self.tensor(smaller, (dtype,))

    def permutation(self, ndim):
        return self.draw(st.permutations(range(ndim)))


def _cast_chain(s):
    narrow, wide = s.one_of(
        (torch.float32, torch.float64), (torch.bfloat16, torch.float32), (torch.bool, torch.int64),
        (torch.int32, torch.int64), (torch.int32, torch.float64), (torch.uint8, torch.float16),
        (torch.uint16, torch.int32),
    )  # fmt: skip
    last = s.one_of(torch.float32, narrow)
    cast = prims.convert_element_type.default
    return lambda x: cast(cast(x, wide), last), [s.tensor(dtypes=(narrow,))]


def _views(s):
    x = s.tensor(s.shape(1))
    steps = s.one_of(
        lambda x: aten.squeeze.dim(aten.unsqueeze.default(x, 0), 0),
        lambda x: aten.unsqueeze.default(aten.view.default(x, [-1]), 1),
        lambda x: aten.view.default(aten.unsqueeze.default(x, -1), [1, -1]),
        lambda x: prims.squeeze.default(aten.view.default(x, [1, -1, 1]), [0, 2]),
    )
    return steps, [x]


def _unmoved(s):
    shape = s.shape(2)
    kept = [d for d in range(len(shape)) if shape[d] != 1]
    order = s.permutation(len(shape))
    rest = iter(kept)
    order = [next(rest) if shape[d] != 1 else d for d in order]
    return lambda x: aten.permute.default(x, order), [s.tensor(shape)]


def _permuted_ones(s):
    shape = s.shape(1, 3)
    added = list(shape)
    for _ in range(s.one_of(1, 2)):
        added.insert(s.draw(st.integers(0, len(added))), 1)
    order = s.permutation(len(added))
    return lambda x: aten.permute.default(aten.view.default(x, added), order), [s.tensor(shape)]


def _permutes(s):
    x = s.tensor(s.shape(1))
    first, second = s.permutation(x.ndim), [d - s.one_of(0, x.ndim) for d in s.permutation(x.ndim)]
    return lambda x: aten.permute.default(aten.permute.default(x, first), second), [x]


def _kept_sum(s):
    x = s.tensor(s.shape(1), (torch.float32,))
    dim = s.draw(st.integers(0, x.ndim - 1))
    shape = [n for d, n in enumerate(x.shape) if d != dim]
    return lambda x: aten.view.default(aten.sum.dim_IntList(x, [dim], True), shape), [x]


def _rows_of_a_product(s):
    batch, rows, summands = (s.one_of(1, 2, 3) for _ in range(3))
    columns, keep, first = summands + s.one_of(1, 2), s.one_of(True, False), s.one_of(True, False)
    a, c, y = (torch.randn(batch, *sizes) for sizes in ((rows, summands), (columns, summands), (rows, columns)))

    def fn(a, c, y):
        whole = [1, batch, rows, columns]
        x = aten.view.default(aten.bmm.default(a, aten.permute.default(c, [0, 2, 1])), whole)
        shorter, y = aten.bmm.default(y, c), aten.view.default(y, whole)
        total = aten.sum.dim_IntList(aten.mul.Tensor(x, y) if first else aten.mul.Tensor(y, x), [-1], keep)
        return aten.cat.default([aten.view.default(total, [batch, rows, 1]), shorter], 2)

    return fn, [a, c, y]


def _view_of_a_square(s):
    x = s.tensor(s.shape(1), (torch.float32, torch.int64))
    return lambda x: aten.view.default(aten.mul.Tensor(x, x), [1, x.numel()]), [x]


def _rows(s):
    rows = s.one_of(2, 3, 5)
    count = s.draw(st.integers(1, rows))
    return lambda w: aten.embedding.default(w, aten.arange.start_step(0, count)), [s.tensor([rows, 2])]


def _written_rows(s):
    x = torch.randn(s.one_of(1, 2, 5), 3)

    def fn(x):
        return aten.index_put.default(
            aten.full.default(list(x.shape), 0.0), [aten.arange.start_step(0, len(x))], x, True
        )

    return fn, [x]


def _product(s):
    rows, inner, columns = s.shape(3, 3)
    return aten.bmm.default, [torch.randn(1, rows, inner), torch.randn(1, inner, columns)]


def _full(x, value):
    return aten.full.default(list(x.shape), value, dtype=x.dtype)


def _boolean(value):
    return aten.full.default([], value, dtype=torch.bool)


def _binary(operator, dtypes=FLOATS):
    """A proof of a rule about an operator of a tensor and an expanded one."""

    def proof(s):
        shape, x, y = s.broadcast(dtypes)
        return lambda x, y: operator(x, aten.expand.default(y, shape)), [x, y]

    return proof


def _with_number(operator):
    def proof(s):
        shape, _, y = s.broadcast()
        number = s.one_of(2, 0.3, -1.5)
        return lambda y: operator(aten.expand.default(y, shape), number), [y]

    return proof


def _conditional(fn):
    def proof(s):
        shape, x, y = s.broadcast()
        return lambda c, x, y: fn(c, x, aten.expand.default(y, shape)), [s.tensor(shape, BOOLEANS), x, y]

    return proof


def _elementwise(fn, dtypes=FLOATS, count=1):
    """A proof by an expression of tensors of one shape and dtype."""
    return lambda s: (fn, s.alike(count, dtypes=dtypes))


def _row_of_a_stack(s):
    dim, row = s.one_of(0, -1), s.one_of(0, 2, -1)
    return lambda *parts: aten.select.int(aten.stack.default(list(parts), dim), dim, row), s.alike(3)


def _joined(s):
    """Parts that differ in the last dimension, and their lengths."""
    sizes = s.one_of([1, 2, 3], [2, 2], [3, 1])
    dtype = s.one_of(*NUMBERS)
    return [s.tensor([2, size], (dtype,)) for size in sizes], sizes


def _row_of_a_concatenation(s):
    parts, sizes = _joined(s)
    row = s.one_of(*range(-sum(sizes), sum(sizes)))
    return lambda *parts: aten.select.int(aten.cat.default(list(parts), 1), 1, row), parts


def _row_of_a_slice(s):
    start, stop = s.one_of((0, 2), (1, 3), (-3, -1), (2, 2**63 - 1))
    row = s.one_of(0, -1)
    return lambda x: aten.select.int(aten.slice.Tensor(x, 0, start, stop), 0, row), [s.tensor([4, 2])]


def _slice_of_a_part(s):
    parts, sizes = _joined(s)
    number = s.one_of(*range(len(sizes)))
    start, stop = sum(sizes[:number]), sum(sizes[: number + 1])
    low = s.one_of(*range(start, stop))
    high = s.one_of(*range(low + 1, stop + 1))
    return lambda *parts: aten.slice.Tensor(aten.cat.default(list(parts), 1), 1, low, high), parts


def _split_of_joined(s):
    parts, sizes = _joined(s)
    number = s.one_of(*range(len(sizes)))
    return lambda *parts: aten.split_with_sizes.default(aten.cat.default(list(parts), -1), sizes, -1)[number], parts


def _added_rows(s):
    columns = s.one_of(1, 4)
    # Small integers, whose sums are exact in any order: 3e38 - 3e38 - 7.3 is -7.3 or 0.
    x, values = (s.tensor([n, columns], (torch.float32,)).clamp(-9, 9).round() for n in (5, 4))
    index = torch.tensor(s.draw(st.lists(st.integers(0, 4), min_size=4, max_size=4)))
    add = s.one_of(aten.add.Tensor, lambda x, y: aten.add.Tensor(y, x))

    def fn(x, index, values):
        zeros = aten.full.default([5, columns], 0.0)
        return add(aten.neg.default(x), aten.index_put.default(zeros, [index], values, True))

    return fn, [x, index, values]


def _one_hot(index, valid, value, classes=12):
    """Slopes at the class of each row, of which some are out of range."""
    places = aten.view.default(aten.arange.start_step(0, classes), [1, classes])
    chosen = aten.bitwise_and.Tensor(aten.eq.Tensor(index, places), valid)
    return aten.where.self(chosen, value, aten.full.default([], 0.0))


def _in_chunks(x, rows):
    """The sums of rows of 12 in chunks of 4, and of the chunks and a padding in chunks of 2."""
    chunks = aten.sum.dim_IntList(aten.view.default(x, [rows, 3, 4]), [2])
    padded = aten.view.default(aten.constant_pad_nd.default(chunks, [0, 1]), [rows, 2, 2])
    return aten.sum.dim_IntList(aten.sum.dim_IntList(padded, [2]), [1])


def _sum_of_one_hot(s):
    rows = s.one_of(1, 5)
    index = torch.tensor(s.draw(st.lists(st.integers(-2, 13), min_size=rows, max_size=rows))).unsqueeze(1)
    valid, value = s.tensor([rows, 1], INTEGERS) > 1, s.tensor(s.one_of([], [1], [rows, 1]), (torch.float32,))
    total = s.one_of(
        lambda x: _in_chunks(x, rows),
        lambda x: aten.sum.dim_IntList(x, [1], True),
        lambda x: aten.sum.dim_IntList(x, [-1]),
    )
    if s.one_of(False, True):
        return lambda *of: total(_one_hot(*of)), [index, valid, value]
    # Of whole numbers, any order of additions gives the same sum.
    others = s.tensor(s.one_of([1], [rows, 1]), INTEGERS).to(torch.float32)
    return lambda others, *of: total(aten.add.Tensor(others, _one_hot(*of))), [others, index, valid, value.round()]


def _gathered_difference(s):
    dtype = s.one_of(*FLOATS)
    of_rows, places = s.one_of(([5, 1], [5, 2]), ([5, 1], [5, 1]))
    index = torch.randint(0, 300, places, generator=torch.Generator().manual_seed(s.one_of(0, 1)))
    d = s.one_of(1, -1)
    fn = lambda x, b, i: aten.gather.default(aten.sub.Tensor(x, b), d, i)  # noqa: E731
    return fn, [s.tensor([5, 300], (dtype,)), s.tensor(of_rows, (dtype,)), index]


PROOFS = {
    "copy": lambda s: (s.one_of(aten.clone.default, aten.alias.default, aten.detach.default), [s.tensor()]),
    "x * 1": lambda s: (s.one_of(lambda x: aten.mul.Tensor(x, 1), lambda x: aten.mul.Scalar(x, 1),
                                 lambda x: aten.mul.Tensor(_full(x, 1), x)), [s.tensor(dtypes=NUMBERS)]),
    "x - 0": _elementwise(lambda x: aten.sub.Tensor(x, 0), NUMBERS),
    "integer + 0": _elementwise(lambda x: aten.add.Tensor(x, 0), INTEGERS),
    "x + -y": _elementwise(lambda x, y: aten.add.Tensor(x, aten.neg.default(y)), NUMBERS, 2),
    "x / expanded": _binary(aten.div.Tensor),
    "expanded * number": _with_number(aten.mul.Tensor),
    "expanded if c else y": _conditional(lambda c, x, y: aten.where.self(c, y, x)),
    "x if c else expanded": _conditional(lambda c, x, y: aten.where.self(c, x, y)),
    "x if True else y": _elementwise(lambda x, y: aten.where.self(_boolean(True), x, y), count=2),
    "x if False else y": _elementwise(lambda x, y: aten.where.self(_boolean(False), x, y), count=2),
    "pad by nothing": lambda s: (lambda x: aten.constant_pad_nd.default(x, [0, 0], 1.0), [s.tensor(s.shape(1))]),
    "x / 1": _elementwise(lambda x: aten.div.Tensor(x, 1)),
    "x ** 1": _elementwise(lambda x: aten.pow.Tensor_Scalar(x, 1), NUMBERS),
    "x ** 2": _elementwise(lambda x: aten.pow.Tensor_Scalar(x, 2), NUMBERS),
    "not x == number": _elementwise(lambda x: aten.bitwise_not.default(aten.eq.Scalar(x, 1)), NUMBERS),
    "x and True": _elementwise(lambda x: aten.logical_and.default(x, _full(x, True)), BOOLEANS),
    "cast to the same": _elementwise(lambda x: prims.convert_element_type.default(x, x.dtype), NUMBERS),
    "cast of a widening cast": _cast_chain,
    "x + expanded": _binary(aten.add.Tensor, NUMBERS),
    "x + rows added to zeros": _added_rows,
    "x * expanded": _binary(aten.mul.Tensor, NUMBERS),
    "expanded / number": _with_number(aten.div.Tensor),
    "view to the same": lambda s: (lambda x: aten.view.default(x, list(x.shape)), [s.tensor()]),
    "view of a view": _views,
    "view of a kept sum": _kept_sum,
    "sum of (a @ c.T) * p by p @ c": _rows_of_a_product,
    "view of a square": _view_of_a_square,
    "permute that moves nothing": _unmoved,
    "permute of a permute": _permutes,
    "permute of added ones": _permuted_ones,
    "expand to the same": lambda s: (lambda x: aten.expand.default(x, [-1] * x.ndim), [s.tensor()]),
    "whole slice": lambda s: (lambda x: aten.slice.Tensor(x, -1, 0, s.one_of(3, 2**63 - 1)), [s.tensor(s.shape(1))]),
    "select from one": lambda s: (lambda x: aten.select.int(x, 1, s.one_of(0, -1)), [s.tensor([2, 1, 3])]),
    "stack of one": lambda s: (lambda x: aten.stack.default([x], s.one_of(0, -1)), [s.tensor()]),
    "rows in order": _rows,
    "row of a stack": _row_of_a_stack,
    "row of a concatenation": _row_of_a_concatenation,
    "row of a slice": _row_of_a_slice,
    "slice of a part": _slice_of_a_part,
    "split where it was joined": _split_of_joined,
    "concatenation of one": lambda s: (lambda x: aten.cat.default([x], s.one_of(0, -1)), [s.tensor(s.shape(1))]),
    "write rows in order": _written_rows,
    "batch of one product": _product,
    "sum of a one-hot row": _sum_of_one_hot,
    "gather of x - rows": _gathered_difference,
}  # fmt: skip


def _prove(rule, step_of, data):
    fn, tensors = PROOFS[rule.name](Source(data.draw))
    before = step_of(fn, *tensors, decompose=False).functions["call"].graph
    after = copy.deepcopy(before)
    assert apply_rules(after, [rule]) == {rule.name: 1}
    (expected,), (found,) = (Interpreter(g).run(*tensors, enable_io_processing=False) for g in (before, after))
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if not rule.exact:
        torch.testing.assert_close(found, expected, equal_nan=True)
        return
    assert torch.equal(found.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(found[numbers], expected[numbers])
    assert torch.equal(found[numbers].signbit(), expected[numbers].signbit())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_holds(rule, step_of):
    @settings(max_examples=8, deadline=None)
    @given(st.data())
    def prove(data):
        _prove(rule, step_of, data)

    prove()


def test_every_proof_is_of_a_rule():
    assert [r.name for r in RULES] == list(dict.fromkeys(r.name for r in RULES))
    assert set(PROOFS) == {r.name for r in RULES}


def test_a_slice_across_two_parts_stays(apply):
    def fn(x, y):
        whole = aten.cat.default([x, y], 0)
        first, second = aten.split_with_sizes.default(whole, [3, 5], 0)
        return aten.slice.Tensor(whole, 0, 3, 5), aten.slice.Tensor(whole, 0, 0, 3, 2), first, second

    assert not apply(Simplify(), fn, torch.randn(4, 2), torch.randn(4, 2)).changed


def test_a_wrong_rule_is_found(step_of, monkeypatch):
    rule = Rule("x + 0", lambda x: arithmetic.add(x, 0), lambda x: x)
    monkeypatch.setitem(PROOFS, rule.name, _elementwise(lambda x: aten.add.Tensor(x, 0)))

    @settings(max_examples=30, deadline=None, derandomize=True, database=None)
    @given(st.data())
    def prove(data):
        _prove(rule, step_of, data)

    with pytest.raises(AssertionError):
        prove()


def test_leftovers_of_the_backward_of_a_linear_layer_go(apply):
    def fn(x, w, b):
        y = aten.add.Tensor(aten.mul.Tensor(x @ w.t(), 1), aten.mul.Tensor(b, 1))
        return y.clone().view(5, 4).detach(), (x.t() @ y).t().t()

    done = apply(Simplify(), fn, torch.randn(5, 3), torch.randn(4, 3), torch.randn(4))
    assert done.operators == {"aten.permute.default": 2, "aten.mm.default": 2, "aten.add.Tensor": 1}
    assert done.stats["x * 1"] == 2


def test_a_rule_that_would_change_the_dtype_or_the_shape_does_not_apply(apply):
    def fn(i, x):
        return aten.mul.Tensor(i, 1.0), aten.mul.Tensor(aten.full.default([2, 3], 1.0), x)

    assert not apply(Simplify(), fn, torch.tensor([1, 2, 3]), torch.randn(3)).changed


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: x + 0,  # -0.0 + 0 is 0.0
        lambda x, y: x * 0,  # nan for infinities
        lambda x, y: aten.add.Tensor(x, 0, alpha=2),
        lambda x, y: prims.convert_element_type.default(
            prims.convert_element_type.default(x, torch.float16), torch.float32
        ),
        lambda x, y: x.permute(1, 0),
        lambda x, y: x[:, 1:],
        lambda x, y: aten.constant_pad_nd.default(x, [1, -1]),
    ],
)
def test_an_expression_that_is_no_identity_stays(apply, fn):
    assert not apply(Simplify(), fn, torch.randn(3, 3), torch.randn(3, 3), decompose=False).changed


@pytest.mark.parametrize("x", [torch.arange(4), torch.tensor([True, False, True, False])])
@pytest.mark.parametrize("y", [torch.tensor([0, 1, 128, 255], dtype=torch.uint8), torch.randn(4)])
def test_adding_a_negative_of_another_dtype_stays(apply, x, y):
    """For an unsigned byte, -y is large and positive; booleans have no subtraction."""
    assert not apply(Simplify(), lambda x, y: x + -y, x, y).changed


def _rows_in(number, index, values, accumulate=True):
    return aten.index_put.default(aten.full.default([5, 2], number), [index], values, accumulate)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i, v: (x.sin() + _rows_in(0.0, i, v, False), x),
        lambda x, i, v: (x.sin() + _rows_in(1.0, i, v), x),
        lambda x, i, v: (x + _rows_in(0.0, i, v), x),
        lambda x, i, v: (y := x.sin(), y + _rows_in(0.0, i, v)),
        lambda x, i, v: (y := _rows_in(0.0, i, v), x.sin() + y),
    ],
    ids=["writes", "adds to ones", "to an argument", "to a value with another reader", "rows with another reader"],
)
def test_other_sums_with_rows_stay(apply, fn):
    """Rows are only added in place where nothing else needs either value."""
    inputs = torch.randn(5, 2), torch.tensor([1, 1, 3]), torch.randn(3, 2)
    assert "x + rows added to zeros" not in apply(Simplify(), fn, *inputs).stats
    alone = apply(Simplify(), lambda x, i, v: x.sin() + _rows_in(0.0, i, v), *inputs)
    assert alone.stats["x + rows added to zeros"] == 1


@pytest.mark.parametrize(
    "fn",
    [
        lambda i, m, v: aten.sum.dim_IntList(_one_hot(i, m, v), [0]),
        lambda i, m, v: aten.sum.dim_IntList(_one_hot(i, m, v), [0, 1]),
        lambda i, m, v: aten.sum.dim_IntList(aten.constant_pad_nd.default(_one_hot(i, m, v), [0, 1], 2.0), [1]),
        lambda i, m, v: aten.sum.dim_IntList(aten.view.default(_one_hot(i, m, v), [24, 3]), [1]),
        lambda i, m, v: aten.sum.dim_IntList(_one_hot(i, m, v.expand(6, 12).sin()), [1]),
        lambda i, m, v: aten.sum.dim_IntList(_one_hot(i + torch.arange(12), m, v), [1]),
        lambda i, m, v: aten.sum.dim_IntList(aten.add.Tensor(v.expand(6, 12).sin(), _one_hot(i, m, v)), [1]),
        lambda i, m, v: aten.sum.dim_IntList(aten.add.Tensor(v, _one_hot(i, m, v), alpha=2), [1]),
    ],
)
def test_other_sums_of_one_hot_values_stay(apply, fn):
    index, valid = torch.arange(6).unsqueeze(1), torch.ones(6, 1, dtype=torch.bool)
    assert "sum of a one-hot row" not in apply(Simplify(), fn, index, valid, torch.randn(6, 1)).stats


@pytest.mark.parametrize(
    ("loss", "reader"),
    [
        (torch.nn.CrossEntropyLoss(), aten.sub.Tensor),
        (torch.nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, 2903), ignore_index=500), aten.sub.Tensor),
        (torch.nn.CrossEntropyLoss(label_smoothing=0.1), aten.add.Tensor),
    ],
)
def test_a_cross_entropy_makes_few_matrices_of_classes(loss, reader):
    """Whatever their number: 2903 is a prime. The loss reads logits, and no sum reads the one-hot slopes."""
    model = torch.nn.Linear(4, 2903, bias=False)
    inputs = {"x": torch.randn(6, 4), "y": torch.arange(6) * 500}
    step = TrainStep(model, loss, torch.optim.SGD(model.parameters()), inputs)
    graph = run_passes(step_graph(step), passes_at(2)).functions["joint"].graph.graph
    matrices = [n.target for n in graph.nodes if n.op == "call_function" and n.meta["val"].shape == (6, 2903)]
    assert matrices.count(aten.where.self) == 1
    (slopes,) = (n for n in graph.nodes if n.target is aten.where.self and n.meta["val"].shape == (6, 2903))
    assert [user.target for user in slopes.users] == [reader]
    if reader is aten.add.Tensor:
        (slopes,) = slopes.users
        assert [user.target for user in slopes.users] == [aten.sub.Tensor]
    (gathered,) = (n for n in graph.nodes if n.target is aten.gather.default)
    assert gathered.args[0].target is aten.mm.default


def test_a_sum_that_another_user_needs_is_not_computed_twice(apply):
    def fn(x):
        total = aten.sum.dim_IntList(x, [1], True)
        return aten.view.default(total, [3]), x - total

    assert not apply(Simplify(), fn, torch.randn(3, 4)).changed


def test_dead_code_and_bodies_of_control_flow(apply):
    def fn(x):
        return torch.cond(x.sum() > 0, lambda x: (x * 1).sin(), lambda x: x.t().t(), (x,))

    assert apply(Simplify(), fn, torch.randn(3, 3)).stats["x * 1"] == 1


@settings(max_examples=10, deadline=None)
@given(choices=st.lists(st.integers(0, 7), min_size=1, max_size=12))
def test_chains_of_views_collapse(apply, choices):
    steps = [
        lambda x: x.permute(2, 0, 1),
        lambda x: x.permute(0, 2, 1),
        lambda x: x.unsqueeze(1).permute(3, 1, 0, 2).squeeze(1),
        lambda x: x.reshape(x.shape[0], -1).reshape(x.shape),
        lambda x: x.reshape(-1).reshape(x.shape[1], x.shape[0], x.shape[2]),
        lambda x: x.expand(2, *x.shape).sum(0),
        lambda x: (x * 1).clone(),
        lambda x: x.flatten().unflatten(0, x.shape),
    ]

    def fn(x):
        for choice in choices:
            x = steps[choice](x)
        return x

    done = apply(Simplify(), fn, torch.randn(2, 3, 4))
    nodes = [n for n in done.after.graph.nodes if n.op == "call_function"]
    chains = [(n.target, n.args[0].target) for n in nodes]
    assert not any(a is b for a, b in chains)


def test_the_sum_in_the_gradient_of_attention_is_one_of_short_rows(apply):
    def fn(q, k, v, slopes):
        weights = (q @ k.mT).softmax(-1)
        of_weights = slopes @ v.mT
        return weights @ v, weights * (of_weights - (of_weights * weights).sum(-1, True))

    def summed(graph):
        sums = [n for n in graph.graph.nodes if n.target is aten.sum.dim_IntList]
        return sorted(n.args[0].meta["val"].shape[-1] for n in sums)

    done = apply(Simplify(), fn, *(torch.randn(2, 3, 16, 4) for _ in range(4)))
    assert (summed(done.before), summed(done.after)) == ([16, 16], [4, 16])
