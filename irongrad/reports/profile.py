"""The profile of an entry point: the time of each kernel, beside its work, and of the gaps between kernels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from irongrad.analysis.machine import Machine
from irongrad.analysis.records import Analysis
from irongrad.runtime.atomic_files import atomic_write
from irongrad.runtime.errors import UserError
from irongrad.runtime.manifest import Manifest

FORMAT_VERSION = 1

# A launch that takes less computes for less time than it takes to hand it to threads (`_WORTH_THREADS` in
# pipeline/iree/compile.py).
_LAUNCH_SECONDS = 5e-6


@dataclass(frozen=True)
class Span:
    """A launch in the step that the profile shows.

    Attributes:
        kernel: the name of its kernel.
        module: the path of the module that it belongs to; empty if unknown.
        line: the user's line, as `net.py:12`; empty if unknown.
        phase: the phase of the step, as in `irongrad.analysis.records.Source`; empty if unknown.
        start: seconds since the first launch of the step began.
        seconds: its time.
    """

    kernel: str
    module: str
    line: str
    phase: str
    start: float
    seconds: float


@dataclass(frozen=True)
class KernelTime:
    """The time of a kernel in one step.

    Attributes:
        name: its name, as in the record of the artifact.
        launches: how often a step launches it.
        seconds: the median over the steps of its time in a step.
        operations: its arithmetic operations in a step; None if unknown.
        nbytes: the bytes that it reads and writes in a step.
        modules: the modules whose operators it computes.
        lines: the user's lines that it comes from.
    """

    name: str
    launches: int
    seconds: float
    operations: int | None
    nbytes: int
    modules: tuple[str, ...]
    lines: tuple[str, ...]

    def least(self, machine: Machine) -> float:
        """The least time that its work takes on `machine`, in seconds."""
        return machine.seconds(self.operations or 0, self.nbytes)

    def reason(self, machine: Machine) -> str:
        """What limits it: `launch`, if it is too short to be worth one; else `arithmetic` or `memory`."""
        if self.seconds / self.launches < _LAUNCH_SECONDS:
            return "launch"
        computing = (self.operations or 0) / machine.flops
        return "arithmetic" if computing > self.nbytes / machine.bandwidth else "memory"


@dataclass(frozen=True)
class Profile:
    """The profile of an entry point on a device.

    Attributes:
        format_version: the version of this format.
        digest: the digest of the artifact's manifest.
        entry: the entry point.
        target: the target.
        device: the IREE device.
        machine: the name of this machine's CPU.
        threads: the number of threads that the process might use.
        steps: how many calls were measured.
        seconds: the time of a call without profiling, the least of several means.
        profiled_seconds: the median time of a call with profiling. The difference is the overhead of profiling.
        active_seconds: the median over the steps of the time in which any kernel runs.
        gap_seconds: the median time from the first launch of a step to the end of its last, in which no kernel runs.
        kernels: the kernels, the one with the most time first.
        spans: the launches of one step, in order: the step whose time is the median.
        others: the share of all CPUs that other processes took meanwhile, from 0 to 1; None if unknown.
    """

    format_version: int
    digest: str
    entry: str
    target: str
    device: str
    machine: str
    threads: int
    steps: int
    seconds: float
    profiled_seconds: float
    active_seconds: float
    gap_seconds: float
    kernels: tuple[KernelTime, ...]
    spans: tuple[Span, ...]
    others: float | None = None

    @property
    def overhead(self) -> float:
        """By how much profiling lengthens a call, as a fraction."""
        return self.profiled_seconds / self.seconds - 1

    @property
    def host_seconds(self) -> float:
        """The time of a profiled call before the first launch and after the last: arguments, results, submission."""
        return max(0.0, self.profiled_seconds - self.active_seconds - self.gap_seconds)

    def farthest(self, machine: Machine, count: int = 10) -> list[KernelTime]:
        """The kernels with the most time above the least that their work takes, the most first."""
        return sorted(self.kernels, key=lambda k: k.seconds - k.least(machine), reverse=True)[:count]


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON, whole or not at all."""
    atomic_write(path, msgspec.json.format(msgspec.json.encode(profile)) + b"\n")


def read_profile(path: Path, manifest: Manifest, analysis: Analysis) -> Profile:
    """Read the profile of an artifact.

    Raises:
        UserError: there is no profile, it is damaged, or it is that of another artifact.
    """
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no profile that 'irongrad profile' wrote: {error}") from None
    times = profile.seconds > 0 and profile.profiled_seconds > 0
    if not times or any(k.launches < 1 or k.seconds < 0 for k in profile.kernels):
        raise UserError(
            f"{path} is no profile that 'irongrad profile' wrote: a time or a number of launches is not positive"
        )
    if profile.format_version != FORMAT_VERSION:
        raise UserError(f"{path} has version {profile.format_version}; this IronGrad reads version {FORMAT_VERSION}")
    if profile.digest != manifest.digest or profile.target not in analysis.targets:
        raise UserError(f"{path} is the profile of another artifact. Make one with 'irongrad profile'")
    return profile
