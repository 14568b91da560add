-- +goose Up
-- Whether the setup commands of a job's repository are not run.
ALTER TABLE jobs ADD COLUMN no_setup INTEGER NOT NULL DEFAULT 0 CHECK (no_setup IN (0, 1));
