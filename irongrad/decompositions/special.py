"""Special functions: error functions, gamma functions, Bessel functions."""

from __future__ import annotations
