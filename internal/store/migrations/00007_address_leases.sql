-- +goose Up
-- The addresses that a sandbox has on its backend's network. A row holds them
-- until it is DESTROYED, and no two rows hold the same one at a time.
-- ipv4 is the address as a number, so that the next free one is found by the
-- index; NULL and '' mean none.
ALTER TABLE sandboxes ADD COLUMN ipv4 INTEGER CHECK (ipv4 BETWEEN 1 AND 4294967295);
ALTER TABLE sandboxes ADD COLUMN ipv6 TEXT NOT NULL DEFAULT '';
CREATE UNIQUE INDEX sandboxes_ipv4 ON sandboxes (ipv4) WHERE ipv4 IS NOT NULL;
CREATE UNIQUE INDEX sandboxes_ipv6 ON sandboxes (ipv6) WHERE ipv6 <> '';

-- Numbers that a sandbox was known by before somebody else on its backend
-- took them. Who was told the old one still finds it.
CREATE TABLE renumbered (
    vmid        INTEGER PRIMARY KEY CHECK (vmid > 0),
    sandbox_uid TEXT NOT NULL REFERENCES sandboxes (uid) ON DELETE CASCADE
) STRICT;
CREATE INDEX renumbered_uid ON renumbered (sandbox_uid);
