package devproxy

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// Domains of the names of projects. Browsers resolve the first to loopback by
// themselves (RFC 6761 §6.3); the second needs a resolver that asks this daemon.
const (
	localhostDomain = "sandbox.localhost"
	DNSDomain       = "sandbox.local"
)

// project has a name: a session, or a sandbox that belongs to none.
type project struct {
	id      string // of the session, or UID of the sandbox
	label   string // its name; unique
	session string // name of the session, "" if there is none
	sandbox sandboxRef
	exists  bool // there is a sandbox
}

// sandboxRef is what the service keeps of a sandbox. There may be thousands.
type sandboxRef struct {
	VMID    int
	UID     string
	Name    string
	State   agentlab.SandboxState
	Desired agentlab.Desired
}

// found is a sandbox that refresh has read.
type found struct {
	sandboxRef
	created time.Time
	hidden  bool // it is AgentLab's own
}

func foundOf(sb agentlab.Sandbox) found {
	return found{
		sandboxRef: sandboxRef{VMID: sb.VMID, UID: sb.UID, Name: sb.Name, State: sb.State, Desired: sb.Desired},
		created:    sb.CreatedAt, hidden: sb.Pooled() || sb.Maintenance(),
	}
}

// live reports whether the guest of the project can be reached.
func (p *project) live() bool {
	switch p.sandbox.State {
	case agentlab.SandboxReady, agentlab.SandboxRunning, agentlab.SandboxCompleted:
		return p.exists && p.sandbox.Desired == agentlab.DesiredRunning
	}
	return false
}

// projectsOf returns the projects with their names. A session and a sandbox can have
// the same name. It then belongs to the older of both, so that a new sandbox never gets
// the requests for another one; the other gets its name with its number.
func projectsOf(sessions []agentlab.Session, sandboxes []found) []*project {
	type candidate struct {
		*project
		name, suffix, order string
	}
	var all []candidate
	const order = "20060102150405.000000000"
	inSession := map[string]bool{}
	for _, v := range sessions {
		p := &project{id: v.ID, session: v.Name}
		if i := slices.IndexFunc(sandboxes, func(sb found) bool { return sb.VMID == v.VMID && sb.UID == v.UID }); i >= 0 {
			p.sandbox, p.exists = sandboxes[i].sandboxRef, true
			inSession[v.UID] = true
		}
		all = append(all, candidate{p, v.Name, strings.TrimPrefix(v.ID, "se-"), v.CreatedAt.UTC().Format(order) + v.ID})
	}
	for _, sb := range sandboxes {
		if !inSession[sb.UID] && !sb.hidden {
			all = append(all, candidate{&project{id: sb.UID, sandbox: sb.sandboxRef, exists: true}, sb.Name, fmt.Sprint(sb.VMID), sb.created.UTC().Format(order) + sb.UID})
		}
	}
	slices.SortFunc(all, func(a, b candidate) int { return cmp.Compare(a.order, b.order) })
	taken := map[string]bool{}
	out := make([]*project, 0, len(all))
	for _, c := range all {
		if c.label = c.name; taken[c.label] {
			c.label = c.name[:min(len(c.name), 62-len(c.suffix))] + "-" + c.suffix
		}
		if taken[c.label] || agentlab.ValidateName(c.label) != nil {
			continue // reached by 'agentlab port forward' only
		}
		taken[c.label] = true
		out = append(out, c.project)
	}
	return out
}

// branchLabel returns a DNS label for the directory of a worktree: lower case, with
// hyphens for all other characters. It is "" for the main checkout, and if nothing
// remains.
func branchLabel(worktree string) string {
	label := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9', r == '-':
			return r
		case r >= 'A' && r <= 'Z':
			return r + 'a' - 'A'
		}
		return '-'
	}, worktree)
	return strings.Trim(label[:min(len(label), 63)], "-")
}

// hostOf returns the host name of a listener of p.
func (p *project) hostOf(l guestapi.Listener) string {
	return joinHost(branchLabel(l.Worktree), p.label)
}

func joinHost(branch, label string) string {
	if branch != "" {
		return branch + "." + label + "." + localhostDomain
	}
	return label + "." + localhostDomain
}

// parseHost splits a host name below localhostDomain, or with dns below DNSDomain, into the
// labels of a worktree ("" if there is none) and of a project.
func parseHost(host string, dns bool) (branch, label string, local, ok bool) {
	host = strings.ToLower(host)
	rest, ok := strings.CutSuffix(host, "."+localhostDomain)
	if !ok && dns {
		rest, ok = strings.CutSuffix(host, "."+DNSDomain)
		local = ok
	}
	if !ok {
		return "", "", false, false
	}
	branch, label, two := strings.Cut(rest, ".")
	if !two {
		branch, label = "", branch
	}
	if label == "" || strings.Contains(label, ".") || two && branch == "" {
		return "", "", false, false
	}
	return branch, label, local, true
}
