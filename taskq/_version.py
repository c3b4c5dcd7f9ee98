"""The version, where everything can read it without importing the rest."""

from __future__ import annotations

__version__ = "0.1.0"
