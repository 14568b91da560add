package hostcmd

import (
	"testing"

	"github.com/agentlab-vm/agentlab/api"
)

// A template is made only where the backend says that there is none: not where
// it could not look.
func TestTemplatesRight(t *testing.T) {
	for _, c := range []struct {
		name   string
		checks []api.Finding
		want   bool
	}{
		{"nothing is said of templates", []api.Finding{{Name: "kvm", Level: levelOK}}, false},
		{"there is one", []api.Finding{{Name: "template-agents", Level: levelOK}}, true},
		{"none is any good", []api.Finding{{Name: "template-agents", Level: levelWarn}, {Name: "templates", Level: levelError}}, false},
		{"the backend does not answer", []api.Finding{{Name: "proxmox-api", Level: levelError}, {Name: "templates", Level: levelWarn}}, true},
	} {
		if got := templatesRight(api.HostChecks{Checks: c.checks}); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}
