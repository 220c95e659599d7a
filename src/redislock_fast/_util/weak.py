"""Weak sets that several threads use: one adds to a set while another one goes through it."""

from __future__ import annotations

import contextlib
import weakref
from typing import TypeVar

__all__ = ["members"]

_Member = TypeVar("_Member")


def members(weak_set: weakref.WeakSet[_Member]) -> list[_Member]:
    """What is in the set now, from any thread.

    Going through a weak set is not atomic, with the GIL or without it: it raises where another thread adds meanwhile.
    """
    while True:
        with contextlib.suppress(RuntimeError):
            return list(weak_set)
