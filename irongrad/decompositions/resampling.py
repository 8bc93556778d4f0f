"""Upsampling, grid sampling and their backward."""

from __future__ import annotations
