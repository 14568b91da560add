-- What guests wanted from the network, as their enforcers told it.

-- +goose Up

-- How far the log of each sandbox was taken over. It goes with the
-- sandbox; the records stay until their own retention.
CREATE TABLE egress_cursors (
    sandbox_vmid INTEGER PRIMARY KEY REFERENCES sandboxes (vmid) ON DELETE CASCADE,
    sandbox_uid  TEXT NOT NULL,
    seq          INTEGER NOT NULL, -- of the last record that was seen
    allowed      INTEGER NOT NULL, -- rows that the sandbox has
    denied       INTEGER NOT NULL,
    allowed_head INTEGER NOT NULL, -- seq of the last row that is never pushed out by later ones, 0 for none yet
    denied_head  INTEGER NOT NULL,
    dropped      INTEGER NOT NULL  -- decisions that are in no row
) STRICT;

-- AUTOINCREMENT: an id is never given twice, so that a follower misses
-- nothing.
CREATE TABLE egress (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    sandbox_uid  TEXT NOT NULL,
    seq          INTEGER NOT NULL, -- 0: the row that tells how many decisions are in no row
    sandbox_vmid INTEGER NOT NULL,
    job_id       TEXT NOT NULL,
    ts           TEXT NOT NULL CHECK (length(ts) = 30),
    last_ts      TEXT NOT NULL CHECK (length(last_ts) = 30),
    proto        TEXT NOT NULL,
    name         TEXT NOT NULL,
    addr         TEXT NOT NULL,
    port         INTEGER NOT NULL CHECK (port BETWEEN 0 AND 65535),
    allow        INTEGER NOT NULL CHECK (allow IN (0, 1)),
    rule         TEXT NOT NULL CHECK (rule <> ''),
    error        TEXT NOT NULL,
    count        INTEGER NOT NULL CHECK (count >= 0),
    dropped      INTEGER NOT NULL CHECK (dropped >= 0)
) STRICT;
-- A log that is read again after a crash adds nothing; and the oldest or
-- newest records of one kind are found without looking at the others.
CREATE UNIQUE INDEX egress_record ON egress (sandbox_uid, allow, seq);
CREATE INDEX egress_sandbox ON egress (sandbox_vmid, id);
CREATE INDEX egress_job ON egress (job_id, id) WHERE job_id <> '';
CREATE INDEX egress_denied ON egress (id) WHERE allow = 0;
CREATE INDEX egress_last ON egress (last_ts);
