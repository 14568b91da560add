-- +goose Up
-- A session is a name for a workspace, with the sandbox that is its current one.
CREATE TABLE sessions (
    id           TEXT PRIMARY KEY CHECK (id <> ''),
    name         TEXT NOT NULL UNIQUE CHECK (name <> ''),
    profile      TEXT NOT NULL CHECK (profile <> ''),
    workspace_id TEXT NOT NULL UNIQUE REFERENCES workspaces (id),
    branch       TEXT NOT NULL,
    sandbox_vmid INTEGER NOT NULL CHECK (sandbox_vmid >= 0),
    sandbox_uid  TEXT NOT NULL,
    created_at   TEXT NOT NULL CHECK (length(created_at) = 30),
    updated_at   TEXT NOT NULL CHECK (length(updated_at) = 30)
) STRICT;
CREATE UNIQUE INDEX sessions_branch ON sessions (branch) WHERE branch <> '';
CREATE INDEX sessions_created ON sessions (created_at, id);

-- The sandboxes that used the workspace of a session.
CREATE TABLE session_sandboxes (
    number       INTEGER PRIMARY KEY,
    session_id   TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    sandbox_vmid INTEGER NOT NULL CHECK (sandbox_vmid > 0),
    sandbox_uid  TEXT NOT NULL,
    sandbox_name TEXT NOT NULL,
    job_id       TEXT NOT NULL,
    created_at   TEXT NOT NULL CHECK (length(created_at) = 30)
) STRICT;
CREATE INDEX session_sandboxes_session ON session_sandboxes (session_id, number);

ALTER TABLE jobs ADD COLUMN branch TEXT NOT NULL DEFAULT '';
