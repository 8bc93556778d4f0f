"""Exact padding: a step run at a bucket's sizes gives the same results as at the true sizes of its inputs.

Rules for `irongrad.register_padding_rule` are written with `Padded` and `Call`.
"""

from irongrad.padding.padded import Padded
from irongrad.padding.registry import Call

__all__ = ["Call", "Padded"]
