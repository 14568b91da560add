// Package guestcheck has the checks for every reader of a guest's JSON on the
// host: bounds on its shape and, for each type of package guestapi that guests
// write, what AgentLab's own programs never send. A value that passes is still
// only a claim of the guest.
package guestcheck

import (
	"bytes"
	"encoding/json"
	"regexp"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// MaxDepth is the maximum nesting depth of a guest's JSON; the types of
// package guestapi need three.
const MaxDepth = 16

// Decode reads one JSON object into v, and nothing after it. The caller has
// limited the length of p. Unknown keys are ignored: a guest may run an older
// or newer program than the controller. The only code is invalid.
func Decode(p []byte, v any) error {
	bad := agentlab.Errorf(agentlab.CodeInvalid, "the body is not the expected JSON")
	depth, inString := 0, false
	for i := 0; i < len(p); i++ {
		switch c := p[i]; {
		case inString && c == '\\':
			i++
		case c == '"':
			inString = !inString
		case inString:
		case c == '{' || c == '[':
			if depth++; depth > MaxDepth {
				return bad
			}
		case c == '}' || c == ']':
			depth--
		}
	}
	if !bytes.HasPrefix(bytes.TrimLeft(p, " \t\r\n"), []byte("{")) || json.Unmarshal(p, v) != nil {
		return bad
	}
	return nil
}

// Phases lists the phases of a runner in their order.
var Phases = []string{"bootstrap", "clone", "setup", "agent", "judge", "collect", "upload", "done"}

var commitRE = regexp.MustCompile(`^([0-9a-f]{40}|[0-9a-f]{64})?$`)

const maxCommits, maxKills = 1 << 20, 1 << 20

// Steps lists the steps of a clone in their order.
var Steps = []string{guestapi.StepDownload, guestapi.StepReceive, guestapi.StepResolve, guestapi.StepCheckout}

// Report refuses, with code invalid and the field's name, a report that no
// agent-runner sends, and cuts its message to one line.
func Report(r *guestapi.Report) error {
	bad := func(field string) error {
		return agentlab.Errorf(agentlab.CodeInvalid, "the report's %s is not valid", field).WithField(field)
	}
	r.Message = agentlab.Reason(r.Message)
	status := agentlab.JobStatus(r.Status)
	switch {
	case !status.Valid() || status == agentlab.JobQueued:
		return bad("status")
	case !slices.Contains(Phases, r.Phase):
		return bad("phase")
	case r.ExitCode != nil && (*r.ExitCode < -1 || *r.ExitCode > 255):
		return bad("exit_code")
	case r.Progress != nil && (!slices.Contains(Steps, r.Progress.Step) || r.Progress.Percent < 0 || r.Progress.Percent > 100):
		return bad("progress")
	case r.Kills != nil && (r.Kills.Nested < 0 || r.Kills.Other < 0 || r.Kills.Nested > maxKills || r.Kills.Other > maxKills):
		return bad("kills")
	case r.Result == nil:
		return nil
	case !commitRE.MatchString(r.Result.BaseCommit) || !commitRE.MatchString(r.Result.HeadCommit):
		return bad("commit")
	case agentlab.ValidateRef(r.Result.Branch) != nil:
		return bad("branch")
	case r.Result.Commits < 0 || r.Result.Commits > maxCommits:
		return bad("commits")
	case r.Result.JudgeExit != nil && (*r.Result.JudgeExit < -1 || *r.Result.JudgeExit > 255):
		return bad("judge_exit")
	case r.Result.Uncommitted < 0 || r.Result.Uncommitted > maxCommits:
		return bad("uncommitted")
	}
	return nil
}

// Health refuses what AgentLab's control server never sends.
func Health(h guestapi.Health) error {
	for _, s := range []string{h.Version, h.BootID, h.Identity, h.System} {
		if len(s) > 128 || !agentlab.IsPrintable(s) {
			return agentlab.Errorf(agentlab.CodeInvalid, "its health contains unprintable text")
		}
	}
	if !agentlab.NestedState(h.Nested).Valid() {
		return agentlab.Errorf(agentlab.CodeInvalid, "its state of nested virtualization is not known")
	}
	if h.Uptime < 0 {
		return agentlab.Errorf(agentlab.CodeInvalid, "its uptime is negative")
	}
	return nil
}

// Workspace returns an error for sizes that no file system has.
func Workspace(w guestapi.Workspace) error {
	if w.Bytes <= 0 || w.Used < 0 || w.Used > w.Bytes {
		return agentlab.Errorf(agentlab.CodeInvalid, "its workspace has %d of %d bytes in use", w.Used, w.Bytes)
	}
	return nil
}

var userRE = regexp.MustCompile(`^[a-z_][a-z0-9_-]{0,31}$`)

// SSHKey returns an error for host keys that a client cannot use.
func SSHKey(r guestapi.SSHKeyResponse) error {
	bad := func(s string) bool { return s == "" || len(s) > 16<<10 || !agentlab.IsPrintable(s) }
	if r.Port == 0 || len(r.HostKeys) == 0 || len(r.HostKeys) > 16 ||
		slices.ContainsFunc(r.HostKeys, bad) || !userRE.MatchString(r.User) {
		return agentlab.Errorf(agentlab.CodeInvalid, "its SSH host keys are malformed")
	}
	return nil
}

// Listeners returns an error for a list that guest control never returns: it has at
// most guestapi.MaxListeners different ports in ascending order, and its texts can be
// shown. A worktree is a valid branch name.
func Listeners(l guestapi.Listeners) error {
	bad := func(what string) error {
		return agentlab.Errorf(agentlab.CodeInvalid, "its list of ports has an invalid %s", what)
	}
	switch {
	case len(l.State) > 64 || !agentlab.IsPrintable(l.State):
		return bad("state")
	case len(l.Listeners) > guestapi.MaxListeners:
		return bad("length")
	}
	last := uint16(0)
	for _, e := range l.Listeners {
		switch {
		case e.Port <= last:
			return bad("port")
		case len(e.Program) > 64 || !agentlab.IsPrintable(e.Program):
			return bad("program")
		case agentlab.ValidateRef(e.Worktree) != nil:
			return bad("worktree")
		}
		last = e.Port
	}
	return nil
}
