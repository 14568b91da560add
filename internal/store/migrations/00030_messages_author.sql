-- +goose Up
-- The newest messages of one author in a scope, for the limits of an author.
CREATE INDEX messages_author ON messages (scope_kind, scope_id, author, id);
