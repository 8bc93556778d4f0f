"""What a compiler makes of a training step, in the same terms for every compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key")

LOSS = "(loss)"
MODEL = "(model)"
OPTIMIZER = "(optimizer)"


@dataclass(frozen=True)
class Kernel:
    """A kernel as one step executes it: a loop nest that reads tensors from memory and writes tensors to memory.

    Attributes:
        name: the compiler's name of it.
        library: whether it is a call of a library, and not code that the compiler generated.
        phase: `forward`, `backward`, `update`, or empty if unknown.
        layer: the class of the module that it belongs to, such as `Linear`; or one of the names above.
        read: the bytes of the tensors that it reads.
        written: the bytes of the tensors that it writes.
        intermediates: how many of the tensors that it writes are neither new state nor results of the step.
        intermediate_bytes: the bytes of these.
        times: how often a step executes it.
    """

    name: str
    library: bool
    phase: str
    layer: str
    read: int
    written: int
    intermediates: int
    intermediate_bytes: int
    times: int = 1


@dataclass(frozen=True)
class Totals:
    """Sums over kernels, as one step executes them.

    Attributes:
        generated: launches of kernels that the compiler generated.
        library: calls of a library.
        read: the bytes of tensors that they read.
        written: the bytes of tensors that they write.
        intermediates: tensors that they write and that are neither new state nor results.
        intermediate_bytes: the bytes of these.
    """

    generated: int
    library: int
    read: int
    written: int
    intermediates: int
    intermediate_bytes: int

    @property
    def count(self) -> int:
        """All kernels."""
        return self.generated + self.library

    @property
    def nbytes(self) -> int:
        """The bytes that are read and written."""
        return self.read + self.written


@dataclass(frozen=True)
class Compiled:
    """What one compiler made of a step.

    Attributes:
        peer: `irongrad`, `inductor` or `xla`.
        version: the version of its package.
        kernels: its kernels.
        flops: arithmetic operations of a step, by the compiler's own count.
        counted: what `flops` counts.
        peak_bytes: the most bytes of intermediate values and gradients that are in memory at a time: what IREE and XLA
            allocate for them, and what PyTorch's profiler sees allocated in one step.
        compile_seconds: the time to the end of the first step, with cold caches. IronGrad's and Inductor's begin with
            the Python step, and IronGrad's has the verification in it. XLA's begins with StableHLO.
        loss: the loss of the first step.
    """

    peer: str
    version: str
    kernels: tuple[Kernel, ...]
    flops: int
    counted: str
    peak_bytes: int
    compile_seconds: float
    loss: float

    @property
    def totals(self) -> Totals:
        """The sums over all kernels."""
        return totals_of(self.kernels)


def totals_of(kernels: Iterable[Kernel]) -> Totals:
    """The sums over `kernels`."""
    rows = list(kernels)
    return Totals(
        sum(k.times for k in rows if not k.library),
        sum(k.times for k in rows if k.library),
        sum(k.times * k.read for k in rows),
        sum(k.times * k.written for k in rows),
        sum(k.times * k.intermediates for k in rows),
        sum(k.times * k.intermediate_bytes for k in rows),
    )


def grouped(kernels: Iterable[Kernel], key: Callable[[Kernel], Key]) -> dict[Key, Totals]:
    """The sums over groups of `kernels`."""
    groups: dict[Key, list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault(key(kernel), []).append(kernel)
    return {name: totals_of(rows) for name, rows in groups.items()}
