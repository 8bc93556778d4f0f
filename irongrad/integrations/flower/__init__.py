"""Federated training with Flower (the extra `flower`): clients and a server over an artifact. Needs no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from irongrad.runtime.errors import UserError

if TYPE_CHECKING:
    from irongrad.integrations.flower.client_app import client
    from irongrad.integrations.flower.diloco import DiLoCo
    from irongrad.integrations.flower.server_app import server

__all__ = ["DiLoCo", "client", "server"]

_HOME = {"DiLoCo": "diloco", "client": "client_app", "server": "server_app"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'irongrad.integrations.flower' has no attribute {name!r}")
    try:
        module = import_module(f"irongrad.integrations.flower.{_HOME[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "flwr":
            raise
        raise UserError("Flower is not installed: pip install 'irongrad[flower]'") from None
    return getattr(module, name)
