"""Every statement, by name. Lists of numbers or names travel as one JSON parameter."""

# ruff: noqa: S608 - statements are built from constants of this package only

from __future__ import annotations

from typing import Final

from taskq.backends.sqlite.rows import FULL_COLUMNS, INSERTED_COLUMNS, LENT_COLUMNS
from taskq.job import KEPT_ATTEMPTS, State

# -- in -------------------------------------------------------------------------------

PUSH: Final = (
    f"INSERT INTO job ({INSERTED_COLUMNS}) VALUES ({', '.join('?' * len(INSERTED_COLUMNS.split(',')))})"
    " ON CONFLICT (id) DO NOTHING"
)
COUNT: Final = (
    "INSERT INTO counter (queue, state, n) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n"
)

# -- taking ---------------------------------------------------------------------------

# Whether anything of these queues could be claimed now, and when something will be due.
LOOK: Final = """
    SELECT
        max(EXISTS (SELECT 1 FROM job WHERE state = 0 AND lane IS NULL AND queue = line.value)),
        min((SELECT min(due) FROM job WHERE state = 2 AND queue = line.value)),
        max(EXISTS (SELECT 1 FROM lane WHERE pending > 0 AND queue = line.value))
    FROM json_each(?) AS line
    WHERE line.value NOT IN (SELECT name FROM paused WHERE what = 'queue')
"""
# The same for one job of these queues; one row even where there is none.
LOOK_AT: Final = """
    SELECT
        max(state = 0 AND task NOT IN (SELECT name FROM paused WHERE what = 'task') AND (lane IS NULL OR (
            EXISTS (
                SELECT 1 FROM lane
                WHERE name = job.lane AND lane.queue = job.queue AND lane.rank = job.rank AND open = 1
                    AND NOT EXISTS (SELECT 1 FROM gate WHERE gate.name = lane.task AND gate.open = 0)
            ) AND (lane < '=' OR seq = (
                SELECT min(head.seq) FROM job AS head INDEXED BY job_sequence
                WHERE head.lane >= '=' AND head.lane < '>' AND head.state < 5 AND head.lane = job.lane
            ))
        ))),
        min(CASE state WHEN 2 THEN due END)
    FROM job
    WHERE queue IN (SELECT value FROM json_each(?)) AND queue NOT IN (SELECT name FROM paused WHERE what = 'queue')
        AND id = ? AND state IN (0, 2)
"""
# What keeps a take from being a plain claim: pauses, and jobs that wait in lanes.
SPECIAL: Final = """
    SELECT what, name FROM paused
    UNION ALL SELECT 'lane', '' FROM (SELECT 1 FROM lane INDEXED BY lane_waiting WHERE pending > 0 LIMIT 1)
"""
FENCE: Final = "UPDATE meta SET token = token + 1 RETURNING token, boot"
CLAIM: Final = f"""
    UPDATE job
    SET state = 1, token = ?, worker = ?, deliveries = deliveries + 1,
        deadline = CASE WHEN lease > 0 THEN lease + ? ELSE 9e15 END
    WHERE seq IN (
        SELECT seq FROM job WHERE state = 0 AND lane IS NULL AND queue = ? ORDER BY rank, due, seq LIMIT ?
    )
    RETURNING {LENT_COLUMNS}
"""
CLAIM_ONE: Final = f"""
    UPDATE job
    SET state = 1, token = ?, worker = ?, deliveries = deliveries + 1,
        deadline = CASE WHEN lease > 0 THEN lease + ? ELSE 9e15 END
    WHERE id = ? AND state = 0 AND lane IS NULL AND queue IN (SELECT value FROM json_each(?))
    RETURNING {LENT_COLUMNS}
"""
CLAIM_SEQS: Final = f"""
    UPDATE job
    SET state = 1, token = ?, worker = ?, deliveries = deliveries + 1,
        deadline = CASE WHEN lease > 0 THEN lease + ? ELSE 9e15 END
    WHERE seq IN (SELECT value FROM json_each(?))
    RETURNING {LENT_COLUMNS}
"""
# An announced job that is claimed, or adopted, is an ordinary one from then on.
DISCLOSE: Final = """
    UPDATE job SET lane = NULL WHERE id IN (SELECT value FROM json_each(?)) AND state = 0 AND lane = char(2)
    RETURNING seq, queue
"""
# Priority by priority, because each is a range of the index.
ADOPT: Final = """
    UPDATE job SET lane = NULL WHERE seq IN (
        SELECT job.seq FROM json_each(?) AS priority CROSS JOIN job INDEXED BY job_lane
        WHERE state = 0 AND lane IS NOT NULL AND lane = char(2) AND queue = ? AND rank = -priority.value AND due < ?
        LIMIT ?
    )
"""
ANY_ANNOUNCED: Final = """
    SELECT EXISTS (
        SELECT 1 FROM job INDEXED BY job_lane
        WHERE state = 0 AND lane IS NOT NULL AND lane = char(2) AND queue IN (SELECT value FROM json_each(?))
    )
"""
LENDABLE: Final = """
    SELECT count(*) FROM (SELECT 1 FROM job WHERE state = 0 AND lane IS NULL AND queue = ? LIMIT ?)
"""
PENDING_COUNT: Final = "SELECT n FROM counter WHERE queue = ? AND state = 0"
NEXT_DUE: Final = "SELECT min(due) FROM job WHERE state = 2 AND queue = ?"
STAGE: Final = """
    UPDATE job SET state = 0
    WHERE seq IN (SELECT seq FROM job WHERE state = 2 AND queue = ? AND due <= ? ORDER BY due, seq LIMIT ?)
    RETURNING lane, rank, weight
"""

# -- lanes ----------------------------------------------------------------------------

LANES: Final = "SELECT EXISTS (SELECT 1 FROM lane WHERE pending > 0 AND queue = ?)"
ENTER_LANE: Final = """
    INSERT INTO lane (name, queue, rank, task, key, weight, pending) VALUES (?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET pending = pending + excluded.pending, weight = excluded.weight
"""
LEAVE_LANE: Final = "UPDATE lane SET pending = pending - ? WHERE name = ? AND queue = ? AND rank = ?"
MOVED_LANE: Final = "UPDATE lane SET open = 1 WHERE name = ? AND open = 0"
COUNT_GATE: Final = """
    INSERT INTO gate (name, running, unseen, fresh) VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET running = running + excluded.running, unseen = unseen + excluded.unseen,
        fresh = fresh + excluded.fresh, open = 1, until = NULL
"""
UNNOTED: Final = "SELECT seq FROM job WHERE started IS NULL AND seq IN (SELECT value FROM json_each(?))"
NEXT_TASK: Final = """
    SELECT min(task) FROM lane INDEXED BY lane_waiting WHERE pending > 0 AND queue = ? AND open = 1 AND task > ?
"""
FIRST_TASK: Final = NEXT_TASK.replace("task > ?", "task >= ?")
GATE_OPEN: Final = "SELECT open FROM gate WHERE name = ?"
_OPEN_LANES: Final = """
    SELECT name, rank, vtime, weight, pending, key FROM lane INDEXED BY lane_waiting
    WHERE pending > 0 AND queue = ? AND open = 1 AND task = ?{} ORDER BY rank, vtime LIMIT ?
"""
OPEN_LANES: Final = _OPEN_LANES.format("")
OPEN_LANES_OF: Final = _OPEN_LANES.format(" AND rank = ?")
ONE_LANE: Final = """
    SELECT job.seq, job.queue, job.rank, job.lane, lane.vtime, lane.weight, lane.task, lane.key
    FROM job JOIN lane ON lane.name = job.lane AND lane.queue = job.queue AND lane.rank = job.rank
    WHERE job.id = ? AND job.state = 0 AND job.queue IN (SELECT value FROM json_each(?))
"""
PLAIN: Final = """
    SELECT seq, rank, due FROM job WHERE state = 0 AND lane IS NULL AND queue = ? ORDER BY rank, due, seq LIMIT ?
"""
PLAIN_OF: Final = """
    SELECT seq, rank, due FROM job WHERE state = 0 AND lane IS NULL AND queue = ? AND rank = ?
    ORDER BY due, seq LIMIT ?
"""
IN_LANE: Final = """
    SELECT seq, due FROM job INDEXED BY job_lane
    WHERE state = 0 AND lane IS NOT NULL AND lane = ? AND queue = ? AND rank = ? ORDER BY due, seq LIMIT ?
"""
# The first job of a sequence that has not ended.
HEAD: Final = """
    SELECT seq, state, queue, rank FROM job INDEXED BY job_sequence
    WHERE lane >= '=' AND lane < '>' AND state < 5 AND lane = ? ORDER BY seq LIMIT 1
"""
TURNS: Final = "SELECT rank, vtime, plain FROM turn WHERE queue = ?"
SET_TURN: Final = """
    INSERT INTO turn (queue, rank, vtime, plain) VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET vtime = excluded.vtime, plain = excluded.plain
"""
SERVED: Final = "UPDATE lane SET vtime = ? WHERE name = ? AND queue = ? AND rank = ?"
SHUT_LINE: Final = "UPDATE lane SET open = 0 WHERE name = ? AND queue = ? AND rank = ?"
SHUT_KEY: Final = "UPDATE lane SET open = 0 WHERE name IN ('-' || ?, '=' || ?)"
OPEN_KEY: Final = "UPDATE lane SET open = 1 WHERE name IN ('-' || ?, '=' || ?)"
OPEN_NAMED: Final = "UPDATE lane SET open = 1 WHERE key = ? AND open = 0"
OPEN_TASK: Final = "UPDATE lane SET open = 1 WHERE task = ? AND open = 0"
OPEN_ALL: Final = ("UPDATE lane SET open = 1 WHERE open = 0", "UPDATE gate SET open = 1, until = NULL")
GATES: Final = """
    SELECT name, running, unseen, fresh, log, boot, shift FROM gate WHERE name IN (SELECT value FROM json_each(?))
"""
FRESH_GATES: Final = "SELECT name, running, unseen, fresh, log, boot, shift FROM gate WHERE fresh > 0"
LOG: Final = "UPDATE gate SET fresh = 0, log = ?, boot = ?, shift = ?, void = ? WHERE name = ?"
SHUT_GATE: Final = """
    INSERT INTO gate (name, open, until) VALUES (?, 0, ?)
    ON CONFLICT DO UPDATE SET open = 0, until = excluded.until
"""
OPEN_GATE: Final = "UPDATE gate SET open = 1, until = NULL WHERE name = ?"
OPEN_GATES: Final = "UPDATE gate SET open = 1, until = NULL WHERE name >= ? AND name < ?"
DUE_GATES: Final = "SELECT name FROM gate WHERE until IS NOT NULL AND until <= ?"
NEXT_GATE: Final = """
    SELECT until FROM gate
    WHERE until IS NOT NULL AND (
        EXISTS (
            SELECT 1 FROM lane
            WHERE name IN ('-' || gate.name, '=' || gate.name) AND pending > 0
                AND queue IN (SELECT value FROM json_each(:queues))
        ) OR EXISTS (
            SELECT 1 FROM lane
            WHERE pending > 0 AND queue IN (SELECT value FROM json_each(:queues)) AND open = 1 AND task = gate.name
        )
    )
    ORDER BY until LIMIT 1
"""
LIMITS: Final = "SELECT task, rate, concurrency, key_rate, key_concurrency FROM task_limit"
LIMITS_OF: Final = f"{LIMITS} WHERE task = ?"
DECLARE: Final = """
    INSERT INTO task_limit (task, version, rate, concurrency, key_rate, key_concurrency) VALUES (?, 1, ?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET version = version + 1, rate = excluded.rate, concurrency = excluded.concurrency,
        key_rate = excluded.key_rate, key_concurrency = excluded.key_concurrency
    WHERE (rate, concurrency, key_rate, key_concurrency)
        IS NOT (excluded.rate, excluded.concurrency, excluded.key_rate, excluded.key_concurrency)
"""
SET_ASIDE: Final = """
    UPDATE job
    SET state = 0, token = 0, worker = NULL, deadline = NULL, deliveries = deliveries - 1,
        lane = char(1) || task || char(1) || coalesce(lane, '')
    WHERE seq IN (SELECT value FROM json_each(?))
"""
# A job that is set aside is known by its lane alone: char(1), its task, char(1), the lane that it came from.
ANY_ASIDE: Final = """
    SELECT lane FROM job INDEXED BY job_lane
    WHERE state = 0 AND lane IS NOT NULL AND lane >= char(1) AND lane < char(2) AND lane >= ? ORDER BY lane LIMIT 1
"""
TAKE_BACK: Final = """
    UPDATE job SET lane = nullif(substr(lane, length(task) + 3), '')
    WHERE seq IN (
        SELECT seq FROM job INDEXED BY job_lane
        WHERE state = 0 AND lane IS NOT NULL AND lane >= ? AND lane < ? LIMIT ?
    )
    RETURNING queue, rank, lane, weight
"""
ANY_EMPTY: Final = """
    SELECT
        EXISTS (SELECT 1 FROM gate INDEXED BY gate_idle WHERE running = 0 AND fresh = 0 AND open = 1 AND void <= :now)
        OR EXISTS (SELECT 1 FROM lane INDEXED BY lane_empty WHERE pending = 0)
"""
FORGET_LANES: Final = """
    DELETE FROM lane WHERE (name, queue, rank) IN (
        SELECT name, queue, rank FROM lane INDEXED BY lane_empty
        WHERE pending = 0 AND vtime <= coalesce(
            (SELECT vtime FROM turn WHERE turn.queue = lane.queue AND turn.rank = lane.rank), 0)
        LIMIT ?
    )
"""
FORGET_GATES: Final = """
    DELETE FROM gate WHERE name IN (
        SELECT name FROM gate INDEXED BY gate_idle
        WHERE running = 0 AND fresh = 0 AND open = 1 AND void <= ? LIMIT ?
    )
"""

# How many wait in a line, those included whose task is paused (of them, only as many as matter).
WAITING_IN: Final = """
    SELECT coalesce((SELECT sum(pending) FROM lane WHERE name = ?), 0) + (SELECT count(*) FROM (
        SELECT 1 FROM job INDEXED BY job_lane WHERE state = 0 AND lane IS NOT NULL AND lane = ? LIMIT ?
    ))
"""
KNOWN: Final = "SELECT 1 FROM job WHERE id = ?"
OLDEST_IN: Final = f"""
    SELECT {FULL_COLUMNS} FROM job INDEXED BY job_lane
    WHERE state = 0 AND lane IS NOT NULL AND lane IN (?, ?) AND id <> ? ORDER BY rank DESC, due, seq LIMIT 1
"""

# -- settling -------------------------------------------------------------------------

HELD: Final = "SELECT seq, token, state FROM job WHERE seq IN (SELECT value FROM json_each(?))"
FINISH: Final = """
    UPDATE job
    SET state = 5, ended = ?, forget = ?, result = ?, worker = NULL, deadline = NULL, started = NULL
    WHERE seq = ?
"""
DELETE: Final = "DELETE FROM job WHERE seq IN (SELECT value FROM json_each(?))"
MOVE: Final = """
    UPDATE job
    SET state = ?, queue = ?, rank = ?, due = ?, attempts = ?, losses = ?, deliveries = ?, generation = ?,
        first_started = ?, ended = ?, forget = ?, error = ?, result = ?, tries = ?,
        worker = NULL, deadline = NULL, started = NULL
    WHERE seq = ?
"""
RECORD: Final = f"INSERT INTO attempt VALUES ({', '.join('?' * 11)})"
RECORD_BOUND: Final = f"DELETE FROM attempt WHERE seq = ? AND n <= ? - {KEPT_ATTEMPTS}"
RELEASE: Final = """
    UPDATE job
    SET state = 0, worker = NULL, deadline = NULL, started = NULL, deliveries = deliveries - 1
    WHERE seq = ?
"""
EXTEND: Final = "UPDATE job SET deadline = ? WHERE seq = ?"
NOTE: Final = """
    UPDATE job
    SET started = coalesce(:started, started), first_started = coalesce(first_started, :started),
        progress = coalesce(:progress, progress)
    WHERE seq = :seq
"""

# -- cancelling -----------------------------------------------------------------------

REQUEST: Final = "INSERT INTO cancel_request (seq, worker, reason) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
ANY_REQUEST: Final = "SELECT EXISTS (SELECT 1 FROM cancel_request)"
REQUESTS: Final = "SELECT seq, reason FROM cancel_request WHERE seq IN (SELECT value FROM json_each(?))"
DROP_REQUESTS: Final = "DELETE FROM cancel_request WHERE seq IN (SELECT value FROM json_each(?))"
REQUESTED_OF: Final = "SELECT id FROM cancel_request JOIN job USING (seq) WHERE cancel_request.worker = ?"

# -- looking --------------------------------------------------------------------------

BY_SEQ: Final = f"SELECT {FULL_COLUMNS} FROM job WHERE seq IN (SELECT value FROM json_each(?))"
BY_ID: Final = f"SELECT {FULL_COLUMNS} FROM job WHERE id IN (SELECT value FROM json_each(?))"
HISTORY: Final = """
    SELECT seq, number, generation, worker, started, ended, error_type, message, traceback, delay
    FROM attempt WHERE seq IN (SELECT value FROM json_each(?)) ORDER BY seq, n
"""
COUNTS: Final = "SELECT queue, state, n FROM counter WHERE n > 0"
COUNTS_OF: Final = "SELECT queue, state, n FROM counter WHERE n > 0 AND queue = ?"
PROGRESS: Final = "SELECT progress FROM job WHERE id = ?"
# Of these ids, those that are still to end.
UNENDED: Final = "SELECT id FROM job WHERE id IN (SELECT value FROM json_each(?)) AND state < 5"

_LIST: Final = f"SELECT {{key}}, {FULL_COLUMNS} FROM job {{index}} WHERE queue = ?"


def _listing(index: str, *key: str, states: str = "state = {code}") -> tuple[str, str]:
    """The statement for the first slice, and for one after a key of as many values."""
    columns = ", ".join(key)
    start = _LIST.format(key=columns, index=f"INDEXED BY {index}") + f" AND {states}"
    order = f" ORDER BY {columns} LIMIT ?"
    return start + order, f"{start} AND ({columns}) > ({', '.join('?' * len(key))}){order}"


#: Per state, the statements of ``_listing`` and how many values the key has.
LISTINGS: Final[dict[State, tuple[str, str, int]]] = {
    State.PENDING: (
        *_listing("job_pending", "rank", "due", "seq", states="state = 0 AND lane IS NULL"),
        3,
    ),
    State.SCHEDULED: (*_listing("job_scheduled", "due", "seq", states="state = 2"), 2),
    State.RESERVED: (*_listing("job_reserved", "seq", states="state = 1"), 1),
    State.BLOCKED: (*_listing("job_blocked", "seq", states="state = 3"), 1),
    State.WAITING: (*_listing("job_waiting", "seq", states="state = 4"), 1),
    State.COMPLETED: (*_listing("job_ended", "ended", "seq", states="state = 5 AND ended IS NOT NULL"), 2),
    State.DEAD: (*_listing("job_ended", "ended", "seq", states="state = 6 AND ended IS NOT NULL"), 2),
    State.CANCELLED: (*_listing("job_ended", "ended", "seq", states="state = 7 AND ended IS NOT NULL"), 2),
}

#: Jobs in lanes that are pending: to be merged with the others.
LANED_LISTING: Final = _listing("job_laned", "rank", "due", "seq", states="state = 0 AND lane IS NOT NULL")

# -- upkeep ---------------------------------------------------------------------------

BOOT: Final = "SELECT boot FROM meta"
SET_BOOT: Final = "UPDATE meta SET boot = ?"
END_LEASES: Final = "UPDATE job SET deadline = -1 WHERE state = 1 AND deadline IS NOT NULL"
FIRST_DEADLINE: Final = "SELECT min(deadline) FROM job WHERE state = 1"
OVERDUE: Final = f"""
    SELECT {FULL_COLUMNS} FROM job INDEXED BY job_reserved
    WHERE state = 1 AND deadline <= ? ORDER BY deadline, seq LIMIT ?
"""
# Reservations that never end by time, by who holds them.
TIMELESS: Final = (
    "SELECT DISTINCT worker FROM job INDEXED BY job_reserved WHERE state = 1 AND deadline = 9e15"
)
TIMELESS_OF: Final = f"""
    SELECT {FULL_COLUMNS} FROM job INDEXED BY job_reserved
    WHERE state = 1 AND deadline = 9e15 AND worker IN (SELECT value FROM json_each(?)) LIMIT ?
"""
UNFENCE: Final = "UPDATE job SET token = 0 WHERE seq IN (SELECT value FROM json_each(?))"
TOO_LATE: Final = f"""
    SELECT {FULL_COLUMNS} FROM job INDEXED BY job_expires
    WHERE expires IS NOT NULL AND state IN (0, 2) AND expires <= ? ORDER BY expires LIMIT ?
"""
NEXT_EXPIRY: Final = (
    "SELECT min(expires) FROM job INDEXED BY job_expires WHERE expires IS NOT NULL AND state IN (0, 2)"
)
NEXT_FORGET: Final = "SELECT min(forget) FROM job WHERE forget IS NOT NULL"
# These delete a few rows at a time and return what to count off.
_DELETE: Final = (
    "DELETE FROM job WHERE seq IN (SELECT seq FROM job {where} LIMIT ?) RETURNING queue, state, lane, rank"
)
RETIRE: Final = _DELETE.format(where="WHERE forget <= ? ORDER BY forget")
RETIRE_OLDEST: Final = _DELETE.format(
    where="WHERE queue = ? AND state = ? AND ended IS NOT NULL ORDER BY ended, seq"
)
PURGE_WAITING: Final = {
    State.PENDING: """
        WITH line (name) AS (SELECT ?)
        DELETE FROM job WHERE seq IN (
            SELECT seq FROM line CROSS JOIN job WHERE queue = name AND state = 0 AND lane IS NULL
            UNION ALL
            SELECT seq FROM line CROSS JOIN job WHERE queue = name AND state = 0 AND lane IS NOT NULL
            LIMIT ?
        )
        RETURNING queue, state, lane, rank
    """,
    State.SCHEDULED: _DELETE.format(where="WHERE queue = ? AND state = 2"),
    State.BLOCKED: _DELETE.format(where="WHERE queue = ? AND state = 3"),
    State.WAITING: _DELETE.format(where="WHERE queue = ? AND state = 4"),
}
FORGET: Final = """
    DELETE FROM job WHERE id IN (SELECT value FROM json_each(?)) AND state >= 5 RETURNING queue, state, lane, rank
"""
DEAD: Final = f"""
    SELECT {FULL_COLUMNS} FROM job
    WHERE queue = ? AND state = 6 AND ended IS NOT NULL AND (ended, seq) > (?, ?) ORDER BY ended, seq LIMIT ?
"""

# -- pauses, workers, schedules -------------------------------------------------------

PAUSE: Final = "INSERT INTO paused (what, name) VALUES (?, ?) ON CONFLICT DO NOTHING"
RESUME: Final = "DELETE FROM paused WHERE what = ? AND name = ?"
PAUSED_OF: Final = "SELECT name FROM paused WHERE what = ?"
HEARTBEAT: Final = "INSERT OR REPLACE INTO worker (id, seen, info) VALUES (?, ?, ?)"
WORKERS: Final = "SELECT info FROM worker WHERE seen >= ?"
FORGET_WORKER: Final = "DELETE FROM worker WHERE id = ?"
FORGET_SILENT: Final = "DELETE FROM worker WHERE seen < ?"
SCHEDULES: Final = "SELECT name, revision, record FROM schedule ORDER BY name"
NEW_SCHEDULE: Final = """
    INSERT INTO schedule (name, revision, record) VALUES (:name, 1, :record) ON CONFLICT DO NOTHING
"""
WRITE_SCHEDULE: Final = """
    UPDATE schedule SET revision = revision + 1, record = :record WHERE name = :name AND revision = :revision
"""
REMOVE_SCHEDULE: Final = "DELETE FROM schedule WHERE name = ?"

# -- unique keys ----------------------------------------------------------------------

HOLDER: Final = "SELECT job, until, ends, latest FROM unique_key WHERE key = ?"
HOLD: Final = "INSERT OR REPLACE INTO unique_key (key, job, until, ends, latest) VALUES (?, ?, ?, ?, ?)"
LET_GO: Final = "DELETE FROM unique_key WHERE job = ? AND ends <= ?"
RESCHEDULE: Final = "UPDATE job SET state = ?, due = ?, payload = ?, expires = ? WHERE seq = ?"
SPENT: Final = """
    SELECT key, EXISTS (SELECT 1 FROM job WHERE id = unique_key.job AND state < 5) FROM unique_key
    WHERE ends > 0 AND ends <= ? ORDER BY ends LIMIT ?
"""
NEXT_SPENT: Final = "SELECT min(ends) FROM unique_key WHERE ends > 0"
DROP_KEY: Final = "DELETE FROM unique_key WHERE key = ?"
END_PERIOD: Final = "UPDATE unique_key SET ends = 0 WHERE key = ?"
