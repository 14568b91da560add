-- +goose Up
-- What is known of the installation as a whole: its id, and what was last
-- seen of the host's clock.
CREATE TABLE facts (
    name  TEXT PRIMARY KEY CHECK (name <> ''),
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;
