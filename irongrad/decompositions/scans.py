"""Cumulative sums, products, maxima and the like."""

from __future__ import annotations
