package runner

import (
	"strings"
	"testing"
)

// An agent sees and renews the lease of its sandbox.
func TestAgentRenewsItsLease(t *testing.T) {
	s := newShellSandbox(t, `agentlab-lease renew --minutes 90
agentlab-lease
agentlab-lease renew --minutes 2000 || echo "refused"
agentlab-lease renew --minutes -1 || echo "negative"
agentlab-lease extend || echo "usage"
agentlab-lease renew --minutes 100000 || echo "too long"`)
	if rep := s.finish(); rep.Status != "COMPLETED" {
		t.Errorf("%+v", rep)
	}
	log := s.Log()
	for _, want := range []string{
		"ends at 1970-01-01T01:30:00Z\nthe lease of this sandbox ends at 1970-01-01T01:30:00Z\n", "the profile does not allow it\nrefused\n", "negative\n", "usage\n", "too long\n",
	} {
		if !strings.Contains(log, want) {
			t.Errorf("the log lacks %q: %q", want, log)
		}
	}
}

// An agent posts and reads with agentlab-msg, and learns of it from its instructions.
// Its secrets are not in the messages, and what controls a terminal is not printed.
func TestAgentPostsMessages(t *testing.T) {
	s := newShellSandbox(t, `agentlab-msg post --kind claim --data '{"file":"a.go"}' I change a.go
printf 'key is %s \033[31mred' "`+secret+`" | agentlab-msg post -
agentlab-msg tail
agentlab-msg tail --after 1 --json
agentlab-msg tail --scope session || echo "none"
agentlab-msg post --data '[1]' x || echo "refused"
agentlab-msg frob || echo "usage"
grep -c agentlab-msg ~/.claude/CLAUDE.md ~/.codex/AGENTS.md`)
	if rep := s.finish(); rep.Status != "COMPLETED" {
		t.Errorf("%+v", rep)
	}
	log := s.Log()
	for _, want := range []string{"message 1 posted\nmessage 2 posted\n", `claim  I change a.go {"file":"a.go"}`, "red\n", "none\n", "refused\n", "usage\n", "/.claude/CLAUDE.md:", "/.codex/AGENTS.md:"} {
		if !strings.Contains(log, want) {
			t.Errorf("the log lacks %q: %q", want, log)
		}
	}
	if strings.Contains(log, secret) || strings.Contains(log, "\033") {
		t.Errorf("log %q", log)
	}
}
