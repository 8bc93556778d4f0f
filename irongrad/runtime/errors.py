"""Every error that IronGrad raises on purpose; does not import torch, so that the runtime can raise them too.

A message says what is wrong, where it is (the user's file and line, or the entry point and input), and what to do next.
The command line exits with the class's `exit_code`, and names the class's section of docs/errors.md.
"""

from __future__ import annotations


class IronGradError(Exception):
    """The base class of all errors of IronGrad.

    A note of each error names its section of the documentation, so a traceback shows it.

    Attributes:
        exit_code: the exit status of the command line.
    """

    exit_code = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.add_note(f"see {self.section}")

    @property
    def section(self) -> str:
        """The section of the documentation about the class, or about the nearest class of this file that it extends."""
        public = next(c for c in type(self).__mro__ if c.__module__ == __name__)
        return f"docs/errors.md#{public.__name__.lower()}"

    def described(self) -> dict[str, str]:
        """The error as the command line prints it with `--json`."""
        return {"class": type(self).__name__, "message": str(self), "section": self.section}


class UserError(IronGradError):
    """An error that the caller can fix."""

    exit_code = 2


class CaptureError(UserError):
    """The model, the loss or the optimizer cannot be captured as one graph."""


class UnsupportedOpError(UserError):
    """An operator that cannot be compiled; the message names it and the user's line."""


class GuardError(UserError):
    """An input, a hyperparameter or a request that the compiled step does not accept.

    Attributes:
        reason: what the module says, if the module refused a call; empty otherwise.
    """

    def __init__(self, message: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class ArtifactError(UserError):
    """An artifact or checkpoint that is missing, damaged, foreign, or made for another machine."""


class RankLostError(UserError):
    """Another process that trains the same state is gone; the state of this one is as before the step."""


class NonFiniteError(UserError):
    """A loss or the state became NaN or infinite, and the session was told to stop then."""


class VerificationError(IronGradError):
    """The compiled step disagrees with the float64 oracle."""

    exit_code = 3


class ToolchainError(IronGradError):
    """torch-mlir or IREE failed; the message holds its diagnostic and the path of the dumped module."""

    exit_code = 4


class InternalError(IronGradError):
    """A bug in IronGrad: one of its own checks failed."""

    exit_code = 5
