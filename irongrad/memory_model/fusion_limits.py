"""Limits of fusing elementwise operations with several readers, shared by the pass and the memory model."""

from __future__ import annotations

# Rounds of fusing a producer with its consumers.
ROUNDS = 8

# Elements of the largest result that a kernel computes beside other results. More threads work on larger results when
# they are written and read, and one kernel less saves little. Without this limit a small GPT's step takes 1.04 as long.
LARGEST = 4096
