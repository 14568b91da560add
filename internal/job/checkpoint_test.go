package job_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

// The checkpoint of a job is kept until its result is stored: a job that has none
// keeps it, whatever its runner claims.
func TestCheckpointIsKeptUntilTheResultIsStored(t *testing.T) {
	const cp, base, head = "artifact checkpoint.bundle x\n", "1111111111111111111111111111111111111111", "2222222222222222222222222222222222222222"
	report := func(status, head string, rest string) string {
		return `report {"status":"` + status + `","phase":"done","result":{"base_commit":"` + base + `","head_commit":"` + head + `"` + rest + `}}`
	}
	for name, c := range map[string]struct {
		task string
		kept bool
	}{
		"the VM crashed":               {"crash-vm", true},
		"no result":                    {`report {"status":"COMPLETED","phase":"done"}`, true},
		"commits without a bundle":     {report("FAILED", head, `,"commits":2`), true},
		"uncommitted without a bundle": {report("COMPLETED", base, `,"uncommitted":1,"dirty":true`), true},
		"stored":                       {"artifact result.bundle x\n" + report("FAILED", head, `,"commits":2`), false},
		"nothing was done":             {report("COMPLETED", base, ""), false},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				j := w.run(agentlab.JobRequest{Task: cp + c.task})
				w.final(j.ID)
				w.gone(j.ID)
				if kept := slices.ContainsFunc(w.paths(j.ID), func(p string) bool { return strings.HasPrefix(p, agentlab.ArtifactCheckpoint) }); kept != c.kept {
					w.Errorf("kept: %v, artifacts %q", kept, w.paths(j.ID))
				}
			})
		})
	}
}
