"""Long test files are started first, whatever the number of their tests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.fixtures.long_files_first import LONG_FILES, TESTS, pytest_collection_modifyitems


def test_every_long_file_exists() -> None:
    """A renamed file would lose its place without a word."""
    assert [name for name in LONG_FILES if not (TESTS / name).is_file()] == []


def test_long_files_come_first_and_others_keep_their_order() -> None:
    others = ["cache/test_store.py", "runtime/test_numbers.py", "step/test_borrow.py"]
    items = [SimpleNamespace(path=TESTS / name) for name in (others[0], LONG_FILES[1], *others[1:], LONG_FILES[0])]
    pytest_collection_modifyitems(items)  # type: ignore[arg-type]
    assert [item.path for item in items] == [TESTS / name for name in (*LONG_FILES[:2], *others)]


def test_xdist_keeps_this_order(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.option.loadscopereorder is False
