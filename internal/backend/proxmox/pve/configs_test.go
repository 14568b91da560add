package pve_test

import (
	"maps"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// One call reads the configuration that a running VM has and the one that it gets at
// its next start, with options that are set, changed and removed.
func TestConfigsAreBothConfigurations(t *testing.T) {
	both(t, pvenode.Config{Waits: pvenode.ShortWaits()}, func(t *testing.T, b *bench) {
		b.clone(101)
		set := func(ch pve.Changes) {
			t.Helper()
			if err := b.c.Set(b.ctx(), "pve", 101, ch); err != nil {
				t.Fatal(err)
			}
		}
		same := func(differ bool) {
			t.Helper()
			next, err := b.c.Config(b.ctx(), "pve", 101)
			if err != nil {
				t.Fatal(err)
			}
			current, err := b.c.CurrentConfig(b.ctx(), "pve", 101)
			if err != nil {
				t.Fatal(err)
			}
			gotNext, gotCurrent, err := b.c.Configs(b.ctx(), "pve", 101)
			if err != nil || !maps.Equal(next, gotNext) || !maps.Equal(current, gotCurrent) {
				t.Errorf("next:\n%v\n%v\ncurrent:\n%v\n%v\n%v", next, gotNext, current, gotCurrent, err)
			}
			if maps.Equal(next, current) == differ {
				t.Errorf("pending changes: %v", !differ)
			}
		}
		set(pve.Changes{Set: map[string]string{"cores": "2", "numa": "1", "description": "two\nlines"}})
		same(false)
		b.do(b.c.Start(b.ctx(), "pve", 101))
		set(pve.Changes{Set: map[string]string{"cores": "3", "machine": "q35"}, Delete: []string{"numa"}})
		same(true)

		if _, _, err := b.c.Configs(b.ctx(), "pve", 999); err == nil {
			t.Error("a VM that does not exist has a configuration")
		}
	})
}
