"""The stopwatch measures functions on this machine, each compiled alone."""

from __future__ import annotations

import pytest
import torch

from irongrad.cache import Store
from irongrad.pipeline import stopwatch
from irongrad.pipeline.stopwatch import Stopwatch
from irongrad.runtime.errors import UserError
from irongrad.targets import parse_targets

CANDIDATES = {"product": lambda x, y: x @ y, "sum": lambda x, y: x + y}
OPERANDS = [torch.empty(128, 128, device="meta"), torch.empty(128, 128, device="meta")]


def test_candidates_are_measured_once(tmp_path, monkeypatch):
    asked = []
    store = Store(tmp_path, 1 << 20)
    targets = parse_targets(["llvm-cpu"])
    seconds = Stopwatch(targets, store, asked.append)("products", CANDIDATES, OPERANDS)
    assert seconds.keys() == CANDIDATES.keys()
    assert min(seconds.values()) > 0
    assert asked == ["products"]
    monkeypatch.delattr(stopwatch, "_measured")
    assert Stopwatch(targets, store)("products", CANDIDATES, OPERANDS) == seconds
    with pytest.raises(NameError):  # another shape is another measurement
        Stopwatch(targets, store)("products", CANDIDATES, [OPERANDS[0], torch.empty(128, 64, device="meta")])


def test_the_fastest_round_counts_and_the_first_calls_do_not(monkeypatch):
    """Only calls advance this clock; other work on the machine would disturb the real one."""
    now = 0.0
    took = {
        "steady": iter([9.0, *[2.0] * (1 + stopwatch.ROUNDS)]),
        "disturbed": iter([1.0, 7.0, 3.0, *[5.0] * (stopwatch.ROUNDS - 1)]),
    }

    def call(name):
        def run():
            nonlocal now
            now += next(took[name])

        return run

    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now)
    assert stopwatch._fastest({name: call(name) for name in took}) == {"steady": 2.0, "disturbed": 3.0}


def test_a_target_that_cannot_run_here_is_refused():
    """Before any of the candidates is compiled."""

    def never(x):
        raise AssertionError("a candidate is compiled")

    with pytest.raises(UserError, match=r"--tune measures on this machine, and the target llvm-cpu-aarch64 cannot"):
        Stopwatch(parse_targets(["llvm-cpu:arch=aarch64"]))("sums", {"sum": never}, OPERANDS[:1])
