-- +goose Up
-- 1 while a sandbox is kept without power, because its job has ended and has work that
-- is not stored.
ALTER TABLE sandboxes ADD COLUMN salvage INTEGER NOT NULL DEFAULT 0 CHECK (salvage IN (0, 1));

-- The job whose work a job extracts from the disk of its sandbox.
ALTER TABLE jobs ADD COLUMN salvages TEXT NOT NULL DEFAULT '';
CREATE INDEX jobs_salvages ON jobs (salvages) WHERE salvages <> '';
