"""Dimensions that are multiples of a number, as a user says or as a model needs it.

torch.export is told so: such a size is that number times a symbol. Then a view that splits it has symbols for sizes,
and not quotients, of which nothing is known.
"""

from __future__ import annotations

import math

from torch.export import ExportedProgram

from irongrad.runtime.errors import CaptureError
from irongrad.sizes.dimensions import derived_of, dims_of, multiples_of, names_in_program, symbolic_inputs
from irongrad.sizes.limits import multiple_of
from irongrad.step.train_step import TrainStep, sizes_of


def declared_multiples(step: TrainStep) -> dict[str, int]:
    """Dimensions that `step.constraints` say to be multiples of a number, where the example is of two of these or more.

    torch.export takes a size of 1 for a fixed one.
    """
    sizes, found = sizes_of(step, step.inputs), dict[str, int]()
    for size, multiple in filter(None, map(multiple_of, step.conditions)):
        if size.is_Symbol:
            found[size.name] = math.lcm(multiple, found.get(size.name, 1))
    return {name: multiple for name, multiple in found.items() if sizes[name] >= 2 * multiple}


def needed_multiples(train: ExportedProgram, step: TrainStep) -> dict[str, int]:
    """Dimensions that the program needs to be multiples of a number, and that are symbols so far.

    Raises:
        CaptureError: the example is of one of these only.
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
                f"example inputs. Give an example where it is {2 * multiple} or more: torch.export takes {multiple} "
                "for a fixed size"
            )
    return found
