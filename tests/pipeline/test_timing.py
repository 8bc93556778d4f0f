"""Functions measured on this machine, each compiled by itself."""

from __future__ import annotations

import pytest
import torch

from irongrad.cache import Store
from irongrad.pipeline import timing
from irongrad.pipeline.timing import Stopwatch
from irongrad.runtime.errors import UserError
from irongrad.targets import parse_targets

CANDIDATES = {
    "once": lambda x, y: x @ y,
    "many times": lambda x, y: torch.stack([x @ (y + i) for i in range(64)]).sum(0),
}
OPERANDS = [torch.empty(128, 128, device="meta"), torch.empty(128, 128, device="meta")]


def test_more_work_takes_longer_and_is_measured_once(tmp_path, monkeypatch):
    asked = []
    store = Store(tmp_path, 1 << 20)
    targets = parse_targets(["llvm-cpu"])
    seconds = Stopwatch(targets, store, asked.append)("products", CANDIDATES, OPERANDS)
    assert 0 < seconds["once"] < seconds["many times"]
    assert asked == ["products"]
    monkeypatch.delattr(timing, "_measured")
    assert Stopwatch(targets, store)("products", CANDIDATES, OPERANDS) == seconds
    with pytest.raises(NameError):  # another shape is another measurement
        Stopwatch(targets, store)("products", CANDIDATES, [OPERANDS[0], torch.empty(128, 64, device="meta")])


def test_a_target_that_cannot_run_here_is_refused():
    """Before any of the candidates is compiled."""

    def never(x):
        raise AssertionError("a candidate is compiled")

    with pytest.raises(UserError, match=r"--tune measures on this machine, and the target llvm-cpu-aarch64 cannot"):
        Stopwatch(parse_targets(["llvm-cpu:arch=aarch64"]))("sums", {"sum": never}, OPERANDS[:1])
