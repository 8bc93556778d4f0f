"""The forms in which a product can be computed: register tile, layout of the right operand, and size of a part.

`--tune` measures each form that differs from the default in one of these, and IREE's own kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from irongrad.memory_model.product_tiles import Tile, tile_for
from irongrad.passes.module.matmul_kernels.tiling import MOST

# The name of the form without a kernel of ours.
OF_IREE = "IREE"

# Other bounds of a part: its most rows and columns of the result.
_OTHER_PARTS = ((256, 384), (1024, 1536))


@dataclass(frozen=True)
class ProductForm:
    """How a kernel of ours computes a product.

    Attributes:
        tile: the results that registers hold.
        in_blocks: whether the right operand is packed into column blocks; otherwise it is read in place.
        most: the most rows and columns of the result in one part, the unit of work of a thread.
    """

    tile: Tile
    in_blocks: bool
    most: tuple[int, int] = MOST

    @property
    def name(self) -> str:
        """The form as users read it, such as `6x64 in blocks`."""
        part = "" if self.most == MOST else f" parts of {self.most[0]}x{self.most[1]}"
        return f"{self.tile.rows}x{self.tile.columns} {'in blocks' if self.in_blocks else 'in place'}{part}"


@dataclass(frozen=True)
class ProductProblem:
    """A product, whatever computes it; equal problems have the same fastest form.

    Attributes:
        sizes: the letter and size of each dimension: `b` is the batch, `r` the rows, `c` the columns, `k` is summed.
        left: the letters of the left operand's dimensions, in memory order.
        right: those of the right operand.
        dtype: the operands' element type, as MLIR writes it.
    """

    sizes: tuple[tuple[str, int], ...]
    left: str
    right: str
    dtype: str

    def __str__(self) -> str:
        sizes = dict(self.sizes)
        left, right = ("x".join(str(sizes[x]) for x in letters) for letters in (self.left, self.right))
        return f"product {self.left} {left}, {self.right} {right}, {self.dtype}"

    @property
    def multiplications(self) -> int:
        """The number of multiplications in the whole batch."""
        return math.prod(size for _, size in self.sizes)

    def forms(self, default: ProductForm, tiles: Sequence[Tile]) -> Mapping[str, ProductForm | None]:
        """The default form, and those that differ from it in one respect, by name; None stands for IREE's own kernel.

        Args:
            default: the form that is taken without a measurement.
            tiles: the tiles of the CPU for this element type.
        """
        sizes = dict(self.sizes)
        others = [tile for tile in tiles if tile != default.tile and tile_for(sizes, [tile])]
        forms = [default, *(replace(default, tile=tile) for tile in others)]
        if self.right.endswith("c") and self.dtype == "f32" and sizes["c"] % default.tile.width == 0:
            forms.append(replace(default, in_blocks=not default.in_blocks))
        for rows, columns in _OTHER_PARTS:
            bound = min(rows, MOST[0]), min(columns, MOST[1])
            if sizes["r"] > bound[0] or sizes["c"] > bound[1]:
                forms.append(replace(default, most=(rows, columns)))
        return {**{form.name: form for form in forms}, OF_IREE: None}
