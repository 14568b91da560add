-- +goose Up
-- Each list reads its pages from an index, in its order, with and without a filter.
CREATE INDEX sandboxes_live ON sandboxes (vmid, profile, state) WHERE state <> 'DESTROYED';
DROP INDEX jobs_status;
CREATE INDEX jobs_status ON jobs (status, created_at, job_id);
DROP INDEX jobs_sandbox;
CREATE INDEX jobs_sandbox ON jobs (sandbox_vmid, created_at, job_id) WHERE sandbox_vmid <> 0;
DROP INDEX jobs_parent;
CREATE INDEX jobs_parent ON jobs (parent_id, created_at, job_id) WHERE parent_id <> '';
CREATE INDEX snapshots_created ON snapshots (created_at, uid);
CREATE INDEX snapshots_sandbox ON snapshots (sandbox_uid, created_at, uid);
