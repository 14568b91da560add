-- +goose Up
-- 1 for a FAILED sandbox whose disk was started again, and whose guest did not answer.
ALTER TABLE sandboxes ADD COLUMN unbootable INTEGER NOT NULL DEFAULT 0 CHECK (unbootable IN (0, 1));
