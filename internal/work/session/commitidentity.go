package session

import (
	"context"
	"fmt"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

// The values of agentlab.identity in the configuration of git: whose name and address
// commits in new sessions have.
const (
	identityUser  = "user"
	identityAgent = "agent"
)

// askIdentity sets the identity of commits in the session, if it is the user's. For a new
// session it asks once, on a terminal, and writes the answer to the configuration of the
// user. Otherwise the guest has an identity of its own.
func askIdentity(ctx context.Context, ui work.UI, l Link, o *StartOptions) error {
	get := func(key string) string {
		value, _ := gitsafe.Git(ctx, l.Path, "config", "--get", key)
		return value
	}
	name, email := get("user.name"), get("user.email")
	policy := get("agentlab.identity")
	switch {
	case policy != "" && policy != identityUser && policy != identityAgent:
		return agentlab.Errorf(agentlab.CodeInvalid, "agentlab.identity is %q in the configuration of git", policy).
			WithHint("use %s or %s: git config --global agentlab.identity %[2]s", identityUser, identityAgent)
	case name == "" || email == "":
		return nil
	case policy == "" && (l.Session == "" || o.Fresh) && ui.Asks():
		answer, ok := ui.Prompt(fmt.Sprintf("Commits in the VM: in your name, %s <%s>, instead of %q? [y/N] ", agentlab.WithoutControls(name), agentlab.WithoutControls(email), guestapi.AgentName))
		if !ok {
			return nil
		}
		if policy = identityAgent; answer == "y" || answer == "yes" {
			policy = identityUser
		}
		if _, err := gitsafe.Git(ctx, l.Path, "config", "--global", "agentlab.identity", policy); err != nil {
			ui.Progressf("note: the answer is not stored: %s", agentlab.WithoutControls(err.Error()))
		}
	}
	if policy == identityUser {
		o.userName, o.userEmail = name, email
	}
	return nil
}
