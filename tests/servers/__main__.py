"""``python -m tests.servers up|down|status|url [KIND...]``."""

from __future__ import annotations

import argparse
import sys

from tests.servers import KINDS, control
from tests.servers.processes import ServerError


def main() -> int:
    """Do what was asked; 1 where a server did not start, or has no URL."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.servers", description="Real servers for the tests."
    )
    parser.add_argument("command", choices=["up", "down", "status", "url"])
    parser.add_argument(
        "kinds", nargs="*", metavar="KIND", help=f"{', '.join(KINDS)}; all of them by default"
    )
    parser.add_argument("--wipe", action="store_true", help="with down: forget what was stored")
    given = parser.parse_args()
    unknown = sorted(set(given.kinds) - set(KINDS))
    if unknown:
        parser.error(f"unknown kind {unknown[0]!r}; there are {', '.join(KINDS)}")
    kinds = given.kinds or list(KINDS)
    if given.command == "down":
        control.down_all(kinds, wipe=given.wipe)
        return 0
    return {"up": _up, "status": _status, "url": _url}[given.command](kinds)


def _up(kinds: list[str]) -> int:
    answers = control.up_all(kinds)
    for kind, answer in answers.items():
        if isinstance(answer, ServerError):
            print(f"{kind}: {answer}", file=sys.stderr)
        else:
            print(f"{kind} {answer}")
    return int(any(isinstance(answer, ServerError) for answer in answers.values()))


def _status(kinds: list[str]) -> int:
    for kind in kinds:
        print(f"{kind} {control.status(kind)}")
    return 0


def _url(kinds: list[str]) -> int:
    urls = [control.url(kind) for kind in kinds]
    for url in filter(None, urls):
        print(url)
    return int(None in urls)


if __name__ == "__main__":
    sys.exit(main())
