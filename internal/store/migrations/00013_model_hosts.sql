-- +goose Up
-- The endpoints ("host:port") of the model that a job's agent needs.
ALTER TABLE jobs ADD COLUMN model_hosts_json TEXT NOT NULL DEFAULT '[]';
