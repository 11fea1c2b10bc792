"""Background tasks whose failures are seen (R12)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from kvtide.core.protocols import Component


class Tasks:
    """The background tasks of one cache on its home loop.

    A task that fails leaves its cause in `health`; whoever waits on its work is told by the
    work itself, which cleans up in `finally`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._live: set[asyncio.Task[None]] = set()
        self._failures: dict[str, Component] = {}

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Start a task, from any thread."""
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            self._start(name, work)
        else:
            self._loop.call_soon_threadsafe(self._start, name, work)

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work, name=f"kvtide {name}")
        self._live.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._live.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            name = task.get_name().removeprefix("kvtide ")
            cause = f"{type(error).__name__}: {error}"
            self._failures[name] = Component(name, "failed", time.time(), cause)

    def health(self) -> list[Component]:
        """One component for each kind of task that has failed."""
        return list(self._failures.values())

    async def close(self, deadline: float) -> list[str]:
        """Wait for all; cancel what is left at the deadline.

        Returns the names of those: what they had begun on other threads may go on.
        """
        if self._live:
            await asyncio.wait(self._live, timeout=deadline)
        stuck = [task.get_name() for task in self._live]
        for task in self._live:
            task.cancel()
        if self._live:
            await asyncio.wait(self._live, timeout=0.5)
        return stuck
