"""The peak of arithmetic that reports compare with."""

from __future__ import annotations

import sys

from irongrad.reports import multiply_adds


def test_a_loop_of_multiply_adds_is_measured():
    assert multiply_adds.multiply_add_rate() > 1e9


def test_a_machine_without_the_compiler_has_other_measures(monkeypatch):
    monkeypatch.delitem(sys.modules, "irongrad.mlir.tools", raising=False)
    monkeypatch.setitem(sys.modules, "iree.compiler.tools", None)
    assert multiply_adds.multiply_add_rate() == 0.0
