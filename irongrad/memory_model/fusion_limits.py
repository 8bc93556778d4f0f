"""How far elementwise operations that several others read are fused: the pass and the memory model agree on it."""

from __future__ import annotations

# Rounds of fusing a producer with its consumers.
ROUNDS = 8

# Elements of the largest results that one kernel computes beside others. Larger ones are written and read while more
# threads work, and what a kernel saves is little; with them a small GPT's step takes 1.04 as long.
LARGEST = 4096
