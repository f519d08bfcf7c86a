"""Loads large libraries in less time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def large_imports() -> Iterator[None]:
    """A context for imports. Python's garbage collector does not run in it: while modules make objects, it would look
    at all that there are again and again, for seconds with torch, transformers and TRL, and find nothing to free."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
