"""The form that a convolution takes, by predicted cost or by measurement."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from irongrad.passes import parse_passes, run_passes
from irongrad.passes.base import Measured
from irongrad.passes.graph.convolutions import tasks_of
from irongrad.passes.graph.convolutions.choice import fastest, measured
from irongrad.passes.graph.convolutions.forms import FORMS, forms_of
from irongrad.passes.graph.convolutions.problem import Halves, Problem, Window

aten = torch.ops.aten


def problem(kind="forward", size=16, channels=(64, 64), stride=1, kernel=3, padding=1, batch=8):
    out = (size + 2 * padding - kernel) // stride + 1
    pairs = ((size, size), (out, out), (kernel, kernel), (stride, stride), (padding, padding), (1, 1))
    return Problem(kind, batch, channels, 1, Window(*pairs))


def by_name(of):
    return {form.name: form for form in forms_of(of)}


def test_the_cheapest_form_is_taken():
    one, other = problem(), problem(size=8)
    costs = {
        one: {by_name(one)["direct"]: 9.0, by_name(one)["gathered"]: 3.0, by_name(one)["winograd"]: 2.0},
        other: {by_name(other)["direct"]: 9.0, by_name(other)["gathered"]: 1.0},
    }
    chosen = fastest(costs, [one, other])
    assert {p: f.name for p, f in chosen.items()} == {one: "winograd", other: "gathered"}


@pytest.mark.parametrize(("times", "expected"), [(1, ["gathered", "gathered"]), (5, ["direct", "direct"])])
def test_all_images_have_one_layout(times, expected):
    """Several convolutions that gain from channels-first images outweigh one that gains from channels-last images."""
    one, other = problem(), problem(size=8)
    costs = {
        one: {by_name(one)["direct"]: 9.0, by_name(one)["gathered"]: 1.0},
        other: {by_name(other)["direct"]: 1.0, by_name(other)["gathered"]: 3.0},
    }
    chosen = fastest(costs, [one] + [other] * times)
    assert [chosen[p].name for p in (one, other)] == expected


def test_channels_come_first_only_where_every_convolution_can():
    one, other = problem(), problem(size=8)
    costs = {
        one: {by_name(one)["gathered"]: 9.0},
        other: {f: 1.0 if f.name == "direct" else 2.0 for f in forms_of(other)},
    }
    assert all(form.channels_last for form in fastest(costs, [one] + [other] * 99).values())


def test_a_convolution_of_one_form_takes_it():
    one = problem()
    assert fastest({one: {by_name(one)["direct"]: 1.0}}, [one])[one].name == "direct"


@pytest.mark.parametrize("halves", [None, *Halves])
def test_a_gradient_is_not_scattered_from_a_single_row(halves):
    """The second convolution of EEGNet reads all electrodes at once; the sum of the products is mostly one of zeros."""
    window = Window((22, 257), (1, 257), (22, 1), (1, 1), (0, 0), (1, 1))
    costs = {form.name: form.cost(Problem("input", 4, (8, 16), 8, window, halves)) for form in FORMS}
    assert costs["filtered"] < costs["scattered-by-group"] / 5


class Watch:
    """Reports times for the candidates that grow in the order of `order`."""

    def __init__(self, *order: str) -> None:
        self.order = order
        self.asked: list[str] = []
        self.expected = 0

    def expect(self, count):
        self.expected += count

    def __call__(self, what, candidates, operands):
        self.asked.append(what)
        seconds = {name: 1.0 + self.order.index(name) for name in candidates}
        return Measured(seconds, tuple(name for name in self.order if name in candidates))


def graph_of(step_of, times=1, **geometry):
    def network(x, weight):
        for _ in range(times):
            x = F.conv2d(x, weight, **geometry)
        return x

    return step_of(network, torch.randn(8, 64, 16, 16), torch.randn(64, 64, 3, 3))


def run(step, timer):
    records = []
    run_passes(
        step, parse_passes("convolutions"), on_pass=lambda number, record, function: records.append(record), timer=timer
    )
    return records[0]


@pytest.mark.parametrize("order", [("direct", "gathered", "winograd"), ("gathered", "winograd", "direct")])
def test_measurement_decides(step_of, order):
    record = run(graph_of(step_of, padding=1), Watch(*order))
    assert record.stats == {order[0]: 1}
    (choice,) = record.choices
    assert choice.chosen == order[0]
    assert sorted(choice.seconds) == sorted(order)
    assert choice.what == "forward 8x64x16x16 64x64x3x3 stride 1,1 padding 1,1 dilation 1,1"


def test_equal_convolutions_are_measured_once(step_of):
    watch = Watch("winograd", "gathered", "direct")
    assert run(graph_of(step_of, times=4, padding=1), watch).stats == {"winograd": 4}
    assert len(watch.asked) == watch.expected == 1


class Nearly(Watch):
    """Reports forms that are faster than the default of the cost table by less than the noise."""

    def __call__(self, what, candidates, operands):
        self.asked.append(what)
        default, *others = candidates
        return Measured({default: 1.0, **dict.fromkeys(others, 0.5)})


class Spent(Watch):
    """Has no time left."""

    def __call__(self, what, candidates, operands):
        return None


class Failing(Watch):
    """Reports that the named forms fail, and times for the others."""

    def __call__(self, what, candidates, operands):
        seconds = {name: 1.0 + i for i, name in enumerate(n for n in candidates if n not in self.order)}
        return Measured(seconds, failed={name: "no registers" for name in candidates if name in self.order})


def test_a_form_that_fails_is_left_out_and_named(step_of):
    (choice,) = run(graph_of(step_of, padding=1), Failing("gathered")).choices
    assert choice.chosen != "gathered"
    assert choice.failed == {"gathered": "no registers"}
    default = run(graph_of(step_of, padding=1), None)
    (form,) = default.stats
    failing = run(graph_of(step_of, padding=1), Failing(form))
    assert failing.stats == default.stats  # nothing that could be compared with it
    assert failing.choices[0].failed == {form: "no registers"}


def test_the_default_stays_unless_another_form_is_clearly_faster(step_of):
    default = run(graph_of(step_of, padding=1), None)
    assert run(graph_of(step_of, padding=1), Nearly()).stats == default.stats
    spent = run(graph_of(step_of, padding=1), Spent())
    assert spent.stats == default.stats
    assert spent.choices == ()


def test_without_a_timer_nothing_is_measured(step_of):
    assert run(graph_of(step_of, padding=1), None).choices == ()


@pytest.mark.parametrize("kind", ["forward", "input", "weight"])
def test_measured_candidates_compute_the_convolution(step_of, kind):
    """Every measured candidate computes the convolution, from images with channels first or last."""
    mask = [kind == "input", kind == "weight", False]

    def function(grad, x, weight):
        if kind == "forward":
            return F.conv2d(x, weight, padding=1)
        moves = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)
        return aten.convolution_backward(grad, x, weight, None, *moves)[mask.index(True)]

    operands = torch.randn(8, 48, 16, 16), torch.randn(8, 64, 16, 16), torch.randn(48, 64, 3, 3)
    nodes = step_of(function, *operands).functions["call"].graph.graph.nodes
    (task,) = [task for node in nodes for task in tasks_of(node)]
    first, second = (torch.randn(shape, dtype=torch.float64) for shape in task.problem.shapes())
    results = {}

    def timer(what, candidates, operands):
        images = (first, second) if kind == "weight" else (first,)
        last = [t.permute(0, 2, 3, 1) if any(t is image for image in images) else t for t in (first, second)]
        assert [o.shape for o in operands] == [t.shape for t in (first, second, *last)]
        for name, candidate in candidates.items():
            result = candidate(first, second, *last)
            results[name] = result if kind == "weight" or name == "direct" else result.permute(0, 3, 1, 2)
        return Measured(dict.fromkeys(candidates, 1.0))

    forms = [form for form in forms_of(task.problem) if form.name != "direct"]
    measured(task, [*forms, forms_of(task.problem)[0]], timer)
    assert len(results) >= 2
    expected = forms_of(task.problem)[0].build(first, second, task.problem)
    for result in results.values():
        torch.testing.assert_close(result, expected)
