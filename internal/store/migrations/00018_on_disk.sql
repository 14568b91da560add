-- +goose Up
-- A suspended sandbox whose memory is on disk.
ALTER TABLE sandboxes ADD COLUMN on_disk INTEGER NOT NULL DEFAULT 0 CHECK (on_disk IN (0, 1));
