-- +goose Up
-- 1 while the network policy of network_json is not known to be in force on the backend.
ALTER TABLE sandboxes ADD COLUMN network_pending INTEGER NOT NULL DEFAULT 0 CHECK (network_pending IN (0, 1));
