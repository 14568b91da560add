-- +goose Up
-- A sandbox keeps its number: a backend that shares numbers with others takes
-- another one for its virtual machine.
DROP TABLE IF EXISTS renumbered;
