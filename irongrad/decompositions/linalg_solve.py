"""Triangular and general solves, inverses and determinants, from factorisations."""

from __future__ import annotations
