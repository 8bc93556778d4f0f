"""What IronGrad compiles for; one file a kind of target."""

from irongrad.targets.base import Kind, Option, Quirk, Requirement, Target, kinds, parse_target, parse_targets

__all__ = ["Kind", "Option", "Quirk", "Requirement", "Target", "kinds", "parse_target", "parse_targets"]
