"""Random numbers that are the same on every target: a counter-based generator, written as graph operators."""

from irongrad.operators.random.draws import Draws, draws, draws_with, is_random, numbered, undrawable

__all__ = ["Draws", "draws", "draws_with", "is_random", "numbered", "undrawable"]
