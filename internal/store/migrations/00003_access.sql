-- +goose Up

-- Rights to use the control API. Only the hash of a token is kept. What it is
-- bound to is JSON, as it is only ever read as a whole.
CREATE TABLE api_tokens (
    token_id       TEXT PRIMARY KEY,
    name           TEXT NOT NULL UNIQUE,
    token_sha256   TEXT NOT NULL UNIQUE CHECK (length(token_sha256) = 64),
    role           TEXT NOT NULL CHECK (role IN ('read', 'write', 'admin')),
    any_verb       INTEGER NOT NULL CHECK (any_verb IN (0, 1)),
    verbs_json     TEXT NOT NULL,
    any_sandbox    INTEGER NOT NULL CHECK (any_sandbox IN (0, 1)),
    sandboxes_json TEXT NOT NULL,
    created_at     TEXT NOT NULL CHECK (length(created_at) = 30),
    expires_at     TEXT NOT NULL CHECK (length(expires_at) = 30),
    last_used_at   TEXT NOT NULL CHECK (length(last_used_at) IN (0, 30))
) STRICT, WITHOUT ROWID;
