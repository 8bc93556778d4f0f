"""LU, Cholesky and QR factorisations, without LAPACK."""

from __future__ import annotations
