package store

import (
	"database/sql"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

// Older versions wrote the settings of a backend as a struct of all backends,
// without a fixed order of its keys.
func TestOptionsOfOlderRows(t *testing.T) {
	path := filled(t)
	s := must(Open(t.Context(), path, Options{}))(t)
	sb := newSandbox("optional")
	sb.Options = `{"nic_model":"virtio"}`
	sb = must(s.AllocateSandbox(t.Context(), sb, agentlab.Allocation{First: 1001, Last: 1999}))(t)
	if got := must(s.Sandbox(t.Context(), sb.VMID))(t); got.Options != `{"nic_model":"virtio"}` {
		t.Errorf("options %s", got.Options)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	for row, want := range map[string]agentlab.Options{
		`{"cpulist":"0-7","bridge":"vmbr1"}`: `{"bridge":"vmbr1","cpulist":"0-7"}`,
		`{"nic_model": "virtio"}`:            `{"nic_model":"virtio"}`,
		`{}`:                                 "",
	} {
		db := must(sql.Open("sqlite", path))(t)
		must(db.ExecContext(t.Context(), "UPDATE sandboxes SET hardware_json = ? WHERE vmid = ?", row, sb.VMID))(t)
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
		s := must(Open(t.Context(), path, Options{}))(t)
		if got := must(s.Sandbox(t.Context(), sb.VMID))(t); got.Options != want {
			t.Errorf("%s is %s, want %s", row, got.Options, want)
		}
		must(s.UpdateSandbox(t.Context(), sb.VMID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
			sb.Options = ""
			return nil, nil
		}))(t)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		db = must(sql.Open("sqlite", path))(t)
		var text string
		if err := db.QueryRowContext(t.Context(), "SELECT hardware_json FROM sandboxes WHERE vmid = ?", sb.VMID).Scan(&text); err != nil || text != "{}" {
			t.Errorf("no options are stored as %q, %v", text, err)
		}
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
