"""How much may be copied at once: a FIFO in front of the devices (S1-7, R13)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

Start = Callable[[], None]


class Gate:
    """Admits copies by bytes and by number; who doesn't fit waits in order.

    One copy that is larger than the limit goes alone.
    """

    def __init__(self, limit_bytes: int, limit_copies: int) -> None:
        self.limit_bytes = limit_bytes
        self.limit_copies = limit_copies
        self.bytes = 0
        self.copies = 0
        self._queue: deque[tuple[int, Start]] = deque()
        self._admitting = False

    def __len__(self) -> int:
        """Copies that wait."""
        return len(self._queue)

    def enter(self, nbytes: int, start: Start) -> None:
        """Start at once if it fits and nobody waits, else when its turn comes."""
        self._queue.append((nbytes, start))
        self._admit()

    def leave(self, nbytes: int) -> None:
        """A copy has ended."""
        self.bytes -= nbytes
        self.copies -= 1
        self._admit()

    def withdraw(self, start: Start) -> bool:
        """Stop waiting. False if it has been started."""
        for entry in self._queue:
            if entry[1] == start:
                self._queue.remove(entry)
                self._admit()
                return True
        return False

    def _admit(self) -> None:
        if self._admitting:
            return  # a copy that ends as it starts: the loop below goes on, without nesting
        self._admitting = True
        try:
            while self._queue:
                nbytes, start = self._queue[0]
                full = self.bytes + nbytes > self.limit_bytes or self.copies >= self.limit_copies
                if self.copies and full:
                    return
                self._queue.popleft()
                self.bytes += nbytes
                self.copies += 1
                start()
        finally:
            self._admitting = False
