"""A text stream that never makes its writer wait: a log must not hold up leases, nor the end of a worker."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import Final, TextIO

#: Lines kept for a reader that is slow; of more than these the oldest are dropped, and counted.
_KEPT: Final = 10_000


class Scribe:
    """Writes to ``stream`` from a thread of its own. A stream that is ``None``, closed or full loses lines only."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="taskq-log", daemon=True)
        self._thread.start()

    def isatty(self) -> bool:
        """Whether people read along."""
        with contextlib.suppress(ValueError, OSError):
            return self._stream is not None and self._stream.isatty()
        return False

    def write(self, text: str) -> int:
        """Have ``text`` written. Any thread."""
        with self._changed:
            if len(self._lines) >= _KEPT:
                self._lines.popleft()
                self._dropped += 1
            self._lines.append(text)
            self._changed.notify()
        return len(text)

    def flush(self) -> None:
        """Lines are written as soon as they can be; there is nothing to wait for."""

    def close(self, timeout: float = 1.0) -> None:
        """Write what is left, for at most ``timeout`` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closing)
                if not self._lines:
                    return
                text = "".join(self._lines)
                dropped, self._dropped = self._dropped, 0
                self._lines.clear()
            if dropped:
                text = f"({dropped} log lines were dropped: nobody read them in time)\n{text}"
            if self._stream is not None:
                # A stream that is closed or full loses the line; there is nowhere else to say so.
                with contextlib.suppress(OSError, ValueError):
                    _write(self._stream, text)


def _write(stream: TextIO, text: str) -> None:
    """Write past the stream's own buffer: its lock, held by a write that blocks, would stop the interpreter's end."""
    left = memoryview(text.encode(stream.encoding or "utf-8", "backslashreplace"))
    while left:
        left = left[os.write(stream.fileno(), left) :]
