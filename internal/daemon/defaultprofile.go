package daemon

import (
	"fmt"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/config"
)

// defaultProfile checks default_profile of config.yaml. A profile can be written or
// deleted while the daemon runs, so a wrong name does not keep the daemon from starting.
type defaultProfile struct {
	use      func(name string) (agentlab.Profile, error)
	settings config.Config
	file     string // config.yaml
}

// Findings reports that a default profile cannot be used.
func (d defaultProfile) Findings() (all []backend.Finding) {
	for key, name := range map[string]string{"default_profile": d.settings.DefaultProfile, "session_profile": d.settings.SessionProfile} {
		if _, err := d.use(name); err != nil {
			all = append(all, backend.Finding{
				Name: strings.ReplaceAll(key, "_", " "), Level: backend.LevelWarn, Detail: fmt.Sprintf("%s in %s cannot be used: %s", key, d.file, agentlab.TextWithHint(err)),
				Remedy: "correct " + key + " and restart the daemon; until then, name a profile in each command: --profile NAME",
			})
		}
	}
	return all
}
