-- +goose Up
-- Messages between people and agents. Rows are only added, and deleted by
-- retention; AUTOINCREMENT never uses an ID again.
CREATE TABLE messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    ts TEXT NOT NULL CHECK (length(ts) = 30),
    scope_kind TEXT NOT NULL,
    scope_id TEXT NOT NULL,
    author TEXT NOT NULL,
    kind TEXT NOT NULL,
    msg TEXT NOT NULL,
    json TEXT NOT NULL
) STRICT;
CREATE INDEX messages_scope ON messages (scope_kind, scope_id, id);
CREATE INDEX messages_ts ON messages (ts);
