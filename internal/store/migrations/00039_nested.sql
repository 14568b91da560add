-- +goose Up
-- Whether the CPUs have virtualization: 'off', 'auto' or 'on'. Before, sandboxes had what
-- their host provided; '' marks a snapshot of that time.
ALTER TABLE sandboxes ADD COLUMN nested TEXT NOT NULL DEFAULT 'auto';
ALTER TABLE snapshots ADD COLUMN nested TEXT NOT NULL DEFAULT '';

-- What the guest has reported about /dev/kvm at its last start; '' is nothing.
ALTER TABLE sandboxes ADD COLUMN nested_state TEXT NOT NULL DEFAULT '';

-- How many processes the kernel of the guest has ended while the job ran, because memory
-- was used up, as the guest has reported.
ALTER TABLE jobs ADD COLUMN memory_kills INTEGER NOT NULL DEFAULT 0;
