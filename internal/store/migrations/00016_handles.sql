-- +goose Up
-- Where a backend has a sandbox, as the backend said. On Proxmox VE, until now,
-- the number of a sandbox was that of its virtual machine.
ALTER TABLE sandboxes ADD COLUMN handle TEXT NOT NULL DEFAULT '';
UPDATE sandboxes SET handle = CAST(vmid AS TEXT) WHERE backend = 'proxmox';
