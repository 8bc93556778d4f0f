"""Hashes that are a part of cache keys."""

from __future__ import annotations

import os
import subprocess
import sys

from irongrad.cache import machine
from irongrad.cache.machine import sha256
from irongrad.targets import parse_target

_PRINTED = """
from irongrad.cache.machine import sha256
from irongrad.targets import parse_target
print(sha256(parse_target("llvm-cpu:cpu=x86-64-v4"), {"a": [frozenset("abcdefgh")]}))
"""


def test_every_source_file_changes_the_key_of_the_sources(tmp_path, monkeypatch):
    (tmp_path / "irongrad").mkdir()
    (tmp_path / "irongrad" / "__init__.py").write_text("")
    monkeypatch.setattr(machine, "PACKAGE", tmp_path / "irongrad")
    found = [machine.sources.__wrapped__()]
    (tmp_path / "irongrad" / "more.py").write_text("a = 1\n")
    found.append(machine.sources.__wrapped__())
    (tmp_path / "irongrad" / "more.py").write_text("a = 2\n")
    found.append(machine.sources.__wrapped__())
    assert len(set(found)) == 3


def test_all_processes_make_the_same_key():
    """The order of a set follows the hashes of strings, which differ from process to process."""
    found = {
        subprocess.run(
            [sys.executable, "-c", _PRINTED],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in range(4)
    }
    assert len(found) == 1


def test_different_values_have_different_keys():
    target = parse_target("llvm-cpu:cpu=x86-64-v3")
    values = [(1,), [1], {1}, frozenset({1}), {1: 1}, {(1, 1)}, "1", 1, target, parse_target("llvm-cpu:cpu=x86-64-v4")]
    assert len({sha256(v) for v in values}) == len(values)
