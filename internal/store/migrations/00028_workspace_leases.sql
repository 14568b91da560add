-- +goose Up
-- The workspace that a sandbox has. The sandbox with the oldest lease of a workspace
-- that was acquired owns it; the others wait in the order of their numbers.
ALTER TABLE sandboxes ADD COLUMN workspace_id TEXT NOT NULL DEFAULT '';

-- 1 once a guest has mounted it: from then on a file system that is missing is lost,
-- and never made again.
ALTER TABLE workspaces ADD COLUMN formatted INTEGER NOT NULL DEFAULT 0 CHECK (formatted IN (0, 1));
ALTER TABLE workspace_snapshots ADD COLUMN formatted INTEGER NOT NULL DEFAULT 0 CHECK (formatted IN (0, 1));

CREATE TABLE workspace_leases (
    number       INTEGER PRIMARY KEY,
    workspace_id TEXT NOT NULL REFERENCES workspaces (id),
    sandbox_vmid INTEGER NOT NULL CHECK (sandbox_vmid > 0),
    sandbox_uid  TEXT NOT NULL UNIQUE CHECK (sandbox_uid <> ''),
    nonce        TEXT NOT NULL UNIQUE CHECK (nonce <> ''),
    requested_at TEXT NOT NULL CHECK (length(requested_at) = 30),
    wait_until   TEXT NOT NULL CHECK (length(wait_until) = 30),
    acquired_at  TEXT NOT NULL CHECK (length(acquired_at) IN (0, 30)),
    release      TEXT NOT NULL CHECK (release IN ('', 'clean', 'forced')),
    reason       TEXT NOT NULL
) STRICT;
CREATE UNIQUE INDEX workspace_leases_owner ON workspace_leases (workspace_id) WHERE acquired_at <> '';
CREATE INDEX workspace_leases_queue ON workspace_leases (workspace_id, number);
