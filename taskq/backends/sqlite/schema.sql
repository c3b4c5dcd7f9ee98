-- Version 1. Later versions are steps of their own in schema.py; this file never changes once released.

-- One row per job for its whole life; a retry is the same row in another state.
CREATE TABLE job (
    seq           INTEGER PRIMARY KEY,  -- first in, first out
    id            TEXT    NOT NULL UNIQUE,
    state         INTEGER NOT NULL,     -- rows.py: CODES
    queue         TEXT    NOT NULL,
    rank          INTEGER NOT NULL,     -- minus the priority: the smallest runs first
    due           REAL    NOT NULL,
    token         INTEGER NOT NULL DEFAULT 0,  -- of the latest take; kept after the settle, 0 once reclaimed
    deadline      REAL,                 -- of the reservation, on the lease clock of meta.boot
    worker        TEXT,
    started       REAL,                 -- mark of the present run
    attempts      INTEGER NOT NULL,
    losses        INTEGER NOT NULL,
    deliveries    INTEGER NOT NULL,
    generation    INTEGER NOT NULL,
    tries         INTEGER NOT NULL DEFAULT 0,  -- bad ends recorded so far, also those no longer kept
    first_started REAL,
    ended         REAL,
    forget        REAL,                 -- when retention may delete the row
    error         TEXT,
    expires       REAL,
    lease         REAL    NOT NULL,
    max_retries   INTEGER,
    loss_base     REAL    NOT NULL,
    loss_cap      REAL    NOT NULL,
    keep          REAL    NOT NULL,
    created       REAL    NOT NULL,
    task          TEXT    NOT NULL,
    unique_by     BLOB,                 -- msgpack of job.Unique; NULL for none
    headers       BLOB,                 -- msgpack; NULL for none
    progress      BLOB,
    result        BLOB,
    payload       BLOB    NOT NULL,
    lane          TEXT,                 -- job.Lane.name; NULL for jobs that wait for nothing but their turn
    weight        REAL
);

-- Each index holds only the rows it serves, so that what waits for later costs a claim nothing.
CREATE INDEX job_pending ON job (queue, rank, due, seq) WHERE state = 0 AND lane IS NULL;
CREATE INDEX job_reserved ON job (deadline) WHERE state = 1;
CREATE INDEX job_scheduled ON job (queue, due, seq) WHERE state = 2;
CREATE INDEX job_blocked ON job (queue, seq) WHERE state = 3;
CREATE INDEX job_waiting ON job (queue, seq) WHERE state = 4;
CREATE INDEX job_ended ON job (queue, state, ended, seq) WHERE ended IS NOT NULL;
CREATE INDEX job_forget ON job (forget) WHERE forget IS NOT NULL;
CREATE INDEX job_expires ON job (expires) WHERE expires IS NOT NULL AND state IN (0, 2);

-- The same for jobs in lanes: for listings, for claims, and for sequences (their lanes begin with '=').
CREATE INDEX job_laned ON job (queue, rank, due, seq) WHERE state = 0 AND lane IS NOT NULL;
CREATE INDEX job_lane ON job (lane, queue, rank, due, seq) WHERE state = 0 AND lane IS NOT NULL;
CREATE INDEX job_sequence ON job (lane, seq) WHERE lane >= '=' AND lane < '>' AND state < 5;

-- One row per line of jobs: what a claim looks at instead of the jobs. Kept by every transaction that moves one.
CREATE TABLE lane (
    name    TEXT    NOT NULL,
    queue   TEXT    NOT NULL,
    rank    INTEGER NOT NULL,
    task    TEXT    NOT NULL,
    key     TEXT    NOT NULL,
    weight  REAL    NOT NULL,
    pending INTEGER NOT NULL,
    open    INTEGER NOT NULL DEFAULT 1,  -- 0: a claim found that its key has no room; whatever may make room sets it
    vtime   REAL    NOT NULL DEFAULT 0,  -- how much it has had, by weight
    PRIMARY KEY (name, queue, rank)
) WITHOUT ROWID;
CREATE INDEX lane_waiting ON lane (queue, open, task, rank, vtime) WHERE pending > 0;
CREATE INDEX lane_empty ON lane (queue, rank, vtime) WHERE pending = 0;

-- Per queue and rank: what the lane served last had had, and what the jobs without a lane have had.
CREATE TABLE turn (
    queue TEXT    NOT NULL,
    rank  INTEGER NOT NULL,
    vtime REAL    NOT NULL,
    plain REAL    NOT NULL,
    PRIMARY KEY (queue, rank)
) WITHOUT ROWID;

-- What tasks declare, as the latest declaration says.
CREATE TABLE task_limit (
    task            TEXT PRIMARY KEY,
    version         INTEGER NOT NULL,
    rate            BLOB,  -- msgpack: count, seconds, burst
    concurrency     INTEGER,
    key_rate        BLOB,
    key_concurrency INTEGER
) WITHOUT ROWID;

-- What a limit has lent: one row per task (its name), and one per key (task, unit separator, key).
CREATE TABLE gate (
    name    TEXT PRIMARY KEY,
    running INTEGER NOT NULL DEFAULT 0,
    unseen  INTEGER NOT NULL DEFAULT 0,  -- of those, the ones not yet known to have started
    fresh   INTEGER NOT NULL DEFAULT 0,  -- known to have started, not in the log yet
    log     BLOB,                        -- msgpack: when starts happened, on the lease clock of boot
    boot    TEXT    NOT NULL DEFAULT '',
    shift   REAL    NOT NULL DEFAULT 0,  -- wall clock less lease clock, when the log was written
    open    INTEGER NOT NULL DEFAULT 1,
    until   REAL,                        -- when a closed one opens by itself, on the lease clock
    void    REAL    NOT NULL DEFAULT 0   -- from then on the log means nothing
) WITHOUT ROWID;
CREATE INDEX gate_idle ON gate (void) WHERE running = 0 AND fresh = 0 AND open = 1;
CREATE INDEX gate_until ON gate (until) WHERE until IS NOT NULL;
CREATE INDEX gate_fresh ON gate (fresh) WHERE fresh > 0;

-- The bad ends of a job, the latest few.
CREATE TABLE attempt (
    seq        INTEGER NOT NULL,
    n          INTEGER NOT NULL,  -- job.tries when it was recorded
    number     INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    worker     TEXT    NOT NULL,
    started    REAL,
    ended      REAL,
    error_type TEXT    NOT NULL,
    message    TEXT    NOT NULL,
    traceback  TEXT    NOT NULL,
    delay      REAL,
    PRIMARY KEY (seq, n)
) WITHOUT ROWID;

-- Whatever deletes a job takes its past along: a later row may get the same seq.
-- A key outlives its job only for the rest of its period, and only where that completed.
CREATE TRIGGER job_deleted AFTER DELETE ON job WHEN old.tries > 0 OR old.unique_by IS NOT NULL
BEGIN
    DELETE FROM attempt WHERE seq = old.seq;
    DELETE FROM unique_key WHERE job = old.id AND (ends = 0 OR old.state NOT IN (1, 5));
END;

-- Who holds each unique key. What a row says counts only together with the state of its job (holding.py).
CREATE TABLE unique_key (
    key    TEXT PRIMARY KEY,
    job    TEXT NOT NULL,   -- its id
    until  TEXT NOT NULL,
    ends   REAL NOT NULL,   -- of the period; 0 for none, or when it is over
    latest REAL
) WITHOUT ROWID;
CREATE INDEX unique_key_job ON unique_key (job);
CREATE INDEX unique_key_ends ON unique_key (ends) WHERE ends > 0;

-- Jobs per queue and state, kept by every transaction that moves one.
CREATE TABLE counter (
    queue TEXT    NOT NULL,
    state INTEGER NOT NULL,
    n     INTEGER NOT NULL,
    PRIMARY KEY (queue, state)
) WITHOUT ROWID;

CREATE TABLE cancel_request (
    seq    INTEGER PRIMARY KEY,
    worker TEXT NOT NULL,
    reason TEXT NOT NULL
);

CREATE TABLE paused (
    what TEXT NOT NULL,  -- queue, task or key
    name TEXT NOT NULL,
    PRIMARY KEY (what, name)
) WITHOUT ROWID;

-- One row: the latest fence, and the boot that deadlines are counted in.
CREATE TABLE meta (
    token INTEGER NOT NULL,
    boot  TEXT    NOT NULL
);
INSERT INTO meta (token, boot) VALUES (0, '');

CREATE TABLE worker (
    id   TEXT PRIMARY KEY,
    seen REAL NOT NULL,
    info BLOB NOT NULL  -- msgpack
) WITHOUT ROWID;

CREATE TABLE schedule (
    name     TEXT    PRIMARY KEY,
    revision INTEGER NOT NULL,
    record   BLOB    NOT NULL  -- msgpack of the other fields of store.ScheduleRecord
) WITHOUT ROWID;
