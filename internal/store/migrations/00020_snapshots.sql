-- +goose Up
-- Saved sandboxes. There is no foreign key to the sandbox: a kept snapshot may
-- outlive its row.
CREATE TABLE snapshots (
    uid            TEXT PRIMARY KEY,
    name           TEXT NOT NULL,
    kind           TEXT NOT NULL CHECK (kind IN ('saved', 'fork')),
    state          TEXT NOT NULL CHECK (state IN ('SAVING', 'SAVED', 'DELETING')),
    keep           INTEGER NOT NULL CHECK (keep IN (0, 1)),
    vmid           INTEGER NOT NULL,
    sandbox_uid    TEXT NOT NULL CHECK (sandbox_uid <> ''),
    sandbox_name   TEXT NOT NULL,
    sandbox_handle TEXT NOT NULL,
    backend        TEXT NOT NULL,
    profile        TEXT NOT NULL,
    image          TEXT NOT NULL,
    cores          INTEGER NOT NULL,
    memory_mb      INTEGER NOT NULL,
    root_size_gb   INTEGER NOT NULL,
    options_json   TEXT NOT NULL,
    memory         INTEGER NOT NULL CHECK (memory IN (0, 1)),
    bytes          INTEGER NOT NULL CHECK (bytes >= 0),
    created_at     TEXT NOT NULL CHECK (length(created_at) = 30),
    saved_at       TEXT NOT NULL CHECK (length(saved_at) IN (0, 30))
) STRICT;
CREATE UNIQUE INDEX snapshots_name ON snapshots (sandbox_uid, name) WHERE kind = 'saved';

-- The snapshot that a sandbox was created from, and the one to which it is being
-- restored.
ALTER TABLE sandboxes ADD COLUMN from_snapshot TEXT NOT NULL DEFAULT '';
ALTER TABLE sandboxes ADD COLUMN from_sandbox TEXT NOT NULL DEFAULT '';
ALTER TABLE sandboxes ADD COLUMN from_handle TEXT NOT NULL DEFAULT '';
ALTER TABLE sandboxes ADD COLUMN from_name TEXT NOT NULL DEFAULT '';
ALTER TABLE sandboxes ADD COLUMN restoring TEXT NOT NULL DEFAULT '';
CREATE INDEX sandboxes_from ON sandboxes (from_snapshot) WHERE from_snapshot <> '';
