-- +goose Up
-- What a snapshot that was saved after the commands under setup is for, and when a job
-- used it last; '{}' for other snapshots.
ALTER TABLE snapshots ADD COLUMN setup_json TEXT NOT NULL DEFAULT '{}';
ALTER TABLE snapshots ADD COLUMN used_at TEXT NOT NULL DEFAULT '' CHECK (length(used_at) IN (0, 30));

-- How a job uses such snapshots.
ALTER TABLE jobs ADD COLUMN setup_json TEXT NOT NULL DEFAULT '{}';
