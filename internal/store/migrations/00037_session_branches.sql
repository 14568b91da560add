-- +goose Up
-- Branches of several repositories can have the same name.
DROP INDEX sessions_branch;
