"""``docs/backends.md`` prints what the backends declare; neither can change without the other."""

from __future__ import annotations

import dataclasses
import pathlib
import re

from taskq.backends import from_url

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "backends.md"
URLS = {
    "sqlite": "sqlite:///nowhere.db",
    "memory": "memory://",
    "mongodb": "mongodb://nowhere",
    "kafka": "kafka://nowhere",
    "rabbitmq": "amqp://nowhere",
}
SAID = {
    "leases": "a lost worker's jobs return",
    "fencing": "every write of a run is checked against its token",
    "attempts": "attempts after a crash",
    "priority": "priority",
    "size": "sizes",
    "scheduled": "waiting jobs",
    "dead_listing": "listing dead jobs",
    "revive": "a dead job is revived",
    "pause": "a pause",
    "order": "order among equals",
    "persistent": "jobs outlive the process",
    "shared": "several processes",
    "stores": "is its own store",
    "lease_clock": "a lease is measured by",
}


def table():
    backends = [from_url(url) for url in URLS.values()]
    declared = [backend.capabilities for backend in backends]
    for backend in backends:
        backend.close()
    yield f"| | {' | '.join(URLS)} |"
    yield f"|---|{'---|' * len(URLS)}"
    for field in dataclasses.fields(declared[0]):
        if field.name != "name":
            values = [getattr(one, field.name) for one in declared]
            yield f"| {SAID[field.name]} | {' | '.join(cell(value) for value in values)} |"


def cell(value):
    said = {
        True: "yes",
        False: "no",
        "timed": "after a deadline",
        "connection": "with its connection",
        "machine": "the machine's clock",
        "server": "the server's clock",
    }
    return said.get(value, value)


def test_the_page_says_what_the_backends_declare():
    expected = "\n".join(table())
    found = re.search(
        r"<!-- capabilities -->\n\n(.*?)\n\n<!-- /capabilities -->",
        PAGE.read_text(encoding="utf-8"),
        re.DOTALL,
    )

    assert found, "the page has lost its marks"
    assert found[1] == expected, f"the table should read\n\n{expected}"
