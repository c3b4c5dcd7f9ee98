"""``python -m taskq``."""

from __future__ import annotations

from taskq.cli import main

if __name__ == "__main__":
    main(prog_name="taskq")
