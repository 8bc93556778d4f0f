"""Exact padding: a step at the sizes of a bucket gives what it gives at the true sizes of its inputs.

`Padded` and `Call` are what a rule of `irongrad.register_padding_rule` is written with.
"""

from irongrad.padding.padded import Padded
from irongrad.padding.registry import Call

__all__ = ["Call", "Padded"]
