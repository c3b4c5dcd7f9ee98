"""The indexes, and the mark of the layout."""

from __future__ import annotations

from typing import Final

from taskq.backends.mongodb.connection import Rooms
from taskq.backends.mongodb.documents import ASIDE
from taskq.errors import SchemaError

#: Of the layout; grows when older versions of taskq cannot read it any more.
VERSION: Final = 1

#: Bytes of the collection that rings are followed in.
_BELLS: Final = 128 * 1024
#: The code of an error that says that a collection is there already.
_EXISTS: Final = 48

_PRESENT: Final = {"$exists": True}
#: Name, fields and filter of each index on jobs. Only the first is written for a plain job that waits.
_JOBS: Final = (
    ("place", ("s", "q", "r", "d", "n"), None),
    ("lease", ("e",), "e"),
    ("forget", ("f",), "f"),
    ("expires", ("x",), "x"),
    ("cancel", ("w", "c"), "c"),
    ("line", ("l", "s", "q", "r", "d", "n"), "l"),
    ("sequence", ("o", "n"), "o"),
    ("gates", ("g",), "g"),
)


def prepare(rooms: Rooms) -> None:
    """Make what is missing; raise ``SchemaError`` where a newer version of taskq was here."""
    found = rooms.facts.find_one({"_id": "schema"})
    if found is not None:
        if found["version"] > VERSION:
            raise SchemaError(
                f"{rooms.jobs.full_name} has the layout {found['version']} of a newer taskq; this one knows {VERSION}"
            )
        if found["version"] == VERSION:
            return
    from pymongo import IndexModel

    rooms.jobs.create_indexes(
        [
            IndexModel(
                [(field, 1) for field in fields],
                name=name,
                **({"partialFilterExpression": {present: _PRESENT}} if present else {}),
            )
            for name, fields, present in _JOBS
        ]
        + [IndexModel([("t", 1)], name="aside", partialFilterExpression={"s": ASIDE})]
    )
    rooms.lanes.create_indexes([IndexModel([("q", 1), ("open", 1), ("r", 1), ("v", 1)], name="turns")])
    rooms.keys.create_indexes(
        [IndexModel([("ends", 1)], name="ends", partialFilterExpression={"ends": {"$gt": 0}})]
    )
    rooms.facts.create_indexes([IndexModel([("kind", 1)], name="kind")])
    for room in (rooms.gates, rooms.schedules, rooms.workers, rooms.signals):
        room.create_indexes([IndexModel([("seen", 1)], name="seen", sparse=True)])
    _hang_bells(rooms)
    rooms.facts.update_one({"_id": "schema"}, {"$set": {"version": VERSION}}, upsert=True)


def _hang_bells(rooms: Rooms) -> None:
    """Make the capped collection; one that is empty cannot be followed, so it has an entry."""
    from pymongo.errors import CollectionInvalid, OperationFailure

    try:
        rooms.bells.database.create_collection(rooms.bells.name, capped=True, size=_BELLS, check_exists=False)
    except (CollectionInvalid, OperationFailure) as error:
        if getattr(error, "code", _EXISTS) not in (_EXISTS, None):
            raise
    rooms.bells.insert_one({"names": []})
