"""Random numbers that are the same on every target: a counter-based generator, written as graph operators."""

from irongrad.operators.random.draws import Draws, draws, is_random, numbered, undrawable

__all__ = ["Draws", "draws", "is_random", "numbered", "undrawable"]
