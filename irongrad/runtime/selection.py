"""Choose the target of an artifact for this machine, and check that it was verified on the device."""

from __future__ import annotations

from pathlib import Path

from irongrad.runtime.cpu import check_cpu
from irongrad.runtime.devices import Device, driver_of, find_device, is_local
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.manifest import Certificate, Manifest, TargetSpec

_MISSING = {
    "vulkan": "no Vulkan device was found; on Debian, Mesa's driver for the CPU is mesa-vulkan-drivers",
    "cuda": "no CUDA device was found; NVIDIA's driver has to be installed",
}


def choose_target(manifest: Manifest, directory: Path, name: str | None, device: str | None) -> TargetSpec:
    """Return the target called `name`, or else the first for `device`, or else the first that can run here.

    Raises:
        ArtifactError: there is no such target; gives the reason for each.
    """
    names = ", ".join(t.name for t in manifest.targets)
    if name is not None:
        found = next((t for t in manifest.targets if t.name == name), None)
        if found is None:
            raise ArtifactError(
                f"{directory} has no target {name!r}; it has {names}. Add one: irongrad rebuild {directory} --target …"
            )
        return found
    fitting = [t for t in manifest.targets if device is None or _same_driver(t.device, device)]
    if not fitting:
        listed = ", ".join(dict.fromkeys(f"{t.name} for {_devices(t)}" for t in manifest.targets))
        raise ArtifactError(
            f"{directory} has no target for the device {device!r}; it has {listed}. 'irongrad targets' lists the "
            f"devices of this machine. For another one add a target: irongrad rebuild {directory} --target …"
        )
    reasons = {t.name: why_not(t, directory, device or t.device) for t in fitting}
    runnable = next((t for t in fitting if not reasons[t.name]), None)
    if runnable is not None:
        return runnable
    if len(reasons) == 1:
        raise ArtifactError(*reasons.values())
    listed = "\n".join(f"  {n}: {r}" for n, r in reasons.items())
    raise ArtifactError(f"no target of {directory} can run here:\n{listed}")


def check_device(target: TargetSpec, directory: Path, device: str, *, verifying: bool = False) -> None:
    """Refuse a device on which `target` would stop with an illegal instruction or compute wrong numbers.

    Args:
        target: the target.
        directory: the artifact's directory.
        device: an IREE device URI.
        verifying: whether the caller verifies the numbers; then a target that is not verified yet is accepted.

    Raises:
        ArtifactError: says what to do.
    """
    check_cpu(target, directory)
    found = find_device(device)
    if found is None:
        if driver_of(device) in _MISSING:
            raise ArtifactError(f"{directory / target.file} cannot run here: {_MISSING[driver_of(device)]}")
        return  # IREE itself reports what is wrong with the device name
    size, least, most = found.subgroup
    if not target.subgroup or not size:
        return
    if size != target.subgroup:
        raise ArtifactError(
            f"{directory / target.file} is compiled for subgroups of {target.subgroup} lanes, and those of "
            f"{found.name} have {size}: it would compute wrong numbers. Compile it for "
            f"'vulkan:profile=desktop,subgroup={size}', or for any device with 'vulkan:profile=generic'"
        )
    if least != most and not verifying and not is_verified(target, device):
        raise ArtifactError(
            f"{directory / target.file} relies on subgroups of {size} lanes, and those of {found.name} have from "
            f"{least} to {most}. Verify it there first: irongrad verify {directory} --target {target.name} "
            f"--device {device}"
        )


def why_not(target: TargetSpec, directory: Path, device: str) -> str:
    """Return why `target` cannot run on `device`; empty if it can."""
    try:
        check_device(target, directory, device)
    except ArtifactError as error:
        return str(error)
    return ""


def is_verified(target: TargetSpec, device: str) -> bool:
    """Return whether `target` was verified on the device.

    A CPU target counts as verified on any CPU that has its features, a GPU target on one GPU model and driver only.
    """
    found = find_device(device)
    return found is not None and any(_covers(c, found) for c in (target.certificate, *target.verified) if c)


def _covers(certificate: Certificate, device: Device) -> bool:
    if not _same_driver(certificate.device, device.uri):
        return False
    return is_local(device.uri) or (certificate.name, certificate.driver) == (device.name, device.driver)


def _devices(target: TargetSpec) -> str:
    """The devices that run a target, as `load` takes them."""
    return "local-task or local-sync" if is_local(target.device) else driver_of(target.device)


def _same_driver(one: str, other: str) -> bool:
    return driver_of(one) == driver_of(other) or (is_local(one) and is_local(other))
