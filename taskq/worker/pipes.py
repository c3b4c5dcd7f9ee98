"""The pipe between a supervisor and a child: length-prefixed msgpack frames over a socket pair.

Supervisor to child
    ``[RUN, lane, chunk, [job, …]]`` · ``[INTERRUPT, lane, chunk, index, kind]`` · ``[FLUSH, lane]`` ·
    ``[LANE, lane]`` (add a thread) · ``[STOP]``
Child to supervisor
    ``[HELLO, facts]`` · ``[FAILED, text]`` · ``[DONE, lane, chunk, [result, …]]`` ·
    ``[EXTEND, lane, chunk, index, seconds]`` · ``[PROGRESS, lane, chunk, index, value]`` · ``[SAY, name, fields]``
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgpack

RUN, INTERRUPT, FLUSH, LANE, STOP = range(5)
HELLO, FAILED, DONE, EXTEND, PROGRESS, SAY = range(10, 16)

_HEADER: Final = struct.Struct("<I")
_READ: Final = 1 << 18


class Closed(Exception):  # noqa: N818 - an end, not an error
    """The other side is gone."""


def pack(message: list[Any]) -> bytes:
    """One frame."""
    body: bytes = msgpack.packb(message, default=dict)  # a read-only mapping of headers is not a dict
    return _HEADER.pack(len(body)) + body


class Bell:
    """Wakes a loop that waits on descriptors, from any thread or a signal handler."""

    def __init__(self) -> None:
        self.sock, self._ringer = socket.socketpair()
        self.sock.setblocking(False)
        self._ringer.setblocking(False)

    def ring(self) -> None:
        """Make :attr:`sock` readable."""
        try:
            self._ringer.send(b"\0")
        except OSError:
            return  # full of wake-ups already, or the loop has ended

    def hush(self) -> None:
        """Take the wake-ups that have come."""
        try:
            while self.sock.recv(4096):
                continue
        except BlockingIOError:
            return

    def close(self) -> None:
        self.sock.close()
        self._ringer.close()


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[list[Any]]:
        """Add bytes; yields the messages they complete."""
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= _HEADER.size:
            (size,) = _HEADER.unpack_from(buffer, at)
            end = at + _HEADER.size + size
            if len(buffer) < end:
                break
            yield msgpack.unpackb(buffer[at + _HEADER.size : end], strict_map_key=False)
            at = end
        del buffer[:at]


class ParentEnd:
    """The supervisor's end: never blocks, whatever the child does."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._frames = Frames()
        self._unsent = bytearray()
        self.closed = False

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: list[Any]) -> None:
        """Queue a message; :meth:`flush` writes it."""
        self._unsent += pack(message)

    def flush(self) -> bool:
        """Write what the child's buffer takes; whether everything has been written."""
        while self._unsent and not self.closed:
            try:
                sent = self.sock.send(self._unsent)
            except BlockingIOError:
                return False
            except OSError:
                # The child is gone; its death is noticed where children are watched.
                self._unsent.clear()
                return True
            del self._unsent[:sent]
        return True

    def receive(self) -> list[list[Any]]:
        """The messages that have arrived. Raises :class:`Closed` once the child's end is closed and read."""
        try:
            data = self.sock.recv(_READ)
        except BlockingIOError:
            return []
        except OSError as error:
            raise Closed from error
        if not data:
            raise Closed
        return list(self._frames.feed(data))

    def drain(self) -> list[list[Any]]:
        """What a dead child had sent before it died."""
        messages: list[list[Any]] = []
        try:
            while True:
                messages += self.receive() or _nothing_more()
        except Closed:
            return messages

    def close(self) -> None:
        """Hang up: the child sees the end of the stream and stops."""
        if not self.closed:
            self.closed = True
            self.sock.close()


def _nothing_more() -> list[list[Any]]:
    raise Closed


class ChildEnd:
    """The child's end: one thread receives, any thread sends."""

    def __init__(self, sock: socket.socket, on_lost: Callable[[], None] = lambda: None) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._on_lost = on_lost  #: the supervisor is gone, or a task has closed the way to it
        self._frames = Frames()
        self._lock = threading.Lock()

    def send(self, message: list[Any]) -> None:
        """Write a message. Raises :class:`Closed` when the supervisor is gone."""
        frame = pack(message)
        try:
            with self._lock:
                self._sock.sendall(frame)
        except OSError as error:
            self._on_lost()
            raise Closed from error

    def messages(self) -> Iterator[list[Any]]:
        """Messages as they come, until the supervisor hangs up or dies."""
        while True:
            try:
                data = self._sock.recv(_READ)
            except OSError:
                return
            if not data:
                return
            yield from self._frames.feed(data)

    def close(self) -> None:
        """Hang up; also ends a receive that another thread is blocked in."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
