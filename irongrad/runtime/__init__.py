"""Running artifacts: numpy and the IREE runtime, no torch."""

from irongrad.runtime.function import CompiledFunction, load_function
from irongrad.runtime.session import Session, load

__all__ = ["CompiledFunction", "Session", "load", "load_function"]
