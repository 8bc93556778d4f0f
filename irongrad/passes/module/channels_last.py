"""Write convolutions whose result is transposed so that they are channels-last.

IREE 3.13.0 sinks a transpose of a convolution's result through all elementwise code behind it. The code then computes
channels-first, and the last of it transposes: in a LeNet of 64 images, one ReLU took eight times as long as without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir
from iree.compiler.dialects import linalg

from irongrad.mlir.letters import is_zero
from irongrad.mlir.linalg import GENERIC
from irongrad.mlir.transposes import joined
from irongrad.mlir.walk import named_in
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModuleContext, ModulePass
from irongrad.targets import Ability

# The letters of the image's dimensions, of the weight's and of the result's, by operation.
_CONVOLUTIONS = {
    "linalg.conv_2d_nchw_fchw": ("ncyx", "fcij", "nfhw"),
    "linalg.conv_2d_ngchw_gfchw": ("ngcyx", "gfcij", "ngfhw"),
}

# The loops of a spatial dimension of the image: of the result, and of the weight.
_LOOPS = {"y": ("h", "i"), "x": ("w", "j")}
_SUMS = "cij"

_TO_CHANNELS_LAST = [0, 2, 3, 1]


@dataclass(frozen=True)
class ChannelsLast(ModulePass):
    """Have convolutions write their result channels-last where a transpose does so, for targets with kernels of ours.

    Before:
        %r = linalg.conv_2d_nchw_fchw ins(%x, %w) ...; %t = linalg.transpose ins(%r) permutation = [0, 2, 3, 1]
    After:
        %t = linalg.generic (n, c, h + i, w + j) (f, c, i, j) -> (n, h, w, f) ins(%x, %w) ...

    A transpose of an operand stays: IREE fuses it, and `convolution-kernels` reads its source.
    """

    name: ClassVar[str] = "channels-last"

    def applies(self, context: ModuleContext) -> bool:
        """For targets with kernels for convolutions, which write channels-last results."""
        return Ability.CONVOLUTIONS in context.target.abilities

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        turned = sum(_turn(operation) for operation in named_in(module, *_CONVOLUTIONS))
        return PassResult(turned > 0, {"turned": turned})


def _turn(operation: Any) -> bool:
    """Write a convolution channels-last; return whether its result is transposed so, and only read there."""
    first = reader = _only_reader(operation)
    if reader is not None and reader.name == "tensor.collapse_shape":
        reader = _only_reader(reader)
    if reader is None or reader.name != "linalg.transpose" or not is_zero(operation.operands[2]):
        return False
    if list(ir.DenseI64ArrayAttr(reader.attributes["permutation"])) != _TO_CHANNELS_LAST:
        return False
    with reader.location, ir.InsertionPoint(reader):
        result = _generic(operation)
        if first != reader:
            result = joined(result, 3)
    reader.results[0].replace_all_uses_with(result)
    for done in dict.fromkeys((reader, first, operation)):
        done.erase()
    return True


def _only_reader(operation: Any) -> Any | None:
    """The operation that reads a result, if there is only one."""
    readers = [use.owner.operation for use in operation.results[0].uses]
    return readers[0] if len(readers) == 1 else None


def _generic(operation: Any) -> Any:
    """A convolution as a `linalg.generic` with a channels-last result."""
    image, weight, result = _CONVOLUTIONS[operation.name]
    x, w, room = operation.operands
    sizes = dict(zip(result, room.type.shape, strict=True))
    last = "".join(letter for letter in "nhwgf" if letter in result)
    loops = last + _SUMS
    steps, apart = (
        [int(n) for n in ir.DenseIntElementsAttr(operation.attributes[a])] for a in ("strides", "dilations")
    )
    indices = {letter: ir.AffineExpr.get_dim(d) for d, letter in enumerate(loops)}
    for (letter, (of_result, of_weight)), step, by in zip(_LOOPS.items(), steps, apart, strict=True):
        indices[letter] = indices[of_result] * step + indices[of_weight] * by
    maps = [ir.AffineMap.get(len(loops), 0, [indices[x] for x in letters]) for letters in (image, weight, last)]
    element = room.type.element_type
    kind = ir.RankedTensorType.get([sizes[x] for x in last], element)
    zero = ir.Operation.create("arith.constant", [element], [], {"value": ir.FloatAttr.get(element, 0)}).result
    zeros = linalg.fill(zero, outs=[ir.Operation.create("tensor.empty", [kind]).result])
    kinds = ["reduction" if letter in _SUMS else "parallel" for letter in loops]
    attributes = {
        "indexing_maps": ir.ArrayAttr.get([ir.AffineMapAttr.get(m) for m in maps]),
        "iterator_types": ir.ArrayAttr.get([ir.Attribute.parse(f"#linalg.iterator_type<{k}>") for k in kinds]),
        "operandSegmentSizes": ir.DenseI32ArrayAttr.get([2, 1]),
    }
    generic = ir.Operation.create(GENERIC, [kind], [x, w, zeros], attributes, regions=1)
    body = generic.regions[0].blocks.append(x.type.element_type, w.type.element_type, element)
    with ir.InsertionPoint(body):
        one, other, total = body.arguments
        product = ir.Operation.create("arith.mulf", [element], [one, other]).result
        added = ir.Operation.create("arith.addf", [element], [total, product]).result
        ir.Operation.create("linalg.yield", operands=[added])
    return generic.result


PASS = ChannelsLast
