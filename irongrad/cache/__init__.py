"""What was compiled before, on disk, under keys made of everything that it depends on.

`store.py` keeps files under a key and knows nothing of compilers; `keys.py` says what a compiled step depends on, and
`builds.py` what is kept of it. docs/builds.md describes both for users.
"""

from irongrad.cache.store import Store, default_store

__all__ = ["Store", "default_store"]
