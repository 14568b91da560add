-- +goose Up
-- The name of the image of a session's sandboxes; '' is that of its profile, or the default.
ALTER TABLE sessions ADD COLUMN image TEXT NOT NULL DEFAULT '';
