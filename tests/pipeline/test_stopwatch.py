"""The stopwatch measures functions on this machine, each compiled alone."""

from __future__ import annotations

import pytest
import torch

from irongrad.cache import Store
from irongrad.passes.base import Measured
from irongrad.pipeline import stopwatch, timed_calls
from irongrad.pipeline.stopwatch import Stopwatch
from irongrad.pipeline.tuning_budget import TuningBudget
from irongrad.runtime.errors import UserError
from irongrad.targets import parse_targets

CANDIDATES = {"product": lambda x, y: x @ y, "sum": lambda x, y: x + y}
OPERANDS = [torch.empty(128, 128, device="meta"), torch.empty(128, 128, device="meta")]


def test_candidates_are_measured_once(tmp_path, monkeypatch):
    said: list[str] = []
    store = Store(tmp_path, 1 << 20)
    targets = tuple(parse_targets(["llvm-cpu"]))
    budget = TuningBudget(60, said.append)
    watch = Stopwatch(targets, store, budget)
    watch.expect(1)
    times = watch("products", CANDIDATES, OPERANDS)
    assert times is not None
    assert times.seconds.keys() == CANDIDATES.keys()
    assert min(times.seconds.values()) > 0
    assert said == ["products (1 of 1, 0 of 60 s)"]
    assert budget.spent > 0
    monkeypatch.delattr(stopwatch, "_measured")
    assert Stopwatch(targets, store)("products", CANDIDATES, OPERANDS) == times
    with pytest.raises(NameError):  # another shape is another measurement
        Stopwatch(targets, store)("products", CANDIDATES, [OPERANDS[0], torch.empty(128, 64, device="meta")])


def test_a_spent_budget_leaves_the_rest_out(tmp_path, monkeypatch):
    monkeypatch.delattr(stopwatch, "_measured")
    budget = TuningBudget(0)
    assert Stopwatch(tuple(parse_targets(["llvm-cpu"])), None, budget)("products", CANDIDATES, OPERANDS) is None
    assert (budget.timed, budget.left_out) == (0, 1)


def test_the_fastest_round_counts_and_the_first_calls_do_not(monkeypatch):
    """Only calls advance this clock; other work on the machine would disturb the real one."""
    now = 0.0
    rounds = timed_calls.ROUNDS, timed_calls.CONFIRMING
    took = {
        "steady": iter([9.0, *[2.0] * (1 + sum(rounds))]),
        "disturbed": iter([1.0, 7.0, 3.0, *[5.0] * (rounds[0] - 1)]),
        "lucky": iter([2.0, 2.0, 1.0, *[2.0] * (sum(rounds) - 1)]),
    }

    def call(name):
        def run():
            nonlocal now
            now += next(took[name])

        return run

    monkeypatch.setattr(timed_calls.time, "perf_counter", lambda: now)
    found = timed_calls.fastest("steady", {name: call(name) for name in took}, {})
    assert found == Measured({"steady": 2.0, "disturbed": 3.0, "lucky": 2.0})


@pytest.mark.parametrize(
    ("default", "other", "faster"),
    [
        ([2.0] * 24, [1.8] * 24, ("other",)),
        ([2.0] * 24, [1.95] * 24, ()),  # less than the margin
        ([5.0, 2.0] * 12, [4.5, 1.8] * 12, ("other",)),  # other work on the machine slows both down
        ([5.0] * 24, [5.0] * 22 + [2.0] * 2, ()),  # a quiet moment
        ([5.0] * 10 + [2.0] * 14, [2.0] * 10 + [5.0] * 14, ()),
    ],
)
def test_a_function_is_faster_only_beyond_noise(monkeypatch, default, other, faster):
    now = 0.0
    took = {n: iter([3.0] * (2 + timed_calls.ROUNDS) + s) for n, s in (("default", default), ("other", other))}

    def call(name):
        def run():
            nonlocal now
            now += next(took[name])

        return run

    monkeypatch.setattr(timed_calls.time, "perf_counter", lambda: now)
    calls = {name: call(name) for name in ("other", "default")}
    assert timed_calls.fastest("default", calls, {}, most=1e9).faster == faster


def test_a_target_that_cannot_run_here_is_refused():
    """Before any of the candidates is compiled."""

    def never(x):
        raise AssertionError("a candidate is compiled")

    with pytest.raises(UserError, match=r"--tune measures on this machine, and the target llvm-cpu-aarch64 cannot"):
        Stopwatch(parse_targets(["llvm-cpu:arch=aarch64"]))("sums", {"sum": never}, OPERANDS[:1])


def test_a_form_that_fails_to_compile_is_left_out_and_named():
    candidates = CANDIDATES | {"unknown": lambda x, y: torch.ops.aten._cdist_forward(x, y, 2.0, None) + torch.rand(3)}
    times = Stopwatch(tuple(parse_targets(["llvm-cpu"])))("products", candidates, OPERANDS)
    assert times is not None
    assert times.seconds.keys() == CANDIDATES.keys()
    assert times.failed.keys() == {"unknown"}
    assert times.failed["unknown"]


def test_a_form_that_fails_to_run_is_left_out_and_named():
    def fails():
        raise RuntimeError("no device\nat a line")

    times = timed_calls.fastest("early", {"sum": lambda: None, "late": fails}, {"early": "no kernel"})
    assert times.seconds.keys() == {"sum"}
    assert times.failed == {"early": "no kernel", "late": "no device"}
    assert times.faster == ()  # there is no default to compare it with
    assert timed_calls.fastest("late", {"late": fails}, {}) == Measured({}, failed={"late": "no device"})


def test_pairs_take_turns(monkeypatch):
    now, order = 0.0, []

    def call(name, seconds):
        def run():
            nonlocal now
            now += seconds
            order.append(name)

        return run

    monkeypatch.setattr(timed_calls.time, "perf_counter", lambda: now)
    rounds = timed_calls.paired(call("a", 1.0), call("b", 2.0), 1.0)
    assert rounds == [(1.0, 2.0)] * 9
    assert order[4:10] == ["a", "b", "b", "a", "a", "b"]  # the first calls load code, and say how long a call takes
