"""Hide products that are only added up, where IREE would take the sum for a contraction.

IREE 3.13.0 writes a sum of products as `vector.contract`, whatever it reads (the option `generate-contract` of its pass
iree-codegen-generic-vectorization). The code of a contraction is for operands that are read many times. A variance
reads each number once. Its sum of squares took three to ten times as long as the sum of the numbers alone.

The sign of a product, copied to itself, keeps the product as it is and IREE from seeing it. LLVM drops the copy.
tests/passes/module/test_hide_products.py tells when IREE does without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.device import cpu_of
from irongrad.mlir.linalg import GENERIC, inputs_of, producer_of
from irongrad.mlir.walk import inside
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

# Elements whose sign IREE copies without widening them.
_TYPES = ("f32", "f64")

# What a contraction does for each product of its operands, which may be integers. IREE packs these before this pass
# runs, and cannot compile the sum if it is none any more: "failed to legalize operation 'linalg.generic'".
_CONTRACTS = {"arith.extf", "arith.sitofp", "arith.uitofp", "arith.mulf", "arith.addf", "linalg.yield"}


@dataclass(frozen=True)
class HideProducts(ModulePass):
    """Keep IREE from taking sums of products for contractions where it reads each number once, on x86-64.

    Before:
        %square = arith.mulf %in, %in; %next = arith.addf %square, %sum; linalg.yield %next
    After:
        %square = arith.mulf %in, %in; %same = math.copysign %square, %square; %next = arith.addf %same, %sum; ...

    Left alone: contractions, whose operands are read in several loops, and sums of half precision.
    """

    name: ClassVar[str] = "hide-products"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        if cpu_of(module)[0] != "x86_64":
            return PassResult(False)
        kernels = [op for op in inside(module.operation) if op.name == "func.func"]
        products = [found for kernel in kernels for op in inside(kernel) if (found := _added_product(op)) is not None]
        for product, add in products:
            with add.location, ir.InsertionPoint(add):
                same = ir.Operation.create("math.copysign", [product.type], [product, product]).result
            place = list(add.operands).index(product)
            add.operands[place] = same
        return PassResult(bool(products), {"products": len(products)})


def _added_product(operation: Any) -> tuple[Any, Any] | None:
    """The product that a reduction adds up, and its addition; None if there is none, or in a contraction."""
    if operation.name != GENERIC or not any("reduction" in str(x) for x in operation.attributes["iterator_types"]):
        return None
    maps = [m.value for m in operation.attributes["indexing_maps"]][: len(inputs_of(operation))]
    body = [op.operation for op in operation.regions[0].blocks[0]]
    whole = [m for m in maps if m.is_permutation]
    contracts = {op.name for op in body} <= _CONTRACTS and [op.name for op in body].count("arith.mulf") == 1
    if not whole or (contracts and len(whole) < len(maps)):
        return None
    if len(body) < 2:
        return None
    add, last = body[-2:]
    if add.name != "arith.addf" or list(last.operands) != list(add.results):
        return None
    products = [value for value in add.operands if producer_of(value) == "arith.mulf"]
    return (products[0], add) if len(products) == 1 and str(add.results[0].type) in _TYPES else None


PASS = HideProducts
