-- +goose Up
-- A job may have several attempts, each of which is a job of its own.
ALTER TABLE jobs ADD COLUMN attempts INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN winner INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN parent_id TEXT NOT NULL DEFAULT '';
ALTER TABLE jobs ADD COLUMN attempt INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN pick TEXT NOT NULL DEFAULT '';
CREATE INDEX jobs_parent ON jobs (parent_id) WHERE parent_id <> '';
