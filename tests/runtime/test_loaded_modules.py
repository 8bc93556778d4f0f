"""Walking the loaded modules runs no code of theirs."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from cryptography.hazmat.bindings import _rust  # brings a library of cffi, whose class says that it is a module's

from irongrad.runtime.loaded_modules import module_globals


class Lazy(ModuleType):
    """A module that loads itself when an attribute is read."""

    def __getattribute__(self, name: str) -> object:
        pytest.fail(f"{name} was read")


class NoModule:
    """As cffi's libraries: it says that it is a module, and has no globals."""

    __slots__ = ()

    @property
    def __class__(self) -> type:
        return ModuleType


def test_lazy_modules_stay_lazy_and_other_objects_are_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    monkeypatch.setitem(sys.modules, "no_module", NoModule())
    found = dict(module_globals())
    assert found["lazy"]["__name__"] == "lazy"
    assert "no_module" not in found
    assert found["sys"] is vars(sys)
    assert _rust.__name__ in found
