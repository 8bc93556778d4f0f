"""A target as data, and the syntax `NAME:option=value,option=value` in which the command line names one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

# Packs the operands of matrix products.
DATA_TILING = "--iree-opt-data-tiling"


@dataclass(frozen=True)
class Quirk:
    """A fault of the toolchain that a target works around.

    Attributes:
        versions: the versions that have the fault.
        symptom: what goes wrong.
        remedy: how the target avoids it.
        test: the test that fails when the fault is gone.
    """

    versions: str
    symptom: str
    remedy: str
    test: str


@dataclass(frozen=True)
class Requirement:
    """A property of the device that the module checks when it is loaded.

    Attributes:
        category: the category of IREE's device query, such as `vulkan.device`.
        key: the query's key.
        value: the 32-bit integer that the device must answer, or the smallest one if `at_least`.
        message: the error message otherwise, as the end of "this module …".
        at_least: whether larger answers are accepted too.
    """

    category: str
    key: str
    value: int
    message: str
    at_least: bool = False


class Ability(StrEnum):
    """What code for a target does faster than elsewhere.

    Attributes:
        HALVES: a product of bfloat16 takes little more than half the time of one of float32, or less.
        TILES: products of bfloat16 are computed in tile registers, in a sixth of the time of products of float32.
        CONVOLUTIONS: there are kernels of ours for convolutions.
        ATTENTION: there are kernels of ours for attention, which do not write scores to memory.
        LOOPS: there are kernels of ours for loops over time steps.
    """

    HALVES = "halves"
    TILES = "tiles"
    CONVOLUTIONS = "convolutions"
    ATTENTION = "attention"
    LOOPS = "loops"


@dataclass(frozen=True)
class Target:
    """What to compile for.

    Attributes:
        name: part of the .vmfb's name: the requested target without the options' names, such as `vulkan-lavapipe`.
        backend: IREE's backend, such as `llvm-cpu`.
        device: the IREE device that runs it.
        largest_freed: the largest block in bytes that a device keeps for the next call after it is freed; None for no
            limit.
        serial_device: the device without threads, for programs whose kernels are too short to share among threads;
            empty if there is none.
        flags: the flags of iree-compile.
        scalars_on_host: whether IREE's virtual machine computes float64 scalars, not the device.
        float64: whether the device computes in float64.
        integers64: whether the device computes in 64-bit integers.
        subgroup: the subgroup size that the code relies on, in lanes; 0 if it relies on none.
        requirements: the device properties that the module checks when it is loaded.
        shared_kernels: whether kernels that differ only in the locations they read and write become one kernel, which
            compiles faster. False if code for known locations is better.
        joined_executables: whether several kernels share an executable, which compiles faster. False if each executable
            is a shader of its own.
        state_in_place: whether new state overwrites the old state. A kernel then reads and writes the same memory under
            two names, element by element.
        alignment: the alignment in bytes of intermediate values within one allocation. The default is the largest
            alignment that Vulkan lets a device require (`minStorageBufferOffsetAlignment`).
        disabled_passes: the names of the module passes that do not run for this target.
        abilities: what code for it does faster than elsewhere.
        forms: descriptions of computations, each with the name of the form that was chosen for it by measurement.
    """

    name: str
    backend: str
    device: str
    flags: tuple[str, ...]
    scalars_on_host: bool = False
    float64: bool = True
    integers64: bool = True
    subgroup: int = 0
    requirements: tuple[Requirement, ...] = ()
    shared_kernels: bool = False
    joined_executables: bool = False
    state_in_place: bool = False
    alignment: int = 256
    serial_device: str = ""
    largest_freed: int | None = None
    disabled_passes: tuple[str, ...] = ()
    abilities: frozenset[Ability] = frozenset()
    forms: tuple[tuple[str, str], ...] = ()


def common_abilities(targets: Iterable[Target]) -> frozenset[Ability]:
    """What code for all of `targets`, of which there is at least one, does faster than elsewhere."""
    return frozenset.intersection(*(target.abilities for target in targets))


@dataclass(frozen=True)
class Option:
    """An option of a kind of target.

    Attributes:
        name: its name.
        summary: what it chooses.
        values: the values that it takes; empty if the compiler knows many.
    """

    name: str
    summary: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kind:
    """A kind of target, such as `vulkan`.

    Attributes:
        name: its name in `--target`.
        summary: one sentence about it.
        options: its options.
        make: makes a target from its name and the chosen options.
        quirks: the faults of the toolchain that its targets work around.
    """

    name: str
    summary: str
    options: tuple[Option, ...]
    make: Callable[[str, dict[str, str]], Target]
    quirks: tuple[Quirk, ...] = ()
