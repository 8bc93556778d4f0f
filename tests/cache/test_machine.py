"""The key of IronGrad's own sources, which is part of every cache key."""

from __future__ import annotations

from irongrad.cache import machine


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
