"""The places jobs can be kept. One room per system; each driver is imported in its own room only."""

from __future__ import annotations
