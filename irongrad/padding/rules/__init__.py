"""The padding rules of operators, with one file per family of operators."""

from __future__ import annotations

from importlib import import_module

FAMILIES = (
    "convolution",
    "factories",
    "indexing",
    "losses",
    "moves",
    "normalisation",
    "pointwise",
    "pooling",
    "products",
    "random",
    "recurrent",
    "reductions",
    "samples",
    "slices",
    "softmax",
    "sorting",
    "views",
)


def load_rules() -> None:
    """Register the rules of every family."""
    for family in FAMILIES:
        import_module(f"irongrad.padding.rules.{family}")
