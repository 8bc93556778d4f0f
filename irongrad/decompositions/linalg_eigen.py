"""Symmetric eigenvalues and singular values, without LAPACK."""

from __future__ import annotations
