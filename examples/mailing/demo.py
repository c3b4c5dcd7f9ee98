"""The whole example in one command: a mail server, a worker with two children, and the sending."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator

HERE = pathlib.Path(__file__).parent


def main() -> int:
    """Run it in this directory; ``report.txt`` and ``mailbox.jsonl`` say what happened."""
    port = free_port()
    environ = {**os.environ, "MAILING_SMTP": f"127.0.0.1:{port}"}
    with (
        running(["sink.py", "--port", str(port)], environ, until="listening"),
        running(["-m", "taskq", "worker", "-A", "app", "-c", "2", "--log-level", "critical"], environ),
    ):
        done = subprocess.run([sys.executable, "send.py"], cwd=HERE, env=environ, check=False)
    print(f"\nreport: {HERE / 'report.txt'}\nmail:   {HERE / 'mailbox.jsonl'}")
    return done.returncode


@contextlib.contextmanager
def running(words: list[str], environ: dict[str, str], *, until: str = "") -> Iterator[None]:
    """Keep a Python process running meanwhile, from when it has said ``until``; let it end in good order."""
    process = subprocess.Popen(
        [sys.executable, *words], cwd=HERE, env=environ, text=True, stdout=subprocess.PIPE if until else None
    )
    try:
        while until and process.stdout and until not in (process.stdout.readline() or until):
            pass
        yield
    finally:
        process.terminate()
        process.communicate()


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
