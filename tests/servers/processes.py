"""Processes that outlive the command which started them, known by pid and start time."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

#: How long a server may take to stop by itself before it is killed.
GRACE = 20.0


class ServerError(Exception):
    """A server could not be installed or started."""


@dataclass
class Process:
    """A process by pid; the start time tells it from a later one that was given the same number."""

    pid: int
    started: int

    def alive(self) -> bool:
        found = _stat(self.pid)
        return found is not None and found == self.started

    def stop(self, grace: float = GRACE) -> None:
        """Ask it to end, then make it."""
        for sent, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
            if not self.alive():
                break
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(self.pid)
                try:
                    self._signal(handle, sent, patience)
                finally:
                    os.close(handle)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)

    def _signal(self, handle: int, sent: signal.Signals, patience: float) -> None:
        # The handle pins the process: checked again, the number cannot change hands in between.
        if self.alive():
            signal.pidfd_send_signal(handle, sent)
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            poll.poll(patience * 1000)


def _stat(pid: int) -> int | None:
    """When a process started, in ticks since boot; ``None`` where it is gone or only its exit code is left."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


@dataclass
class Running:
    """One server: its processes, ports and URL, as kept in its state file."""

    directory: pathlib.Path
    ports: dict[str, int] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    url: str = ""

    @classmethod
    def load(cls, directory: pathlib.Path) -> Running | None:
        """What was last written down, if anything."""
        try:
            state = json.loads((directory / "state.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        processes = [Process(**process) for process in state["processes"]]
        return cls(directory, state["ports"], processes, state["url"])

    def save(self) -> None:
        """Write it down, whole or not at all."""
        processes = [{"pid": process.pid, "started": process.started} for process in self.processes]
        state = {"url": self.url, "ports": self.ports, "processes": processes}
        draft = self.directory / "state.json.new"
        draft.write_text(json.dumps(state, indent=1), encoding="utf-8")
        draft.replace(self.directory / "state.json")

    def alive(self) -> bool:
        return bool(self.processes) and all(process.alive() for process in self.processes)

    def stop(self) -> None:
        """End its processes, the last started first."""
        for process in reversed(self.processes):
            process.stop()

    def port(self, name: str) -> int:
        """A port that stays with this server, so that its URL survives a restart."""
        if name not in self.ports or not _free(self.ports[name]):
            self.ports[name] = _any_port()
        return self.ports[name]

    def folder(self, name: str) -> pathlib.Path:
        """A directory of this server's own."""
        path = self.directory / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def spawn(
        self, command: Sequence[str | os.PathLike[str]], environ: Mapping[str, str] | None = None
    ) -> Process:
        """Start a process of this server in a session of its own, and write it down at once."""
        words = [os.fspath(word) for word in command]
        log = os.open(self.directory / "output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        actions = [
            (os.POSIX_SPAWN_DUP2, null, 0),
            (os.POSIX_SPAWN_DUP2, log, 1),
            (os.POSIX_SPAWN_DUP2, log, 2),
        ]
        try:
            pid = os.posix_spawn(
                words[0], words, {**os.environ, **(environ or {})}, file_actions=actions, setsid=True
            )
        finally:
            os.close(log)
            os.close(null)
        process = Process(pid, _stat(pid) or 0)
        self.processes.append(process)
        self.save()
        return process

    def wait(self, what: str, ready: Callable[[], bool], timeout: float = 120.0) -> None:
        """Wait until ``ready()``; raises ``ServerError`` at the timeout or when a process of the server has died."""
        pause = threading.Event()
        deadline = time.monotonic() + timeout
        while not ready():
            if not self.alive():
                raise ServerError(f"{what}: the process has died\n{self.tail()}")
            if time.monotonic() > deadline:
                raise ServerError(f"{what}: not ready after {timeout:g} s\n{self.tail()}")
            pause.wait(0.1)

    def tail(self) -> str:
        """The end of what the server printed."""
        log = self.directory / "output.log"
        return log.read_text(encoding="utf-8", errors="replace")[-2000:] if log.exists() else ""


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _any_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def listens(port: int) -> bool:
    """Whether something accepts connections there."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def run(command: Sequence[str | os.PathLike[str]], what: str, timeout: float = 600.0) -> None:
    """Run a command to its end; what it printed becomes the error if it fails."""
    words = [os.fspath(word) for word in command]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerError(f"{what}: {error}") from error
    if done.returncode:
        raise ServerError(f"{what} failed:\n{(done.stdout + done.stderr)[-3000:]}")
