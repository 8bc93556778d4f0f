"""An on-disk cache of compiled steps; each key covers everything that the result depends on.

`store.py` keeps files under a key and knows nothing of compilers. `irongrad.pipeline.step_key` defines what a compiled
step depends on, and `irongrad.pipeline.build_cache` what is kept of it. docs/builds.md describes both for users.
"""

from irongrad.cache.store import Store, default_store

__all__ = ["Store", "default_store"]
