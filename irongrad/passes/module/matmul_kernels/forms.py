"""The forms in which a product can be computed: register tile, layout of the right operand, and size of a part.

`--tune` measures each form that differs from the default in one of these, and IREE's own kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from irongrad.memory_model.product_tiles import Tile, tile_for
from irongrad.passes.module.matmul_kernels.tiling import MOST

# The name of the form without a kernel of ours.
OF_IREE = "IREE"

# Other bounds of a part: its most rows and columns of the result.
_OTHER_PARTS = ((256, 384), (1024, 1536))


class Layout(StrEnum):
    """Where a kernel reads the right operand of a product."""

    IN_PLACE = "in place"  # or in a copy with its columns as neighbours, if they are not
    IN_BLOCKS = "in blocks"  # of columns, which another kernel writes before
    COPIED = "copied by the kernel"


@dataclass(frozen=True)
class ProductForm:
    """How a kernel of ours computes a product.

    Attributes:
        tile: the results that registers hold.
        layout: where the kernel reads the right operand.
        most: the most rows and columns of the result in one part, the unit of work of a thread.
    """

    tile: Tile
    layout: Layout
    most: tuple[int, int] = MOST

    @property
    def name(self) -> str:
        """The form as users read it, such as `6x64 in blocks`."""
        part = "" if self.most == MOST else f" parts of {self.most[0]}x{self.most[1]}"
        return f"{self.tile.rows}x{self.tile.columns} {self.layout}{part}"


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

    def layouts(self, tile: Tile) -> list[Layout]:
        """Where a kernel can read the right operand; it copies no operand of bfloat16, which it multiplies in place.

        Blocks are of whole vectors of columns. Where summands are neighbours, a kernel transposes squares that cover
        the reduction dimension.
        """
        sizes, columns_last = dict(self.sizes), self.right.endswith("c")
        if self.dtype != "f32":
            return [Layout.IN_PLACE]
        found = [Layout.IN_PLACE] if columns_last else []
        if sizes["c"] % tile.width == 0:
            found.append(Layout.IN_BLOCKS)
        if columns_last or (self.right.endswith("k") and sizes["k"] % tile.width == 0):
            found.append(Layout.COPIED)
        return found

    def forms(self, default: ProductForm, tiles: Sequence[Tile]) -> Mapping[str, ProductForm | None]:
        """The default form, and those that differ from it in one respect, by name; None stands for IREE's own kernel.

        Args:
            default: the form that is taken without a measurement.
            tiles: the tiles of the CPU for this element type.
        """
        sizes = dict(self.sizes)
        others = [tile for tile in tiles if tile != default.tile and tile_for(sizes, [tile])]
        forms = [default, *(replace(default, tile=tile) for tile in others)]
        forms += [replace(default, layout=x) for x in self.layouts(default.tile) if x is not default.layout]
        for rows, columns in _OTHER_PARTS:
            bound = min(rows, MOST[0]), min(columns, MOST[1])
            if sizes["r"] > bound[0] or sizes["c"] > bound[1]:
                forms.append(replace(default, most=(rows, columns)))
        return {**{form.name: form for form in forms}, OF_IREE: None}

    def form(self, name: str, default: ProductForm, tiles: Sequence[Tile]) -> ProductForm | None:
        """The form of that name; None for IREE's own kernel.

        It may differ from the default here in several respects: equal products in a loop and outside have other ones.

        Raises:
            KeyError: there is none.
        """
        layouts = {tile: [default.layout, *self.layouts(tile)] for tile in tiles}
        found = (ProductForm(t, x, most) for t in tiles for x in layouts[t] for most in (MOST, *_OTHER_PARTS))
        return {**{form.name: form for form in found}, OF_IREE: None}[name]
