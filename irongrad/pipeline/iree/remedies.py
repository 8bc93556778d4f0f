"""Failures of iree-compile that go away with other flags, and which flags those are."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from irongrad.runtime.errors import ToolchainError
from irongrad.targets import DATA_TILING
from irongrad.targets.llvm_cpu import LARGEST_STACK, STACK

_STACK_LIMIT = "exceeded stack allocation limit"
_TILES_OF_UNKNOWN_SIZES = (
    "stack allocation size overflows 64 bits",
    "expected no unbounded stack allocations",
    "no basis element may be statically non-positive",
    _STACK_LIMIT,
)


class RefusedError(ToolchainError):
    """iree-compile failed, and may succeed with another flag; the manifest says which flags were used in the end.

    Attributes:
        flag: the flag that it failed with.
        remedy: the flags to use in its place, if any.
    """

    def __init__(self, message: str, flag: str, remedy: tuple[str, ...]) -> None:
        super().__init__(message)
        self.flag = flag
        self.remedy = remedy

    def remedied(self, flags: Sequence[str]) -> tuple[str, ...]:
        """`flags` with the remedy."""
        return tuple(new for old in flags for new in (self.remedy if old == self.flag else (old,)))


def check_remedies(flags: Sequence[str], result: subprocess.CompletedProcess[str]) -> None:
    """Raise `RefusedError` for a failed run that other flags may help.

    * With data tiling IREE 3.13.0 ends by a signal, though not in every run, on a transposed product of matrices to
      which a value made of indices is added: `(x @ x.mT + torch.eye(n)).mT`.
    * It may refuse its own tiles, in one of several ways, for products of unknown size; no small module does. Without
      data tiling the code is slower.
    * It refuses a dispatch whose own tile sizes exceed its limit on stack.

    tests/pipeline/iree/test_toolchain.py tells when the first or the last is gone.
    """
    failure = f"iree-compile failed with status {result.returncode}"
    if result.returncode > 0 and _STACK_LIMIT in result.stderr and STACK in flags:
        raise RefusedError(failure, STACK, (LARGEST_STACK,))
    of_tiles = result.returncode < 0 or any(text in result.stderr for text in _TILES_OF_UNKNOWN_SIZES)
    if result.returncode != 0 and of_tiles and DATA_TILING in flags:
        raise RefusedError(failure, DATA_TILING, ())
