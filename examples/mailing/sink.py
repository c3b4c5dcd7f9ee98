"""A mail server for one machine: it keeps what it is sent as lines of JSON, and delivers nothing.

It behaves like real ones: mail for ``grey.example`` is put off at the first try, ``gone.invalid`` is not known.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import signal
import threading
from email import message_from_string, policy
from email.message import EmailMessage
from typing import cast

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, Envelope, Session


class Mailbox:
    """Decides about recipients and writes down messages."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.path.write_text("", encoding="utf-8")
        self._seen: set[str] = set()

    async def handle_RCPT(  # noqa: N802 - the name that aiosmtpd calls
        self, _server: SMTP, _session: Session, envelope: Envelope, address: str, _options: list[str]
    ) -> str:
        domain = address.rpartition("@")[2].lower()
        if domain == "gone.invalid":
            return "550 5.1.2 no such domain"
        if domain == "grey.example" and address not in self._seen:
            self._seen.add(address)
            return "451 4.7.1 greylisted, try again later"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, _server: SMTP, _session: Session, envelope: Envelope) -> str:  # noqa: N802
        content = envelope.content if isinstance(envelope.content, bytes) else b""
        message = cast("EmailMessage", message_from_string(content.decode("utf-8"), policy=policy.default))
        line = {
            "to": envelope.rcpt_tos[0],
            "name": message["To"].addresses[0].display_name,
            "subject": message["Subject"],
            "id": message["Message-ID"],
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        return "250 kept"


def main() -> None:
    """Listen until told to stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8025)
    parser.add_argument("--mailbox", type=pathlib.Path, default=pathlib.Path("mailbox.jsonl"))
    given = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    controller = Controller(
        Mailbox(given.mailbox), hostname="127.0.0.1", port=given.port, enable_SMTPUTF8=True
    )
    controller.start()
    print(f"listening on 127.0.0.1:{given.port}, keeping mail in {given.mailbox}", flush=True)
    stop.wait()
    controller.stop()


if __name__ == "__main__":
    main()
