-- +goose Up
-- Why a sandbox or job does not go on at present; empty when it does.
ALTER TABLE sandboxes ADD COLUMN waiting TEXT NOT NULL DEFAULT '';
ALTER TABLE jobs ADD COLUMN waiting TEXT NOT NULL DEFAULT '';
