"""Wake-up between processes: idle waiters are rung, nobody polls.

Beside the database ``jobs.db`` stands the folder ``jobs.db.bells``. Each waiter owns a numbered slot in it: a
datagram socket of that name, and a few bytes of the file ``board``, which everybody maps into memory. A waiter
that is about to sleep raises its flag on the board, looks at the database once more, and sleeps on its socket;
whoever commits something reads the flags, which costs no system call where nobody is idle.

Bells only save time: a waiter that was not rung looks by itself every second. So everything here may fail.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import mmap
import os
import select
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

from taskq.clock import monotonic

#: How long a waiter trusts its bell before it looks by itself, in seconds.
LOOK: Final = 1.0

_SLOTS: Final = 1024
# Per slot: when it was last rung, its owner's name, how many topics (255: all), the topics; names as CRC-32.
_DETAIL: Final = struct.Struct("<QIB3x12I")
_MAX_TOPICS: Final = 12
_ALL: Final = 255
_SIZE: Final = _SLOTS + _SLOTS * _DETAIL.size


class Waiting(bytes, enum.Enum):
    """What a sleeper waits for: the value of its flag."""

    JOBS = b"\1"
    RESULTS = b"\2"


_AWAKE: Final = 0
RUNG: Final = b"!"
#: Sent to a worker that holds a job which somebody asked to cancel.
CANCEL: Final = b"c"


class Bells:
    """The folder, as one process sees it. Thread-safe; made on first use."""

    def __init__(self, database: str) -> None:
        self._folder = f"{os.path.realpath(database)}.bells"
        self._lock = threading.Lock()
        self._board: mmap.mmap | None = None
        self._folder_fd = self._board_fd = -1
        self._sender: socket.socket | None = None
        self._failed = False
        self._hung = 0  # bells that are bound here

    @property
    def folder(self) -> str:
        return self._folder

    def bell(self, owner: str) -> Bell:
        """A bell of its own for a waiter."""
        bell = Bell(self, owner)
        self._open()
        with self._lock:
            # Closed meanwhile, or never opened: the waiter looks instead of being rung.
            if self._board is None:
                return bell
            with self._exclusive():
                self._hung += bell.hang(self._free_slot(), self._path)
            if bell.slot is not None:
                _DETAIL.pack_into(self._board, _at(bell.slot), 0, _name(owner), 0, *[0] * _MAX_TOPICS)
        return bell

    def ring_takers(self, ready: Mapping[str, int]) -> None:
        """Wake as many idle consumers of each queue as it got jobs, those first that slept longest."""
        board = self._open()
        if board is None or board.find(Waiting.JOBS, 0, _SLOTS) < 0:
            return
        idle = sorted(self._idle(board, Waiting.JOBS))
        for queue, n in ready.items():
            name, left = _name(queue), n
            for _, slot, topics in list(idle):
                if left <= 0:
                    break
                if topics is None or name in topics:
                    idle = [entry for entry in idle if entry[1] != slot]
                    left -= self._ring(board, slot)

    def ring_waiters(self, ended: Collection[str]) -> None:
        """Wake whoever waits for one of these jobs to end."""
        board = self._open()
        if board is None or board.find(Waiting.RESULTS, 0, _SLOTS) < 0:
            return
        names = {_name(job_id) for job_id in ended}
        for _, slot, topics in self._idle(board, Waiting.RESULTS):
            if topics is None or not names.isdisjoint(topics):
                self._ring(board, slot)

    def call(self, owner: str) -> None:
        """Tell ``owner``, asleep or not, that it should look at its cancellations."""
        board = self._open()
        if board is None:
            return
        name = _name(owner)
        for slot in range(_SLOTS):
            if _DETAIL.unpack_from(board, _at(slot))[1] == name:
                self._send(board, slot, CANCEL)

    def close(self) -> None:
        """Let go of the folder, once the last bell is taken down. Idempotent."""
        with self._lock:
            self._failed = True
            self._let_go()

    def forget_parent(self) -> None:
        """In the child of a fork: begin anew, with files of its own."""
        self._lock = threading.Lock()
        self._hung = 0
        self._let_go()

    def _let_go(self) -> None:
        if self._hung or self._folder_fd < 0:
            return
        if self._board is not None:
            self._board.close()
        if self._sender is not None:
            self._sender.close()
        os.close(self._folder_fd)
        if self._board_fd >= 0:
            os.close(self._board_fd)
        self._board = self._sender = None
        self._folder_fd = self._board_fd = -1

    # -- what a bell asks for ---------------------------------------------------------

    def raise_flag(self, slot: int, waiting: Waiting, owner: str, topics: Collection[str]) -> None:
        board = self._board
        if board is None:
            return
        at = _at(slot)
        names = [_name(topic) for topic in topics] if len(topics) <= _MAX_TOPICS else []
        count = len(names) if names else _ALL
        (rung,) = struct.unpack_from("<Q", board, at)
        _DETAIL.pack_into(board, at, rung, _name(owner), count, *names, *[0] * (_MAX_TOPICS - len(names)))
        board[slot] = waiting.value[0]

    def lower_flag(self, slot: int) -> None:
        if self._board is not None:
            self._board[slot] = _AWAKE

    def take_down(self, slot: int, bell: socket.socket) -> None:
        with self._lock:
            board = self._board
            if board is not None:
                board[slot] = _AWAKE
                _DETAIL.pack_into(board, _at(slot), 0, 0, 0, *[0] * _MAX_TOPICS)
                # Before the socket is closed, so that the name is never seen as stale.
                with contextlib.suppress(OSError):
                    os.unlink(str(slot), dir_fd=self._folder_fd)
            bell.close()
            self._hung -= 1
            if self._failed:
                self._let_go()

    # -- the board --------------------------------------------------------------------

    def _open(self) -> mmap.mmap | None:
        if self._board is not None or self._failed:
            return self._board
        with self._lock:
            if self._folder_fd < 0 and not self._failed:
                try:
                    self._board = self._map()
                except (OSError, ValueError):
                    self._failed = (
                        True  # a folder that cannot be written, a file system without mmap: look instead
                    )
            return self._board

    def _map(self) -> mmap.mmap:
        with contextlib.suppress(FileExistsError):
            Path(self._folder).mkdir(0o700)
        self._folder_fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._board_fd = os.open(
            "board", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._folder_fd
        )
        if os.fstat(self._board_fd).st_size < _SIZE:
            os.ftruncate(self._board_fd, _SIZE)
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        return mmap.mmap(self._board_fd, _SIZE)

    def _path(self, slot: int) -> str:
        # Through the open folder: a socket's name is limited to 107 bytes, whatever the database is called.
        return f"/proc/self/fd/{self._folder_fd}/{slot}"

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        fcntl.flock(self._board_fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._board_fd, fcntl.LOCK_UN)

    def _free_slot(self) -> int | None:
        taken = {
            int(name)
            for name in os.listdir(self._folder_fd)  # noqa: PTH208 - by descriptor
            if name.isdigit()
        }
        free = next((slot for slot in range(_SLOTS) if slot not in taken), None)
        if free is not None:
            return free
        return next((slot for slot in range(_SLOTS) if self._clear_stale(slot)), None)

    def _clear_stale(self, slot: int) -> bool:
        """Remove the socket of a waiter that died; to be called exclusively."""
        assert self._sender is not None
        try:
            self._sender.connect(self._path(slot))
        except ConnectionRefusedError:
            with contextlib.suppress(OSError):
                os.unlink(str(slot), dir_fd=self._folder_fd)
            return True
        except OSError:
            return False
        # A datagram socket may be connected as often as one likes; undo it by making a new one.
        self._sender.close()
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        return False

    def _idle(self, board: mmap.mmap, waiting: Waiting) -> Iterator[tuple[int, int, tuple[int, ...] | None]]:
        slot = board.find(waiting, 0, _SLOTS)
        while slot >= 0:
            rung, _, count, *topics = _DETAIL.unpack_from(board, _at(slot))
            yield rung, slot, None if count == _ALL else tuple(topics[:count])
            slot = board.find(waiting, slot + 1, _SLOTS)

    def _ring(self, board: mmap.mmap, slot: int) -> bool:
        board[slot] = _AWAKE  # the next ringer picks another
        struct.pack_into("<Q", board, _at(slot), _now())
        return self._send(board, slot, RUNG)

    def _send(self, board: mmap.mmap, slot: int, message: bytes) -> bool:
        sender = self._sender
        if sender is None:
            return False
        try:
            sender.sendto(message, self._path(slot))
        except BlockingIOError:
            return True  # it has more rings than it can count
        except ConnectionRefusedError:
            with self._lock:
                if self._board is None:
                    return False
                with self._exclusive():
                    self._clear_stale(slot)
                board[slot] = _AWAKE
            return False
        except OSError:
            board[slot] = _AWAKE
            return False
        return True


class Bell:
    """One waiter's bell, and the means to wake it from within its process, also from a signal handler."""

    def __init__(self, bells: Bells, owner: str) -> None:
        self._bells = bells
        self._owner = owner
        self._pid = os.getpid()
        self._socket: socket.socket | None = None
        self.slot: int | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # No one wakes what is being taken down, or who owns that number next; a signal handler may come in between.
        self._waking = threading.RLock()
        self._poll = select.poll()
        self._poll.register(self._wake_fd, select.POLLIN)

    def hang(self, slot: int | None, path: Callable[[int], str]) -> bool:
        """Bind the bell at ``slot``; where that fails it is woken from within only."""
        if slot is None:
            return False
        bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            os.fchmod(bell.fileno(), 0o600)
            bell.bind(path(slot))
        except OSError:
            bell.close()
            return False
        self._socket, self.slot = bell, slot
        self._poll.register(bell, select.POLLIN)
        return True

    @contextlib.contextmanager
    def idle(self, waiting: Waiting, topics: Collection[str]) -> Iterator[None]:
        """Be rung for ``topics`` meanwhile. Look once more after entering, before sleeping."""
        slot = self.slot
        if slot is None:
            yield
            return
        self._bells.raise_flag(slot, waiting, self._owner, topics)
        try:
            yield
        finally:
            self._bells.lower_flag(slot)

    def sleep(self, seconds: float) -> bool:
        """Sleep until rung, called, woken, or for ``seconds``; says whether it was called or woken."""
        ready = self._poll.poll(max(0.0, seconds) * 1000)
        wanted = False
        for fd, _ in ready:
            if fd == self._wake_fd:
                wanted = self.woken()
        return (self._socket is not None and self._drain()) or wanted

    def woken(self) -> bool:
        """Whether somebody woke it since last asked."""
        try:
            return os.eventfd_read(self._wake_fd) > 0
        except BlockingIOError:
            return False

    def wake(self) -> None:
        """Wake the sleeper, or the next one to sleep."""
        with self._waking:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Take the bell down. Idempotent."""
        forked = self._pid != os.getpid()
        if forked:
            self._waking = threading.RLock()  # whoever holds the other stayed behind
        with self._waking:
            fd, self._wake_fd = self._wake_fd, -1
        if fd < 0:
            return
        if self._socket is not None and self.slot is not None:
            if forked:
                self._socket.close()
            else:
                self._bells.take_down(self.slot, self._socket)
        self._socket = self.slot = None
        os.close(fd)

    def _drain(self) -> bool:
        called = False
        assert self._socket is not None
        while True:
            try:
                called |= self._socket.recv(16) == CANCEL
            except BlockingIOError:
                return called


def _at(slot: int) -> int:
    return _SLOTS + slot * _DETAIL.size


def _name(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def _now() -> int:
    return int(monotonic() * 1e9)
