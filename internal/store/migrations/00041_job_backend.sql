-- +goose Up
-- The backend that the request for a job names; empty if it names none.
ALTER TABLE jobs ADD COLUMN backend TEXT NOT NULL DEFAULT '';
