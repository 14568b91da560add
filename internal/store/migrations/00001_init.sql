-- Times are UTC text with exactly nine fractional digits, so that the order
-- of the text is the order of time; '' means "not yet".

-- +goose Up
PRAGMA application_id = 0x41474C42; -- "AGLB": how our files are told from others

CREATE TABLE counters (
    name  TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE sandboxes (
    vmid             INTEGER PRIMARY KEY CHECK (vmid > 0),
    uid              TEXT NOT NULL UNIQUE,
    name             TEXT NOT NULL,
    backend          TEXT NOT NULL,
    profile          TEXT NOT NULL,
    image            TEXT NOT NULL,
    state            TEXT NOT NULL,
    desired          TEXT NOT NULL,
    reason           TEXT NOT NULL,
    cores            INTEGER NOT NULL,
    memory_mb        INTEGER NOT NULL,
    root_size_gb     INTEGER NOT NULL,
    network_json     TEXT NOT NULL,
    keepalive        INTEGER NOT NULL CHECK (keepalive IN (0, 1)),
    job_id           TEXT NOT NULL,
    ip               TEXT NOT NULL,
    lease_expires_at TEXT NOT NULL CHECK (length(lease_expires_at) = 30),
    created_at       TEXT NOT NULL CHECK (length(created_at) = 30),
    updated_at       TEXT NOT NULL CHECK (length(updated_at) = 30),
    booted_at        TEXT NOT NULL CHECK (length(booted_at) IN (0, 30))
) STRICT;
CREATE UNIQUE INDEX sandboxes_live_name ON sandboxes (name) WHERE state <> 'DESTROYED';
CREATE INDEX sandboxes_name ON sandboxes (name, vmid);
CREATE INDEX sandboxes_state ON sandboxes (state, vmid);

CREATE TABLE jobs (
    job_id         TEXT PRIMARY KEY,
    repo_url       TEXT NOT NULL,
    bundled        INTEGER NOT NULL CHECK (bundled IN (0, 1)),
    ref            TEXT NOT NULL,
    depth          INTEGER NOT NULL,
    task           TEXT NOT NULL,
    agent          TEXT NOT NULL,
    profile        TEXT NOT NULL,
    image          TEXT NOT NULL,
    mode           TEXT NOT NULL,
    ttl_ns         INTEGER NOT NULL,
    keepalive      INTEGER NOT NULL CHECK (keepalive IN (0, 1)),
    status         TEXT NOT NULL,
    phase          TEXT NOT NULL,
    reason         TEXT NOT NULL,
    exit_code      INTEGER,
    sandbox_vmid   INTEGER NOT NULL, -- no foreign key: a sandbox's row may go before its job's
    stop_requested TEXT NOT NULL,
    result_json    TEXT NOT NULL,
    created_at     TEXT NOT NULL CHECK (length(created_at) = 30),
    updated_at     TEXT NOT NULL CHECK (length(updated_at) = 30),
    started_at     TEXT NOT NULL CHECK (length(started_at) IN (0, 30)),
    finished_at    TEXT NOT NULL CHECK (length(finished_at) IN (0, 30)),
    deadline_at    TEXT NOT NULL CHECK (length(deadline_at) IN (0, 30))
) STRICT;
CREATE INDEX jobs_created ON jobs (created_at, job_id);
CREATE INDEX jobs_status ON jobs (status, created_at);
CREATE INDEX jobs_sandbox ON jobs (sandbox_vmid) WHERE sandbox_vmid <> 0;

-- What sandboxes and jobs were made from; the profiles in force are files.
CREATE TABLE profiles (
    name       TEXT NOT NULL,
    sha256     TEXT NOT NULL CHECK (length(sha256) = 64),
    yaml       TEXT NOT NULL,
    updated_at TEXT NOT NULL CHECK (length(updated_at) = 30),
    PRIMARY KEY (name, sha256)
) STRICT, WITHOUT ROWID;

CREATE TABLE bootstrap_tokens (
    token_sha256 TEXT PRIMARY KEY CHECK (length(token_sha256) = 64),
    vmid         INTEGER NOT NULL REFERENCES sandboxes (vmid) ON DELETE CASCADE,
    expires_at   TEXT NOT NULL CHECK (length(expires_at) = 30),
    consumed_at  TEXT NOT NULL CHECK (length(consumed_at) IN (0, 30))
) STRICT, WITHOUT ROWID;
CREATE INDEX bootstrap_tokens_vmid ON bootstrap_tokens (vmid);

CREATE TABLE grants (
    token_sha256 TEXT PRIMARY KEY CHECK (length(token_sha256) = 64),
    kind         TEXT NOT NULL CHECK (kind IN ('runner', 'upload')),
    vmid         INTEGER NOT NULL REFERENCES sandboxes (vmid) ON DELETE CASCADE,
    job_id       TEXT NOT NULL,
    expires_at   TEXT NOT NULL CHECK (length(expires_at) = 30)
) STRICT, WITHOUT ROWID;
CREATE INDEX grants_vmid ON grants (vmid);

CREATE TABLE artifacts (
    job_id     TEXT NOT NULL REFERENCES jobs (job_id) ON DELETE RESTRICT,
    path       TEXT NOT NULL,
    size       INTEGER NOT NULL CHECK (size >= 0),
    sha256     TEXT NOT NULL CHECK (length(sha256) = 64),
    mime       TEXT NOT NULL,
    created_at TEXT NOT NULL CHECK (length(created_at) = 30),
    PRIMARY KEY (job_id, path)
) STRICT, WITHOUT ROWID;

-- AUTOINCREMENT: an id is never given twice, so a reader that remembers the
-- last one it saw misses nothing after old events were deleted.
CREATE TABLE events (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    ts           TEXT NOT NULL CHECK (length(ts) = 30),
    kind         TEXT NOT NULL CHECK (kind <> ''),
    sandbox_vmid INTEGER NOT NULL,
    job_id       TEXT NOT NULL,
    msg          TEXT NOT NULL,
    json         TEXT NOT NULL
) STRICT;
CREATE INDEX events_ts ON events (ts);
CREATE INDEX events_sandbox ON events (sandbox_vmid, id) WHERE sandbox_vmid <> 0;
CREATE INDEX events_job ON events (job_id, id) WHERE job_id <> '';
CREATE INDEX events_kind ON events (kind, id);
