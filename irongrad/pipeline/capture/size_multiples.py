"""Dimensions that are multiples of a number: declared by the user, or needed by the model.

torch.export gets each such size as the number times a symbol. A view that splits the dimension then has symbols as
sizes. Otherwise its sizes would be quotients, about which PyTorch can prove nothing.
"""

from __future__ import annotations

import math

from torch.export import ExportedProgram

from irongrad.runtime.errors import CaptureError
from irongrad.sizes.dimensions import derived_of, dims_of, multiples_of, names_in_program, symbolic_inputs
from irongrad.sizes.limits import multiple_of
from irongrad.step.train_step import TrainStep, sizes_of


def declared_multiples(step: TrainStep) -> dict[str, int]:
    """Find dimensions that `step.constraints` declare to be multiples of a number.

    A dimension counts if its size in the example is at least twice that number. Otherwise its symbol would be 1 in the
    example, and torch.export treats a size of 1 as fixed.

    Returns:
        The number for each such dimension, by name.
    """
    sizes, found = sizes_of(step, step.inputs), dict[str, int]()
    for size, multiple in filter(None, map(multiple_of, step.conditions)):
        if size.is_Symbol:
            found[size.name] = math.lcm(multiple, found.get(size.name, 1))
    return {name: multiple for name, multiple in found.items() if sizes[name] >= 2 * multiple}


def needed_multiples(train: ExportedProgram, step: TrainStep) -> dict[str, int]:
    """Find dimensions that are plain symbols in `train`, but that the program needs to be multiples of a number.

    Returns:
        The number for each such dimension, by name.

    Raises:
        CaptureError: the size in the example is less than twice that number.
    """
    if not step.dynamic:
        return {}
    sizes, names = sizes_of(step, step.inputs), names_in_program(train, step.inputs, step.dynamic)
    derived = derived_of(symbolic_inputs(train), dims_of(step.inputs, step.dynamic), names)
    own = {name: size for name, size in sizes.items() if name not in derived}
    found = multiples_of(train, names, own)
    for name, multiple in found.items():
        if sizes[name] < 2 * multiple:
            raise CaptureError(
                f"dimension {name!r} has to be a multiple of {multiple} for this model, and is {sizes[name]} in the "
                f"example inputs. Give an example where it is {2 * multiple} or more: torch.export treats "
                f"{multiple} as a fixed size"
            )
    return found
