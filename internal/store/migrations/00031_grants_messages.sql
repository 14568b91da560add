-- +goose Up
-- A sandbox may have a grant for messages. SQLite cannot change a CHECK, so the
-- table is made again.
CREATE TABLE grants_new (
    token_sha256 TEXT PRIMARY KEY CHECK (length(token_sha256) = 64),
    kind         TEXT NOT NULL CHECK (kind IN ('runner', 'upload', 'messages')),
    vmid         INTEGER NOT NULL REFERENCES sandboxes (vmid) ON DELETE CASCADE,
    job_id       TEXT NOT NULL,
    expires_at   TEXT NOT NULL CHECK (length(expires_at) = 30)
) STRICT, WITHOUT ROWID;
INSERT INTO grants_new SELECT token_sha256, kind, vmid, job_id, expires_at FROM grants;
DROP TABLE grants;
ALTER TABLE grants_new RENAME TO grants;
CREATE INDEX grants_vmid ON grants (vmid);
