-- +goose Up
-- Disks that outlive sandboxes. A deleted one stays in the trash for a time; its
-- name is free then.
CREATE TABLE workspaces (
    id            TEXT PRIMARY KEY CHECK (id <> ''),
    uid           TEXT NOT NULL UNIQUE CHECK (uid <> ''),
    name          TEXT NOT NULL CHECK (name <> ''),
    backend       TEXT NOT NULL,
    storage       TEXT NOT NULL,
    handle        TEXT NOT NULL,
    size_gb       INTEGER NOT NULL CHECK (size_gb > 0),
    state         TEXT NOT NULL CHECK (state IN ('CREATING', 'READY', 'GROWING', 'RESTORING', 'FAILED', 'TRASHED', 'DELETING')),
    reason        TEXT NOT NULL,
    grow_to_gb    INTEGER NOT NULL CHECK ((grow_to_gb > 0) = (state = 'GROWING')),
    restoring     TEXT NOT NULL CHECK ((restoring <> '') = (state = 'RESTORING')),
    from_uid      TEXT NOT NULL,
    from_handle   TEXT NOT NULL,
    from_snapshot TEXT NOT NULL,
    from_name     TEXT NOT NULL,
    created_at    TEXT NOT NULL CHECK (length(created_at) = 30),
    updated_at    TEXT NOT NULL CHECK (length(updated_at) = 30),
    ready_at      TEXT NOT NULL CHECK (length(ready_at) IN (0, 30)),
    trashed_at    TEXT NOT NULL CHECK (length(trashed_at) IN (0, 30))
) STRICT;
CREATE UNIQUE INDEX workspaces_name ON workspaces (name) WHERE state NOT IN ('TRASHED', 'DELETING');
CREATE INDEX workspaces_created ON workspaces (created_at, id);
CREATE INDEX workspaces_from ON workspaces (from_uid) WHERE from_uid <> '';

CREATE TABLE workspace_snapshots (
    uid          TEXT PRIMARY KEY CHECK (uid <> ''),
    name         TEXT NOT NULL CHECK (name <> ''),
    workspace_id TEXT NOT NULL REFERENCES workspaces (id) ON DELETE CASCADE,
    state        TEXT NOT NULL CHECK (state IN ('SAVING', 'SAVED', 'DELETING')),
    size_gb      INTEGER NOT NULL CHECK (size_gb > 0),
    created_at   TEXT NOT NULL CHECK (length(created_at) = 30),
    saved_at     TEXT NOT NULL CHECK (length(saved_at) IN (0, 30))
) STRICT;
CREATE UNIQUE INDEX workspace_snapshots_name ON workspace_snapshots (workspace_id, name);
CREATE INDEX workspace_snapshots_created ON workspace_snapshots (workspace_id, created_at, uid);
