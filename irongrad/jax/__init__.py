"""Export JAX training steps as bundles for `irongrad import`; the only part of IronGrad that imports JAX.

import irongrad.jax

irongrad.jax.export_step(train_step, state, {"x": x, "y": y}, "build/digits.jax", hypers={"lr": 1e-3})
"""

from __future__ import annotations

from irongrad.jax.export import export_step as export_step

__all__ = ["export_step"]
