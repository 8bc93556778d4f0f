"""Failures of iree-compile that other flags avoid."""

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
    "all stack allocations need to be hoisted to the entry block",
    _STACK_LIMIT,
)


class RefusedError(ToolchainError):
    """iree-compile failed, and may succeed with another flag; the manifest has the flags of the successful run.

    Attributes:
        flag: the flag to replace.
        remedy: the flags to use instead; empty to drop the flag.
    """

    def __init__(self, message: str, flag: str, remedy: tuple[str, ...]) -> None:
        super().__init__(message)
        self.flag = flag
        self.remedy = remedy

    def remedied(self, flags: Sequence[str]) -> tuple[str, ...]:
        """Replace the flag in `flags` by the remedy."""
        return tuple(new for old in flags for new in (self.remedy if old == self.flag else (old,)))


def check_remedies(flags: Sequence[str], result: subprocess.CompletedProcess[str]) -> None:
    """Raise an error for a failed run if other flags may avoid the failure.

    * With data tiling, IREE 3.13.0 may crash on a transposed matrix product to which a value computed from indices is
      added: `(x @ x.mT + torch.eye(n)).mT`. It ends by a signal, though not in every run.
    * It may reject its own tiles for products of unknown size, in one of several ways. No small module reproduces this.
      Without data tiling the code is slower.
    * It rejects a dispatch if the tile sizes that it chose itself exceed its limit on stack allocations.

    tests/pipeline/iree/test_toolchain.py tells when the first or the last is fixed.

    Raises:
        RefusedError: the run failed, and other flags may avoid the failure.
    """
    failure = f"iree-compile failed with status {result.returncode}"
    if result.returncode > 0 and _STACK_LIMIT in result.stderr and STACK in flags:
        raise RefusedError(failure, STACK, (LARGEST_STACK,))
    of_tiles = result.returncode < 0 or any(text in result.stderr for text in _TILES_OF_UNKNOWN_SIZES)
    if result.returncode != 0 and of_tiles and DATA_TILING in flags:
        raise RefusedError(failure, DATA_TILING, ())
