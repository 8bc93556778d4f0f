"""Parts of a module that one kernel computes: matrices of scores, from the products that make them to all readers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from irongrad.mlir.letters import dimensions_in
from irongrad.mlir.linalg import inputs_of, producer_of, readers_of, source_of
from irongrad.mlir.walk import block_of, inside
from irongrad.passes.module.attention_kernels.values import (
    Reader,
    Reduction,
    Scores,
    Sizes,
    is_plain,
    matrix_of,
    numbers_of,
    readers_in,
    reduction_of,
    scores_of,
    sizes_of,
)

# The dialects whose operations may change places: they compute tensors, and do nothing else.
_PURE = ("arith.", "math.", "linalg.", "tensor.", "iree_tensor_ext.compute_barrier.")

# The most operations between the first and the last of a region.
_NEARBY = 256

# The types of the elements of matrices, and of numbers of rows.
_ELEMENTS = frozenset({"f32", "bf16", "i1"})


@dataclass(frozen=True, eq=False)
class Input:
    """An input of an operation that a kernel computes.

    Attributes:
        value: the tensor.
        loops: for each dimension of the tensor, the loop of the operation that runs over it.
        inside: the matrix or the numbers that the kernel computes; None if the tensor comes from outside.
    """

    value: Any
    loops: Sequence[int]
    inside: Any | None


@dataclass(eq=False)
class Region:
    """What one kernel computes.

    The backward pass computes the scores of the forward pass again. So both may have the same matrices.

    Attributes:
        sizes: the sizes of the matrices.
        products: the products whose results are matrices of scores, by matrix.
        matrices: the inputs of the other matrices, each computed elementwise.
        numbers: the inputs of what is computed for each row: elementwise, or as a reduction of a matrix.
        reductions: those of the numbers that are reductions.
        readers: the products that read matrices.
    """

    sizes: Sizes
    products: dict[Any, Scores] = field(default_factory=dict)
    matrices: dict[Any, list[Input]] = field(default_factory=dict)
    numbers: dict[Any, list[Input]] = field(default_factory=dict)
    reductions: dict[Any, Reduction] = field(default_factory=dict)
    readers: list[Reader] = field(default_factory=list)

    @property
    def all_matrices(self) -> set[Any]:
        """All matrices."""
        return {*self.products, *self.matrices}

    @property
    def operations(self) -> list[Any]:
        """The operations that compute the matrices, the numbers and the results."""
        values = (*self.products, *self.matrices, *self.numbers)
        of_parts = [op for r in self.reductions.values() for op in r.operations[:-1]]
        return [*(v.owner.operation for v in values), *of_parts, *(r.operation for r in self.readers)]

    @property
    def given(self) -> list[Any]:
        """The values from outside that are read, except operands of products; each once."""
        inputs = [i for found in (*self.matrices.values(), *self.numbers.values()) for i in found]
        return list(dict.fromkeys(i.value for i in inputs if i.inside is None))

    @property
    def operands(self) -> list[Any]:
        """The values from outside that products read."""
        of_products = [side[0] for s in self.products.values() for side in (s.left, s.right)]
        return [*of_products, *(r.other[0] for r in self.readers)]

    @property
    def read(self) -> list[Any]:
        """All values from outside."""
        return [*self.operands, *self.given]

    def inputs(self, value: Any) -> list[Input]:
        """The inputs of a matrix or of numbers; none for the result of a product."""
        return self.matrices.get(value, self.numbers.get(value, []))

    def parents(self, value: Any) -> list[Any]:
        """The matrices and numbers of the kernel from which `value` is computed."""
        return [i.inside for i in self.inputs(value) if i.inside is not None]

    def written(self, regions: Sequence[Region]) -> tuple[Any, ...]:
        """The numbers that other kernels read, or operations that no kernel computes."""
        inside_any = {op for region in regions for op in region.operations}
        given = {numbers_of(v) for region in regions if region is not self for v in region.given}
        return tuple(n for n in self.numbers if n in given or any(r not in inside_any for r in readers_of(n)))

    def add(self, other: Region) -> None:
        """Take what `other` has, too."""
        self.products |= other.products
        self.matrices |= other.matrices
        self.numbers |= other.numbers
        self.reductions |= other.reductions
        self.readers += other.readers


@dataclass(frozen=True)
class _Search:
    """Finds what a matrix is computed from.

    Attributes:
        region: what is found.
        known: numbers that another kernel has computed before.
        block: the block whose operations a kernel computes; what is from outside of a loop comes from outside of it.
    """

    region: Region
    known: frozenset[Any]
    block: Any

    def matrix(self, value: Any) -> Any | None:
        """Take a matrix and what it is computed from; None if it comes from outside."""
        matrix = matrix_of(value)
        if matrix in self.region.all_matrices:
            return matrix
        of_sizes = len(matrix.type.shape) > 2 and sizes_of(matrix) == self.region.sizes
        if not of_sizes or block_of(matrix) != self.block:
            return None
        if (scores := scores_of(matrix)) is not None:
            self.region.products[matrix] = scores
        elif _is_computed(matrix):
            self.region.matrices[matrix] = list(self._inputs(matrix, is_matrix=True))
        return matrix if matrix in self.region.all_matrices else None

    def number(self, value: Any) -> Any | None:
        """Take a number of each row and what it is computed from; None if it comes from outside."""
        number = numbers_of(value)
        if number in self.region.numbers:
            return number
        if number in self.known or producer_of(number) is None or block_of(number) != self.block:
            return None
        reduction = reduction_of(number.owner.operation)
        if reduction is not None and (matrix := self.matrix(reduction.matrix)) is not None:
            self.region.numbers[number] = [Input(reduction.matrix, range(len(matrix.type.shape)), matrix)]
            self.region.reductions[number] = reduction
        elif _is_computed(number):
            inputs = list(self._inputs(number, is_matrix=False))
            if any(i.inside is not None for i in inputs):
                self.region.numbers[number] = inputs
        return number if number in self.region.numbers else None

    def _inputs(self, value: Any, *, is_matrix: bool) -> Iterator[Input]:
        rank = len(value.type.shape)
        maps = value.owner.attributes["indexing_maps"]
        for given, indexing in zip(inputs_of(value.owner), maps, strict=False):
            loops = dimensions_in(indexing.value)
            found = None
            if is_matrix and loops == list(range(rank)):
                found = self.matrix(given)
            elif loops == list(range(rank - is_matrix)):
                found = self.number(given)
            yield Input(given, loops, found)


def _is_computed(value: Any) -> bool:
    """Whether a kernel can compute a value elementwise."""
    known = producer_of(value) is not None and is_plain(value.owner.operation)
    return known and str(value.type.element_type) in _ELEMENTS


def regions_in(block: Any, places: dict[Any, int]) -> list[Region]:
    """The regions of a block, in the order of their first readers. A matrix may be read by something else."""
    found: list[Region] = []
    for operation in places:
        for reader in readers_in(operation):
            if (region := _region_of(reader, found)) is None:
                continue
            for before in reversed(found):
                if not before.all_matrices & region.all_matrices:
                    continue
                apart = _region_of(reader, [r for r in found if r is not before])
                if apart is not None and _joins(before, apart, places):
                    before.add(apart)
                    break
            else:
                found.append(region)
            break
    return found


def _region_of(reader: Reader, before: Sequence[Region]) -> Region | None:
    """What a reader's matrix is computed from; None if it is no softmax of a product, or the gradient of one."""
    if len(reader.scores.type.shape) < 3:
        return None
    known = frozenset(n for region in before for n in region.numbers)
    region = Region(sizes_of(reader.scores), readers=[reader])
    search = _Search(region, known, reader.operation.block)
    if search.matrix(reader.scores) is None or not region.products:
        return None
    for matrix in region.all_matrices:
        for number in _reductions_of(matrix):
            search.number(number)
    return region if region.reductions or any(map(_is_exponential, region.matrices)) else None


def _is_exponential(matrix: Any) -> bool:
    return any(op.operation.name == "math.exp" for op in matrix.owner.regions[0].blocks[0])


def _reductions_of(matrix: Any) -> Iterator[Any]:
    """The reductions of the rows of a matrix, such as a sum by which a result is divided later."""
    for reader in readers_of(matrix):
        for operation in (reader, *(use.owner.operation for r in reader.results for use in r.uses)):
            reduction = reduction_of(operation)
            if reduction is not None and matrix_of(reduction.matrix) == matrix:
                yield operation.results[0]


def _joins(before: Region, region: Region, places: dict[Any, int]) -> bool:
    """Whether one kernel can compute two regions: neither needs a result of the other."""
    both = Region(before.sizes)
    both.add(before)
    both.add(region)
    late = late_readers(both, places)
    read = {v.owner.operation for v in both.read if producer_of(v) is not None}
    return late is not None and not read & {*late, *both.operations}


def late_readers(region: Region, places: dict[Any, int]) -> list[Any] | None:
    """The operations that need a result of a region, and come before its last operation, in their order.

    None if one of them has to stay where it is, if the region itself needs one, or if there are too many to look at.
    """
    operations = set(region.operations)
    results = {r.operation for r in region.readers}
    numbers = {n.owner.operation for n in region.numbers}
    first, last = _span(region, places)
    if last - first > _NEARBY:
        return None
    late: list[Any] = []
    for operation in [op for op, place in places.items() if first < place < last]:
        used = [*operation.operands, *(v for op in inside(operation) for v in op.operands)]
        owners = {v.owner.operation for v in used if producer_of(v) is not None}
        is_inside = operation in operations
        if not owners & (results | {*late} | (set() if is_inside else numbers)):
            continue
        if is_inside or not operation.name.startswith(_PURE):
            return None
        late.append(operation)
    return late


def without_overlaps(regions: Sequence[Region], places: dict[Any, int]) -> list[Region]:
    """The regions whose launch changes the order of no other region's operations."""
    spans = {region: _span(region, places) for region in regions}

    def overlaps(region: Region) -> bool:
        first, last = spans[region]
        return any(f <= last and first <= end for other, (f, end) in spans.items() if other is not region)

    return [region for region in regions if not overlaps(region)]


def _span(region: Region, places: dict[Any, int]) -> tuple[int, int]:
    """The places of the first result of a region, and of its last operation."""
    results = [r.operation for r in region.readers] + [n.owner.operation for n in region.numbers]
    return min(places[op] for op in results), max(places[op] for op in region.operations)


def without_leaks(regions: Sequence[Region], unused: Collection[Any]) -> list[Region]:
    """The regions all of whose matrices are read by nothing else than regions, and by operations that are `unused`.

    A region may also read a matrix as something from outside, as `w @ w.T` does of the weights `w`.
    """
    kept = list(regions)
    while True:
        inside_any = {*unused, *(op for region in kept for op in region.operations)}
        from_outside = {source_of(value) for region in kept for value in region.read}
        leaks = {
            matrix
            for region in kept
            for matrix in region.all_matrices
            if matrix in from_outside or any(reader not in inside_any for reader in readers_of(matrix))
        }
        if not leaks:
            return kept
        kept = [region for region in kept if not leaks & region.all_matrices]
