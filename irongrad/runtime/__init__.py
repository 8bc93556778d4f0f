"""Running artifacts: numpy and the IREE runtime, no torch."""

from irongrad.runtime.session import Session, load

__all__ = ["Session", "load"]
