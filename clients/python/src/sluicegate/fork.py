"""Resets locks and connections in the child process after a fork, for example of a preloading web server."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Resettable(Protocol):
    """An object with state that a child process must not share."""

    def reset_after_fork(self) -> None:
        """Replaces locks and drops connections."""


_objects: weakref.WeakSet[Resettable] = weakref.WeakSet()


def reset_after_fork(resettable: Resettable) -> None:
    """Registers an object until it is garbage-collected."""
    _objects.add(resettable)


def _reset_all() -> None:
    for resettable in list(_objects):
        resettable.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)
