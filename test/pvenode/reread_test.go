package pvenode_test

import (
	"strings"
	"testing"
)

// White space at the end of a description is lost, and so is that around other
// values: what was written is not what is read.
func TestWhiteSpaceIsCut(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		r.sh("qm", "set", "101", "--description", " first\n\nlast \n\n", "--searchdomain", " lan ")
		r.wantConfig(101, "description:  first%0A%0Alast\n", true)
		r.wantConfig(101, "searchdomain: lan\n", true)
		r.sh("qm", "snapshot", "101", "s1", "--description", "saved\n")
		if out := r.sh("pvesh", "get", "/nodes/pve/qemu/101/snapshot/s1/config", "--output-format", "json"); !strings.Contains(out, `"description":"saved"`) {
			r.t.Errorf("the snapshot is %s", out)
		}
		r.sh("qm", "clone", "9000", "103", "--description", "mark\n")
		r.wantConfig(103, "description: mark\n", true)
		r.sh("qm", "set", "101", "--description", "\n")
		r.wantConfig(101, "description:", false)
		if got := r.n.Config(103)["description"]; got != "mark" {
			r.t.Errorf("the description is %q", got)
		}
	})
}
