"""Real servers for the tests, on this machine and for it alone.

``python -m tests.servers up|down|status|url [KIND...]`` from the root of the repository. Each server listens on
127.0.0.1 only, on ports of its own, and keeps everything under ``.servers`` (or ``TASKQ_TEST_SERVERS_DIR``).
"""

from __future__ import annotations

from tests.servers.control import KINDS, down, down_all, pids, status, up, up_all, url

__all__ = ["KINDS", "down", "down_all", "pids", "status", "up", "up_all", "url"]
