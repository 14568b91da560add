package cli

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// WorkspaceChoice has the flags for the workspace of a new sandbox.
type WorkspaceChoice struct {
	Name, Storage    string
	SizeGB           int
	create, Stateful bool
	wait             time.Duration

	OfSession bool // the workspace belongs to a session, and only wait can be chosen
}

// WorkspaceFlags adds the flags for the workspace of a new sandbox. stateful is how
// the workspace of --stateful is named.
func WorkspaceFlags(flags *pflag.FlagSet, w *WorkspaceChoice, stateful string) {
	flags.StringVar(&w.Name, "workspace", "", "workspace to mount at /work: ID, name, or new:NAME to create it (see 'agentlab workspace')")
	flags.BoolVar(&w.create, "workspace-create", false, "create the workspace unless it exists")
	flags.Func("workspace-size", "size of a new workspace in GiB (default: 20)", GibFlag(&w.SizeGB))
	flags.StringVar(&w.Storage, "workspace-storage", "", "storage of a new workspace, one of the backend's (default: the configured one)")
	flags.DurationVar(&w.wait, "workspace-wait", 0, "how long to wait while another sandbox has the workspace, e.g. 10m (default: not at all, and 1h for a job in a session)")
	flags.BoolVar(&w.Stateful, "stateful", false, "use a workspace "+stateful+": create it unless it exists, and wait up to 10m for it")
}

// GibFlag returns the function that sets the size of a new workspace.
func GibFlag(to *int) func(string) error {
	return func(s string) error {
		n, err := strconv.Atoi(strings.TrimSuffix(strings.TrimSuffix(s, "iB"), "G"))
		if err != nil || n < 1 || n > 1<<16 {
			return fmt.Errorf("%q is not a number of GiB from 1 to %d", s, 1<<16)
		}
		*to = n
		return nil
	}
}

// StatefulWait is how long --stateful waits for its workspace.
const StatefulWait = 10 * time.Minute

// Selection returns the fields of the request. name is the name of the workspace of
// --stateful, which the flag from provides.
func (w WorkspaceChoice) Selection(name, from string) (out api.WorkspaceSelection, err error) {
	if w.Stateful && w.Name == "" {
		if w.Name = name; name == "" {
			return out, work.UsageErrorf("--stateful needs a name for its workspace").WithHint("add %s, or --workspace NAME", from)
		}
	}
	if w.Stateful {
		w.create = true
		if w.wait == 0 {
			w.wait = StatefulWait
		}
	}
	name, isNew := strings.CutPrefix(w.Name, "new:")
	switch {
	case w.Name == "" && w.OfSession && (w.create || w.SizeGB != 0 || w.Storage != ""):
		return out, work.UsageErrorf("a session has its own workspace").WithHint("remove --workspace-create, --workspace-size and --workspace-storage; see 'agentlab session create'")
	case w.Name == "" && !w.OfSession && (w.create || w.SizeGB != 0 || w.Storage != "" || w.wait != 0):
		return out, work.UsageErrorf("a flag for the workspace needs --workspace").WithHint("add --workspace NAME")
	case w.wait < 0 || w.wait > agentlab.MaxWorkspaceWait:
		return out, work.UsageErrorf("--workspace-wait %s is not between 0 and %s", w.wait, agentlab.FormatTTL(agentlab.MaxWorkspaceWait))
	case (w.SizeGB != 0 || w.Storage != "") && !isNew && !w.create:
		return out, work.UsageErrorf("--workspace-size and --workspace-storage are for a new workspace").WithHint("use --workspace new:%s, or add --workspace-create", w.Name)
	}
	out.Workspace, out.WorkspaceWaitSeconds = name, int((w.wait+time.Second-1)/time.Second)
	if isNew || w.create {
		out.WorkspaceCreate = &api.WorkspaceNew{SizeGB: w.SizeGB, Storage: w.Storage, IfMissing: w.create}
	}
	return out, nil
}
