"""taskq: run Python functions later, elsewhere, and reliably."""

from __future__ import annotations

__version__ = "0.1.0"
