-- +goose Up
-- How the first guest of a sandbox was started; '' if that is not known.
ALTER TABLE sandboxes ADD COLUMN start TEXT NOT NULL DEFAULT '' CHECK (start IN ('', 'boot', 'template', 'snapshot', 'pool'));
