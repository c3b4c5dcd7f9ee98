"""A newsletter: one job per subscriber, sent over SMTP by whatever workers there are."""

from __future__ import annotations

import hashlib
import os
import smtplib
from email.headerregistry import Address
from email.message import EmailMessage

from taskq import Reject, TaskQ

app = TaskQ("sqlite:///mail.db")

SENDER = "The Gazette <news@gazette.example>"


@app.task(queue="mail", max_retries=3, visibility_timeout=300, default_retry_delay=1)
def send_email(name: str, address: str, subject: str) -> str:
    """Send one copy; returns its Message-ID.

    A server that is busy or gone raises, and the job is tried again. A refusal for good would be the same the
    next time: the job goes to the dead letters at once.
    """
    message = compose(name, address, subject)
    host, _, port = os.environ.get("MAILING_SMTP", "127.0.0.1:8025").partition(":")
    with smtplib.SMTP(host, int(port), timeout=10) as server:
        try:
            server.send_message(message)
        except smtplib.SMTPRecipientsRefused as refused:
            code, reason = next(iter(refused.recipients.values()))
            if code >= 500:
                raise Reject(f"{code} {reason.decode(errors='replace')}") from None
            raise
    return str(message["Message-ID"])


def compose(name: str, address: str, subject: str) -> EmailMessage:
    """The message to one subscriber; raises ``Reject`` for what is no address."""
    local, _, domain = address.rpartition("@")
    if not local or not domain or ".." in address or " " in address or "@" in local:
        raise Reject(f"not an address: {address!r}")
    message = EmailMessage()
    message["From"] = SENDER
    message["To"] = Address(name, username=local, domain=domain.encode("idna").decode())
    message["Subject"] = subject
    # A job can run twice after a crash. The same job makes the same id, by which a mailbox knows a second copy.
    message["Message-ID"] = (
        f"<{hashlib.sha256(f'{address}|{subject}'.encode()).hexdigest()[:32]}@gazette.example>"
    )
    message.set_content(f"Dear {name},\n\nhere is what happened this week.\n\nThe Gazette\n")
    return message
