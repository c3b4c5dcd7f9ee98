"""Runs jobs: a supervisor that runs no user code, and the children that do."""

from __future__ import annotations
