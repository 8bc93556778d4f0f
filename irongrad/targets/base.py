"""A target as data, and the syntax `NAME:option=value,option=value` in which the command line names one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Products of matrices on operands that are packed for them.
DATA_TILING = "--iree-opt-data-tiling"


@dataclass(frozen=True)
class Quirk:
    """A fault of the toolchain that a target is compiled around.

    Attributes:
        versions: what has it.
        symptom: what it does.
        remedy: what is done here.
        test: the test that fails once it is gone.
    """

    versions: str
    symptom: str
    remedy: str
    test: str


@dataclass(frozen=True)
class Requirement:
    """What a device must say of itself, checked by the module when it is loaded.

    Attributes:
        category: of IREE's device queries, such as `vulkan.device`.
        key: the query's key.
        value: the 32-bit integer that the device must answer, or the least where `at_least`.
        message: what is said otherwise, as the end of "this module …".
        at_least: whether more will do.
    """

    category: str
    key: str
    value: int
    message: str
    at_least: bool = False


@dataclass(frozen=True)
class Target:
    """What to compile for.

    Attributes:
        name: names the .vmfb: what was asked for without the options' names, such as `vulkan-lavapipe`.
        backend: IREE's, such as `llvm-cpu`.
        device: the IREE device that runs it.
        largest_freed: up to how many bytes a device keeps memory that a call frees for the next; None for any number.
        serial_device: the one that runs programs whose kernels are too short to share among threads; empty where there
            is no other.
        flags: for iree-compile.
        scalars_on_host: whether float64 scalars are computed by IREE's virtual machine, not by the device.
        float64: whether the device computes in float64.
        integers64: whether the device computes in 64-bit integers.
        subgroup: how many lanes of the device the code takes to run in step; 0 where it does not matter.
        requirements: what the module checks when it is loaded.
        shared_kernels: whether kernels that differ only in where they read and write are one, which compiles faster.
            Where code for known places is the better one, they are not.
        joined_executables: whether kernels share executables, which compiles faster. Where an executable is a shader of
            its own, they do not.
        state_in_place: whether new state is written where the old one lies: a kernel then reads and writes the same
            memory by two names, element by element.
        alignment: of which number of bytes the places of intermediate values in one allocation have to be multiples.
            By default the largest that Vulkan lets a device ask for (`minStorageBufferOffsetAlignment`).
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


@dataclass(frozen=True)
class Option:
    """An option of a kind of target.

    Attributes:
        name: its name.
        summary: what it chooses.
        values: the ones there are; empty where the compiler knows many.
    """

    name: str
    summary: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kind:
    """A kind of target, such as `vulkan`.

    Attributes:
        name: its name in `--target`.
        summary: what it is, in a sentence.
        options: what can be chosen.
        make: makes a target of a name and the chosen options.
        quirks: what it is compiled around.
    """

    name: str
    summary: str
    options: tuple[Option, ...]
    make: Callable[[str, dict[str, str]], Target]
    quirks: tuple[Quirk, ...] = ()
