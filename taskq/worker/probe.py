"""Liveness: a file that is touched, and a page on loopback, while the worker works.

A worker lives while its loop turns and its backend has answered within ``patience`` seconds. One that does not can
be replaced by whoever watches: ``find probe -newermt '-30 seconds'``, or ``GET /live`` (200, or 503 with the reason).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

from taskq.errors import ConfigurationError

#: How often the file is touched, in seconds.
_EVERY: Final = 1.0


class Probe:
    """Tells whether the worker lives. ``ailment`` returns what is wrong, or ``None``."""

    def __init__(self, ailment: Callable[[], str | None], *, file: str | None, port: int | None) -> None:
        self._ailment = ailment
        self._file = None if file is None else Path(file)
        self._server = None if port is None else _serve(ailment, port)
        self._stopping = threading.Event()
        self._threads = (
            [threading.Thread(target=self._touch, name="taskq-probe", daemon=True)] if file else []
        )
        if self._server is not None:
            self._threads.append(
                threading.Thread(target=self._server.serve_forever, name="taskq-probe", daemon=True)
            )

    @property
    def port(self) -> int | None:
        """Where the page is served."""
        return None if self._server is None else int(self._server.server_address[1])

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End, and remove the file. Idempotent."""
        self._stopping.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        for thread in self._threads:
            thread.join(2 * _EVERY)
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _touch(self) -> None:
        assert self._file is not None
        while True:
            if self._ailment() is None:
                self._file.touch()
            if self._stopping.wait(_EVERY):
                return


def _serve(ailment: Callable[[], str | None], port: int) -> ThreadingHTTPServer:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.rstrip("/") != "/live":
                self.send_error(404, "the only page is /live")
                return
            wrong = ailment()
            body = f"{wrong or 'working'}\n".encode()
            self.send_response(200 if wrong is None else 503)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """A probe that asks every second is no news."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Page)
    except OSError as error:
        raise ConfigurationError(
            f"probe_port={port}: {error.strerror or error}; choose another port"
        ) from error
