"""What IronGrad compiles for; one file for each kind of target."""

from irongrad.targets.base import DATA_TILING, Ability, Kind, Option, Quirk, Requirement, Target, common_abilities
from irongrad.targets.registry import kinds, parse_target, parse_targets

__all__ = [
    "DATA_TILING",
    "Ability",
    "Kind",
    "Option",
    "Quirk",
    "Requirement",
    "Target",
    "common_abilities",
    "kinds",
    "parse_target",
    "parse_targets",
]
