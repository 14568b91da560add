-- +goose Up
-- What a snapshot contains of what a sandbox has written: until now a workspace was saved
-- only while no sandbox had it.
ALTER TABLE workspace_snapshots ADD COLUMN consistency TEXT NOT NULL DEFAULT 'detached' CHECK (consistency IN ('detached', 'frozen', 'crash'));
