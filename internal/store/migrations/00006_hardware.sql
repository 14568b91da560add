-- +goose Up
-- What its profile asked of a sandbox's VM beside cores, memory and disk.
ALTER TABLE sandboxes ADD COLUMN hardware_json TEXT NOT NULL DEFAULT '{}';
