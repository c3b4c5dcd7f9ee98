"""A wire that can be cut, held up and refused: between a client and its server, for tests of faults."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self

_CHUNK = 1 << 16


class Proxy:
    """Listens on a port of its own and passes bytes on to ``host:port``, as long as it is told to."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._flows = threading.Event()
        self._flows.set()
        self._refuses = False
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.accepted = 0  #: connections, ever
        self.turned_away = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def url(self, url: str) -> str:
        """``url`` with this proxy in the place of its server."""
        host, port = self._target
        return url.replace(f"{host}:{port}", f"127.0.0.1:{self.port}")

    def cut(self) -> None:
        """End every connection, both ways, without a word."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def stall(self) -> None:
        """Pass nothing on; connections stay, as behind a broken router."""
        self._flows.clear()

    def refuse(self) -> None:
        """Cut, and let nobody in."""
        self._refuses = True
        self.cut()

    def restore(self) -> None:
        """As if nothing had been."""
        self._refuses = False
        self._flows.set()

    def close(self) -> None:
        self.refuse()
        self._flows.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- threads ----------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._refuses:
                self.turned_away += 1
                client.close()
                continue
            self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target)
        except OSError:
            client.close()
            return
        self.accepted += 1
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._sockets |= {client, server}
        for source, sink in ((client, server), (server, client)):
            threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                self._flows.wait()
                sink.sendall(data)
        with self._lock:
            self._sockets -= {source, sink}
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
