"""Ranks in a training run: when they synchronise, and what they send. Needs no torch."""

from irongrad.distributed.averaging import Nesterov
from irongrad.distributed.gradients import Gradients, check_equal
from irongrad.distributed.local_steps import LocalSteps
from irongrad.distributed.pipeline import Pipeline
from irongrad.distributed.sync_text import sync_of

__all__ = ["Gradients", "LocalSteps", "Nesterov", "Pipeline", "check_equal", "sync_of"]
