package store

import (
	"database/sql"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

func TestHandleIsStored(t *testing.T) {
	s := newStore(t)
	sb := must(s.AllocateSandbox(t.Context(), newSandbox("alpha"), agentlab.Allocation{First: 1, Last: 9}))(t)
	must(s.UpdateSandbox(t.Context(), sb.VMID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		sb.Handle = "node/1999"
		return nil, nil
	}))(t)
	if got := must(s.SandboxByUID(t.Context(), sb.UID))(t); got.Handle != "node/1999" || got.VMID != sb.VMID {
		t.Errorf("%+v", got)
	}
}

// Until version 16 of the schema, a sandbox on Proxmox VE had the number of its
// VM; elsewhere it needs no handle.
func TestHandlesOfAnOlderDatabase(t *testing.T) {
	path := filled(t)
	s := must(Open(t.Context(), path, Options{}))(t)
	of := map[string]agentlab.Sandbox{}
	for _, name := range []string{"qemu", "proxmox"} {
		sb := newSandbox(name)
		sb.Backend = name
		of[name] = must(s.AllocateSandbox(t.Context(), sb, agentlab.Allocation{First: 1001, Last: 1999}))(t)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	db := must(sql.Open("sqlite", path))(t)
	for _, q := range []string{
		"DROP TABLE snapshots", "DROP TABLE messages", "DROP TABLE session_sandboxes", "DROP TABLE sessions", "ALTER TABLE jobs DROP COLUMN branch", "DROP TABLE workspace_leases", "DROP TABLE workspace_snapshots", "DROP TABLE workspaces", "DROP INDEX sandboxes_from", "DROP INDEX sandboxes_live",
		"ALTER TABLE sandboxes DROP COLUMN from_snapshot",
		"ALTER TABLE sandboxes DROP COLUMN from_sandbox",
		"ALTER TABLE sandboxes DROP COLUMN from_handle",
		"ALTER TABLE sandboxes DROP COLUMN from_name",
		"ALTER TABLE sandboxes DROP COLUMN workspace_id", "ALTER TABLE sandboxes DROP COLUMN restoring", "ALTER TABLE sandboxes DROP COLUMN start",
		"ALTER TABLE sandboxes DROP COLUMN handle", "ALTER TABLE sandboxes DROP COLUMN on_disk", "ALTER TABLE jobs DROP COLUMN no_setup", "ALTER TABLE jobs DROP COLUMN devcontainer",
		"ALTER TABLE sandboxes DROP COLUMN nested", "ALTER TABLE sandboxes DROP COLUMN nested_state", "ALTER TABLE sandboxes DROP COLUMN unbootable", "ALTER TABLE jobs DROP COLUMN memory_kills", "ALTER TABLE jobs DROP COLUMN backend",
		"ALTER TABLE jobs DROP COLUMN setup_json", "DROP INDEX jobs_salvages", "ALTER TABLE jobs DROP COLUMN salvages", "ALTER TABLE sandboxes DROP COLUMN salvage",
		"DROP INDEX jobs_parent", "ALTER TABLE jobs DROP COLUMN attempts", "ALTER TABLE jobs DROP COLUMN winner", "ALTER TABLE jobs DROP COLUMN fork",
		"ALTER TABLE jobs DROP COLUMN parent_id", "ALTER TABLE jobs DROP COLUMN attempt", "ALTER TABLE jobs DROP COLUMN pick",
		"DELETE FROM goose_db_version WHERE version_id >= 16",
	} {
		must(db.ExecContext(t.Context(), q))(t)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	s = must(Open(t.Context(), path, Options{}))(t)
	defer s.Close()
	for name, want := range map[string]string{"qemu": "", "proxmox": "1002"} {
		if got := must(s.Sandbox(t.Context(), of[name].VMID))(t); got.Handle != want {
			t.Errorf("%s: handle %q, want %q", name, got.Handle, want)
		}
	}
}
