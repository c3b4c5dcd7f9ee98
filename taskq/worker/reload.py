"""``--watch``: tells when a source file below the current directory has changed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

#: How often files are looked at, in seconds.
_EVERY: Final = 0.5
_SKIPPED: Final = frozenset({"__pycache__", "node_modules", "site-packages", "venv"})


class SourceWatch:
    """Calls ``on_change`` after a ``.py`` file below ``root`` was changed, added or removed."""

    def __init__(self, on_change: Callable[[], None], root: Path | None = None) -> None:
        self._on_change = on_change
        self._root = root or Path.cwd()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="taskq-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End. Idempotent."""
        self._stopping.set()

    def _serve(self) -> None:
        known = self._stamps()
        while not self._stopping.wait(_EVERY):
            stamps = self._stamps()
            if stamps != known:
                known = stamps
                self._on_change()

    def _stamps(self) -> dict[str, int]:
        return dict(_sources(self._root))


def _sources(root: Path) -> Iterator[tuple[str, int]]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _SKIPPED]
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(folder, name)  # noqa: PTH118 - os.walk deals in strings
                try:
                    yield path, os.stat(path).st_mtime_ns  # noqa: PTH116
                except FileNotFoundError:
                    continue  # removed since it was listed
