"""What IronGrad compiles for; one file a target."""

from irongrad.targets.base import Target, parse_target

__all__ = ["Target", "parse_target"]
