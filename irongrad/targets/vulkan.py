"""vulkan: SPIR-V for any GPU with Vulkan 1.3, and for Mesa's lavapipe, which is a Vulkan device on the CPU.

A profile lists the device features that the code may rely on. When the module is loaded, it checks itself that the
device has them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from irongrad.runtime.devices import Device
from irongrad.targets.base import Kind, Option, Quirk, Requirement, Target


@dataclass(frozen=True)
class Profile:
    """The device features that the code may rely on.

    Attributes:
        compute: the types of arithmetic, in the notation of `#iree_gpu.target`.
        storage: the widths of loads and stores.
        subgroup: the number of lanes that exchange values directly; 0 for code without such exchange.
        invocations: the largest number of threads in a workgroup.
        sizes: the largest workgroup size, by dimension.
        memory: the bytes of shared memory of a workgroup.
        summary: the devices that have these features.
    """

    compute: tuple[str, ...]
    storage: tuple[str, ...]
    subgroup: int
    invocations: int
    sizes: tuple[int, int, int]
    memory: int
    summary: str


# generic has the limits that Vulkan itself guarantees ("Required Limits" of the specification), such as 16 KiB of
# shared memory and 128 invocations; mobile only has larger workgroups. The others are the smallest limits of NVIDIA's,
# AMD's and Intel's current drivers, as IREE's own descriptions list them.
PROFILES = {
    "generic": Profile(
        ("fp32", "int32", "int8"),
        ("b32", "b8"),
        0,
        128,
        (128, 128, 64),
        16 * 1024,
        "any device: float32, 32-bit integers, and bytes for booleans",
    ),
    "mobile": Profile(
        ("fp32", "fp16", "int32", "int16", "int8"),
        ("b32", "b16", "b8"),
        0,
        256,
        (256, 256, 64),
        16 * 1024,
        "phones and boards: also float16 and small integers, no 64-bit ones",
    ),
    "desktop": Profile(
        ("fp32", "fp16", "int64", "int32", "int16", "int8"),
        ("b64", "b32", "b16", "b8"),
        32,
        1024,
        (1024, 1024, 64),
        32 * 1024,
        "GPUs of PCs, with subgroups of 32 lanes",
    ),
    "lavapipe": Profile(
        ("fp64", "fp32", "fp16", "int64", "int32", "int16", "int8"),
        ("b64", "b32", "b16", "b8"),
        8,
        1024,
        (1024, 1024, 1024),
        32 * 1024,
        "Mesa's Vulkan on a CPU with 256-bit vectors, for tests",
    ),
}

_FEATURES = {
    "fp64": ("shader_float64", "float64"),
    "fp16": ("shader_float16", "float16"),
    "int64": ("shader_int64", "64-bit integers"),
    "int16": ("shader_int16", "16-bit integers"),
    "int8": ("shader_int8", "8-bit integers"),
    "b16": ("storage_buffer_16bit_access", "16-bit storage"),
    "b8": ("storage_buffer_8bit_access", "8-bit storage"),
}

_OTHERWISE = "compile it for vulkan:profile=generic"

# IREE 3.13.0 records a command buffer once, and binds its buffers at each run. On Vulkan, a loop that runs it again
# corrupts earlier results (the state after two of train_steps' iterations). tests/targets/test_vulkan.py tells when
# it is fixed.
DIRECT_BUFFERS = "--iree-hal-indirect-command-buffers=false"

SUBGROUPS = (0, 4, 8, 16, 32, 64)


def _make_target(name: str, options: dict[str, str]) -> Target:
    chosen = options.get("profile", "generic")
    profile = PROFILES[chosen]
    subgroup = int(options.get("subgroup", profile.subgroup))
    return Target(
        name=name,
        backend="vulkan",
        device="vulkan",
        flags=(f"--iree-hal-target-device={_attribute(chosen, profile, subgroup)}", DIRECT_BUFFERS),
        scalars_on_host=True,
        float64="fp64" in profile.compute,
        integers64="int64" in profile.compute,
        subgroup=subgroup,
        requirements=_requirements(profile, subgroup),
    )


def _attribute(name: str, profile: Profile, subgroup: int) -> str:
    sizes = ", ".join(map(str, profile.sizes))
    exchange = "shuffle|arithmetic" if subgroup else "none"
    return (
        '#hal.device.target<"vulkan", [#hal.executable.target<"vulkan-spirv", "vulkan-spirv-fb", '
        f'{{iree_codegen.target_info = #iree_gpu.target<arch = "{name}", features = "spirv:v1.6,cap:Shader", '
        f"wgp = <compute = {'|'.join(profile.compute)}, storage = {'|'.join(profile.storage)}, "
        # Without lane exchange the subgroup size only shapes workgroups.
        f"subgroup = {exchange}, subgroup_size_choices = [{subgroup or 32}], max_workgroup_sizes = [{sizes}], "
        f"max_thread_count_per_workgroup = {profile.invocations}, max_workgroup_memory_bytes = {profile.memory}, "
        "max_workgroup_counts = [65535, 65535, 65535]>>}>]> : !hal.device"
    )


def _requirements(profile: Profile, subgroup: int) -> tuple[Requirement, ...]:
    needed = [_FEATURES[f] for f in (*profile.compute, *profile.storage) if f in _FEATURES]
    found = [
        Requirement(
            "vulkan.feature", key, 1, f"needs a Vulkan device with {what}; compile it for vulkan:profile=generic"
        )
        for key, what in needed
    ]
    found.append(
        Requirement(
            "vulkan.device",
            "max_compute_workgroup_invocations",
            profile.invocations,
            f"needs a Vulkan device with workgroups of {profile.invocations} invocations; {_OTHERWISE}",
            at_least=True,
        )
    )
    if subgroup:
        text = (
            f"is compiled for Vulkan devices whose subgroups have {subgroup} lanes, and would compute wrong numbers on "
            "this one; 'irongrad targets --probe' says what to compile it for"
        )
        found.append(Requirement("vulkan.device", "subgroup_size", subgroup, text))
    return tuple(found)


# The vendors of GPUs for phones and boards (their PCI and Khronos vendor ids): Qualcomm, Arm, Imagination.
_MOBILE_VENDORS = ("0x5143", "0x13b5", "0x1010")
_SMALL_TYPES = ("storageBuffer8BitAccess", "storageBuffer16BitAccess", "shaderInt8", "shaderFloat16")
# VK_SUBGROUP_FEATURE_ARITHMETIC_BIT and VK_SUBGROUP_FEATURE_SHUFFLE_BIT.
_EXCHANGE = 0x4 | 0x10


def propose(device: Device) -> str:
    """Return the target to compile for `device`, from the properties that its driver reports."""
    size, least, most = device.subgroup
    if "llvmpipe" in device.name:
        return _spelled("lavapipe", size)
    if not all(f"{name}=yes" in device.details for name in _SMALL_TYPES):
        return _spelled("generic", 0)
    if any(f"vendor_id: {vendor}" in device.details.lower() for vendor in _MOBILE_VENDORS):
        return _spelled("mobile", 0)
    operations = re.search(r"operations=(0x[0-9a-f]+)", device.details)
    exchanges = operations is not None and int(operations.group(1), 16) & _EXCHANGE == _EXCHANGE
    return _spelled("desktop", size if exchanges and least == most and size in SUBGROUPS else 0)


def _spelled(profile: str, subgroup: int) -> str:
    own = "" if subgroup == PROFILES[profile].subgroup else f",subgroup={subgroup}"
    return f"vulkan:profile={profile}{own}"


KIND = Kind(
    name="vulkan",
    summary="SPIR-V for GPUs with Vulkan 1.3, and for Mesa's lavapipe",
    options=(
        Option("profile", "what the device has; generic by default", tuple(PROFILES)),
        Option(
            "subgroup",
            "how many lanes of the device run in step, 0 for code that does not rely on it; the profile's by default",
            tuple(map(str, SUBGROUPS)),
        ),
    ),
    make=_make_target,
    quirks=(
        Quirk(
            "IREE 3.13.0",
            "code for subgroups of one size computes wrong numbers on a device with another, and nothing says so",
            "the module asks the device when it is loaded, and refuses",
            "tests/targets/test_vulkan.py",
        ),
        Quirk(
            "IREE 3.13.0, SPIR-V",
            "logarithm and power of float64 do not exist, and the virtual machine cannot round float64 to float32",
            "float64 scalars are computed by the virtual machine, and rounded on their bits",
            "tests/passes/module/test_scalars_on_host.py",
        ),
        Quirk(
            "IREE 3.13.0",
            "without 8-bit storage, a loop reads a tensor of one boolean wrong; with 8-bit storage but without 8-bit "
            "integers, storing one does not compile",
            "every profile has both",
            "tests/targets/test_vulkan.py",
        ),
        Quirk(
            "IREE 3.13.0",
            "the emulation of 64-bit integers stops at vectors of them ('vector.insert_strided_slice' is illegal)",
            "the module computes 64-bit integers in 32 bits; its signature keeps 64 bits",
            "tests/targets/test_vulkan.py",
        ),
        Quirk(
            "IREE 3.13.0",
            "a loop inside the module corrupts the state from its second iteration on, because command buffers that "
            "are recorded once run again with other buffers",
            DIRECT_BUFFERS,
            "tests/targets/test_vulkan.py",
        ),
        Quirk(
            "IREE 3.13.0",
            "DeviceArray.to_host fails, because numpy's memory does not begin on a page",
            "results are copied through memory that the device allocates",
            "tests/targets/test_vulkan.py",
        ),
    ),
)
