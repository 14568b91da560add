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

// workspaceChoice has the flags for the workspace of a new sandbox.
type workspaceChoice struct {
	name, storage    string
	sizeGB           int
	create, stateful bool
	wait             time.Duration

	ofSession bool // the workspace is that of a session, and only wait can be chosen
}

// workspaceFlags adds the flags for the workspace of a new sandbox. stateful is how
// the workspace of --stateful is named.
func workspaceFlags(flags *pflag.FlagSet, w *workspaceChoice, stateful string) {
	flags.StringVar(&w.name, "workspace", "", "workspace to mount at /work: ID, name, or new:NAME to create it (see 'agentlab workspace')")
	flags.BoolVar(&w.create, "workspace-create", false, "create the workspace unless it exists")
	flags.Func("workspace-size", "size of a new workspace in GiB (default: 20)", gibFlag(&w.sizeGB))
	flags.StringVar(&w.storage, "workspace-storage", "", "storage of a new workspace, one of the backend's (default: the configured one)")
	flags.DurationVar(&w.wait, "workspace-wait", 0, "how long to wait while another sandbox has the workspace, e.g. 10m (default: not at all, and 1h for a job in a session)")
	flags.BoolVar(&w.stateful, "stateful", false, "use a workspace "+stateful+": create it unless it exists, and wait up to 10m for it")
}

// gibFlag returns the function that sets the size of a new workspace.
func gibFlag(to *int) func(string) error {
	return func(s string) error {
		n, err := strconv.Atoi(strings.TrimSuffix(strings.TrimSuffix(s, "iB"), "G"))
		if err != nil || n < 1 || n > 1<<16 {
			return fmt.Errorf("%q is not a number of GiB from 1 to %d", s, 1<<16)
		}
		*to = n
		return nil
	}
}

// statefulWait is how long --stateful waits for its workspace.
const statefulWait = 10 * time.Minute

// selection returns the fields of the request. name is that of the workspace of
// --stateful, which the flag from provides.
func (w workspaceChoice) selection(name, from string) (out api.WorkspaceSelection, err error) {
	if w.stateful && w.name == "" {
		if w.name = name; name == "" {
			return out, work.UsageErrorf("--stateful needs a name for its workspace").WithHint("add %s, or --workspace NAME", from)
		}
	}
	if w.stateful {
		w.create = true
		if w.wait == 0 {
			w.wait = statefulWait
		}
	}
	name, isNew := strings.CutPrefix(w.name, "new:")
	switch {
	case w.name == "" && w.ofSession && (w.create || w.sizeGB != 0 || w.storage != ""):
		return out, work.UsageErrorf("a session has its own workspace").WithHint("remove --workspace-create, --workspace-size and --workspace-storage; see 'agentlab session create'")
	case w.name == "" && !w.ofSession && (w.create || w.sizeGB != 0 || w.storage != "" || w.wait != 0):
		return out, work.UsageErrorf("a flag for the workspace needs --workspace").WithHint("add --workspace NAME")
	case w.wait < 0 || w.wait > agentlab.MaxWorkspaceWait:
		return out, work.UsageErrorf("--workspace-wait %s is not between 0 and %s", w.wait, agentlab.FormatTTL(agentlab.MaxWorkspaceWait))
	case (w.sizeGB != 0 || w.storage != "") && !isNew && !w.create:
		return out, work.UsageErrorf("--workspace-size and --workspace-storage are for a new workspace").WithHint("use --workspace new:%s, or add --workspace-create", w.name)
	}
	out.Workspace, out.WorkspaceWaitSeconds = name, int((w.wait+time.Second-1)/time.Second)
	if isNew || w.create {
		out.WorkspaceCreate = &api.WorkspaceNew{SizeGB: w.sizeGB, Storage: w.storage, IfMissing: w.create}
	}
	return out, nil
}
