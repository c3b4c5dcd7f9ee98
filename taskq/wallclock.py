"""Wall clocks: when the wall times of a zone come, in UTC."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final

_SECOND: Final = timedelta(seconds=1)
#: No zone changes its offset and changes it back within this time.
_STRIDE: Final = timedelta(days=1)


def offset_at(instant: datetime, zone: tzinfo) -> timedelta:
    """What the wall clocks of ``zone`` are ahead of UTC."""
    return instant.astimezone(zone).utcoffset() or timedelta(0)


def instant_of(wall: datetime, zone: tzinfo) -> datetime:
    """When the naive ``wall`` comes, for the first time; for a time that is skipped, the end of the gap."""
    late = wall.replace(tzinfo=zone).astimezone(UTC)
    if late.astimezone(zone).replace(tzinfo=None) == wall:
        return late
    # In a gap, fold 0 counts by the old offset and ends after it, fold 1 by the new one and ends before.
    early = wall.replace(tzinfo=zone, fold=1).astimezone(UTC)
    return _change_between(early, late, zone)


def first_change(begin: datetime, end: datetime, zone: tzinfo) -> datetime | None:
    """The first instant in ``(begin, end]`` at which the offset is no longer that of ``begin``."""
    if zone is UTC:
        return None
    offset = offset_at(begin, zone)
    while begin < end:
        later = min(begin + _STRIDE, end)
        if offset_at(later, zone) != offset:
            return _change_between(begin, later, zone)
        begin = later
    return None


def _change_between(before: datetime, after: datetime, zone: tzinfo) -> datetime:
    """The second at which the offset changes, between two whole seconds on either side of one change."""
    offset = offset_at(before, zone)
    while after - before > _SECOND:
        middle = before + (after - before) // 2
        middle = middle.replace(microsecond=0)
        if offset_at(middle, zone) == offset:
            before = middle
        else:
            after = middle
    return after
