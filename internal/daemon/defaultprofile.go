package daemon

import (
	"fmt"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// defaultProfile checks default_profile of config.yaml. A profile can be written or
// deleted while the daemon runs, so a wrong name does not keep the daemon from starting.
type defaultProfile struct {
	use  func(name string) (agentlab.Profile, error)
	name string
	file string // config.yaml
}

// Findings reports that the default profile cannot be used.
func (d defaultProfile) Findings() []backend.Finding {
	_, err := d.use(d.name)
	if err == nil {
		return nil
	}
	return []backend.Finding{{
		Name: "default profile", Level: backend.LevelWarn,
		Detail: fmt.Sprintf("default_profile in %s cannot be used: %s", d.file, agentlab.TextWithHint(err)),
		Remedy: "correct default_profile and restart the daemon; until then, name a profile in each command: --profile NAME",
	}}
}
