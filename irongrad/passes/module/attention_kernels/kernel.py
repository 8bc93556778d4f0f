"""The kernel of a region: a thread computes the scores of few rows in memory of its own, and reads them there.

The scores of all rows are never in memory at once, as in FlashAttention (T. Dao et al., 2022). Unlike there, a thread
has all columns of its rows at once, so a softmax is computed as it is written. A sum over rows, such as the gradient of
the keys, is added up from group to group of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from iree.compiler import ir

from irongrad.mlir.transposes import Lettered
from irongrad.passes.module.attention_kernels.region import Region
from irongrad.passes.module.attention_kernels.values import Reader

# The most bytes of scores that a thread holds on its stack, and the most rows of a group, about.
_STACK, _ROWS = 96 << 10, 16

# The fewest rows of a group: each reads all keys and all values.
_FEWEST_ROWS = 4

# The most columns that are computed at once if all are not needed, and what their number is a multiple of.
_NEAR, _UNIT = 512, 64

# The elements of a cache line.
_LINE = 16

# The fewest parts of a launch, so that several threads have some.
_PARTS = 4


@dataclass(frozen=True, eq=False)
class Operand:
    """An operand of a product in memory.

    Attributes:
        value: the tensor.
        strides: how far apart neighbours along a dimension are, by letter; absent for a dimension it does not have.
        block: the columns of a block, if it is divided into blocks of columns; else 0.
    """

    value: Any
    strides: dict[str, int]
    block: int = 0

    @classmethod
    def of(cls, operand: Lettered) -> Operand:
        """An operand as it is."""
        value, letters = operand
        return cls(value, strides_of(letters, value.type.shape))


def strides_of(letters: str, shape: Any) -> dict[str, int]:
    """How far apart neighbours along each dimension of a tensor are, by letter."""
    return {letter: math.prod(shape[i + 1 :]) for i, letter in enumerate(letters)}


@dataclass(frozen=True, eq=False)
class ScoresProduct:
    """A product that computes a matrix: of `left`, a row for each row of scores, and `right`, one for each column."""

    left: Operand
    right: Operand
    summands: int


@dataclass(frozen=True, eq=False)
class ReaderProduct:
    """A product that reads a matrix.

    Attributes:
        of: the product.
        other: its other operand.
        size: the size of the dimension that the matrix does not have.
    """

    of: Reader
    other: Operand
    size: int

    @property
    def letters(self) -> str:
        """The letters of what the kernel writes.

        A vector holds neighbours along the dimension that the matrix does not have. So they are transposed behind the
        kernel if the product has them apart, as in `v.T @ weights.T`.
        """
        return "brd" if self.of.result == "bdr" else self.of.result

    @property
    def shape(self) -> list[int]:
        """The sizes of what the kernel writes."""
        sizes = dict(zip(self.of.result, self.of.operation.results[0].type.shape, strict=True))
        return [sizes[letter] for letter in self.letters]


@dataclass(frozen=True, eq=False)
class AttentionKernel:
    """A region as a kernel.

    The columns of a row are visited several times. A visit ends with the reductions of its matrices. The next visit
    computes what needs them.

    Attributes:
        region: what is computed.
        products: the products that compute matrices, by matrix.
        readers: the products that read matrices.
        written: the numbers of rows that are read outside.
        hides: whether columns are left out; the kernel then reads how many columns of the first row count.
        width: the number of elements in a vector.
    """

    region: Region
    products: dict[Any, ScoresProduct]
    readers: tuple[ReaderProduct, ...]
    written: tuple[Any, ...]
    hides: bool
    width: int

    @cached_property
    def visits(self) -> dict[Any, int]:
        """The visit in which each matrix and each number is known; a reduction is known in the one after it."""
        found: dict[Any, int] = dict.fromkeys(self.products, 0)

        def visit(value: Any) -> int:
            if value not in found:
                inputs = [visit(v) for v in self.region.parents(value)]
                found[value] = max(inputs, default=0) + (value in self.reductions)
            return found[value]

        for value in (*self.region.matrices, *self.region.numbers):
            visit(value)
        return found

    @property
    def last_visit(self) -> int:
        """The number of the last visit in which anything is computed."""
        return max(self.visits[v] for v in self.region.all_matrices)

    @cached_property
    def last_use(self) -> dict[Any, int]:
        """The last visit that reads each matrix; one more than the last for what a product reads."""
        found = {m: self.visits[m] for m in self.region.all_matrices}
        for value in (*self.region.matrices, *self.region.numbers):
            when = self.visits[value] - (value in self.reductions)
            for matrix in self.region.parents(value):
                if matrix in found:
                    found[matrix] = max(found[matrix], when)
        return found | {r.of.scores: self.last_visit + 1 for r in self.readers}

    @cached_property
    def buffers(self) -> dict[Any, int]:
        """The number of the memory of each matrix that a visit stores: of products, and what is read later.

        A matrix may take the memory of one that is read in the same visit: a vector is stored after all are computed.
        """
        kept = [m for m in self.visits if m in self.products]
        later = [m for m in self.region.matrices if self.last_use[m] > self.visits[m]]
        found: dict[Any, int] = {}
        for matrix in [*kept, *sorted(later, key=self.visits.__getitem__)]:
            when = -1 if matrix in self.products else self.visits[matrix]
            taken = {found[m] for m in found if self.last_use[m] > when}
            found[matrix] = next(i for i in range(len(found) + 1) if i not in taken)
        return found

    def is_stored(self, matrix: Any, visit: int) -> bool:
        """Whether a matrix is in memory before a visit."""
        return matrix in self.buffers and (matrix in self.products or self.visits[matrix] < visit)

    @cached_property
    def reductions(self) -> list[Any]:
        """The reductions."""
        return list(self.region.reductions)

    @property
    def block(self) -> int:
        """The columns that are computed at once: all, if they are reduced; else so few that a core has them near."""
        columns = self.region.sizes.columns
        fitting = [n for n in range(_UNIT, _NEAR + 1, _UNIT) if columns % n == 0]
        return max(fitting, default=columns) if columns > _NEAR and not self.reductions else columns

    @property
    def stride(self) -> int:
        """How far apart rows of scores are in memory: not a power of two, or they would evict each other."""
        return -(-self.block // _LINE) * _LINE + _LINE

    @property
    def group(self) -> tuple[int, int, int]:
        """The rows of a group, how many groups there are, and how many of them, the first ones, have one more row."""
        of_row = 4 * self.stride * (1 + max(self.buffers.values()))
        most = min(_ROWS, _STACK // of_row)
        groups = -(-self.region.sizes.rows // max(most, 1))
        rows, larger = divmod(self.region.sizes.rows, groups)
        return rows, groups, larger

    @property
    def is_possible(self) -> bool:
        """Whether a thread holds enough rows, and to keep scores from memory saves more than to compute them twice."""
        rows, _, _ = self.group
        largest = max([p.summands for p in self.products.values()] + [r.size for r in self.readers])
        return rows >= _FEWEST_ROWS and self.region.sizes.columns > largest

    @property
    def sums_rows(self) -> bool:
        """Whether anything is added over rows."""
        return any(r.of.sums_rows for r in self.readers)

    @property
    def parts(self) -> int:
        """Into how many parts the groups of a matrix are divided; a thread computes one at a time. None is empty."""
        _, groups, _ = self.group
        return -(-groups // self.groups_of_part)

    @property
    def groups_of_part(self) -> int:
        """The most groups of a part: one, unless something is added over rows. Any number of matrices is enough."""
        _, groups, _ = self.group
        return -(-groups // -(-_PARTS // (self.region.sizes.batch or _PARTS))) if self.sums_rows else 1

    @cached_property
    def read(self) -> list[Any]:
        """The tensors that the kernel reads."""
        return list(dict.fromkeys([*(o.value for o in self.operands), *self.region.given]))

    @property
    def operands(self) -> list[Operand]:
        """What the products read besides matrices."""
        of_products = [side for p in self.products.values() for side in (p.left, p.right)]
        return [*of_products, *(r.other for r in self.readers)]

    @property
    def made(self) -> list[ir.Type]:
        """The types of what the kernel writes: for each reader its result, then the numbers of rows.

        What is added over rows comes in parts.
        """
        kinds = []
        for reader in self.readers:
            element = reader.of.operation.results[0].type.element_type
            parts = [self.parts] if reader.of.sums_rows and self.parts > 1 else []
            kinds.append(ir.RankedTensorType.get([*parts, *reader.shape], element))
        return [*kinds, *(n.type for n in self.written)]

    @property
    def operations(self) -> int | None:
        """The arithmetic operations of the products; None for any number of matrices."""
        if self.region.sizes.batch is None:
            return None
        sizes = [p.summands for p in self.products.values()] + [r.size for r in self.readers]
        scores = self.region.sizes.batch * self.region.sizes.rows * self.region.sizes.columns
        return 2 * scores * sum(sizes)
