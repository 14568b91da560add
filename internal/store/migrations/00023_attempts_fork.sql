-- +goose Up
-- How the attempts of a job get their sandboxes: '' from their image, 'preparing'
-- while another job prepares one sandbox for all, then the UID of its snapshot.
ALTER TABLE jobs ADD COLUMN fork TEXT NOT NULL DEFAULT '';
