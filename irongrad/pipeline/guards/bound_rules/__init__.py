"""The rules that compute the bounds of an operator's result, with one file per family of operators."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module

from irongrad.pipeline.guards.bound_rules.registry import RULES, Rule

FAMILIES = ("arithmetic", "conditions", "elements", "factories", "positions")


@cache
def bound_rules() -> Mapping[str, Rule]:
    """The rule of each operator that has one, by its name without overload."""
    for family in FAMILIES:
        import_module(f"{__name__}.{family}")
    return RULES
