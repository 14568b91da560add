-- +goose Up
-- Whether a job uses the dev container of its repository; '' means the profile's.
ALTER TABLE jobs ADD COLUMN devcontainer TEXT NOT NULL DEFAULT '';
