"""How long the write-ahead log is at present."""

from __future__ import annotations

import os
import struct
from typing import Final

# https://www.sqlite.org/fileformat2.html#the_write_ahead_log: a header, then frames of a header and a page each.
# The salts in the log's header change whenever it begins again at its front; a frame belongs to the present log
# if it bears the same ones. (The file's size says nothing: it is reused, not shortened.)
_HEADER: Final = 32
_FRAME_HEADER: Final = 24
_PAGE_SIZE_AT: Final = 8
_SALTS_AT: Final = 16
_FRAME_SALTS_AT: Final = 8
_SALTS: Final = 8


class WalGauge:
    """Asks the log's file itself, for two small reads. SQLite locks other files, never this one, so that opening
    and closing it here drops no lock."""

    def __init__(self, path: str) -> None:
        self._path = f"{path}-wal"
        self._fd = -1
        self._frame = 0

    def passed(self, size: int) -> bool:
        """Whether more than ``size`` bytes of log are in use."""
        if self._fd < 0 and not self._open():
            return False
        at = _HEADER + (size // self._frame) * self._frame + _FRAME_SALTS_AT
        salts = os.pread(self._fd, _SALTS, at)
        return len(salts) == _SALTS and salts == os.pread(self._fd, _SALTS, _SALTS_AT)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> bool:
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        header = os.pread(fd, _HEADER, 0)
        if len(header) < _HEADER:
            os.close(fd)
            return False
        (page,) = struct.unpack_from(">I", header, _PAGE_SIZE_AT)
        self._fd, self._frame = fd, page + _FRAME_HEADER
        return True
