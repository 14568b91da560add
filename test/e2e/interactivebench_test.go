package e2e

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/test/fakellm"
)

// Samples of BenchmarkInteractive: of short commands, and of starts of an agent.
const (
	interactiveSamples = 9
	agentSamples       = 3
)

// untilShown runs agentlab on a terminal and returns the time until its output has a
// text. Then it detaches.
func (l *lab) untilShown(repo, text string, args ...string) time.Duration {
	l.Helper()
	began := time.Now()
	o := l.terminalTo(repo, args...)
	o.until(text)
	took := time.Since(began)
	o.drain()
	o.detach()
	return took
}

// BenchmarkInteractive measures the interactive workflow: exec of true and attach to
// the first output of the terminal in a warm sandbox (attach at most 150 ms more: SC-004
// asks for 500 ms), sync of one commit (1 s; SC-003 asks for 5 s), a start in a session
// that runs, and an agent's prompt in a fresh clone, as a ratio to a raw boot (SC-001).
func BenchmarkInteractive(b *testing.B) {
	cold, vm := newColdLab(b)
	cold.ok("daemon", "stop")
	l, n := newNetLab(b)
	n.HandleHTTP("llm.example.com", 80, fakellm.New(fakellm.Step{Say: "hello"}))
	l.secret("env.ANTHROPIC_BASE_URL", "http://llm.example.com")
	l.secret("env.ANTHROPIC_AUTH_TOKEN", "sk-test")
	l.workProfile("work", "base")
	l.workProfile("agents", "agents")
	repo := filepath.Join(b.TempDir(), "app")
	if err := os.Rename(sampleRepo(b), repo); err != nil {
		b.Fatal(err)
	}
	l.in(repo, "start", "--profile", "work", "--agent", "none", "--detach")
	l.ok("image", "warm", "agents", "--profile", "agents")
	l.guest("app", "git config user.name A; git config user.email a@localhost")
	var exec, attach, sync, start, raw, prompt []time.Duration
	for b.Loop() {
		for range interactiveSamples {
			exec = append(exec, timed(func() { l.ok("exec", "app", "true") }))
			attach = append(attach, l.untilShown(repo, "[main]", "attach"))
			l.guest("app", "git commit -q --allow-empty -m x")
			sync = append(sync, timed(func() { l.in(repo, "sync") }))
			start = append(start, timed(func() { l.in(repo, "start", "--agent", "none", "--detach") }))
		}
		l.in(repo, "rm", "--yes")
		for range agentSamples {
			raw = append(raw, timed(func() { vm.boot(b) }))
			clone := filepath.Join(b.TempDir(), "app")
			git(b, repo, "clone", "-q", repo, clone)
			prompt = append(prompt, l.untilShown(clone, "permissions", "claude", "--profile", "agents"))
			l.in(clone, "rm", "--yes")
		}
	}
	base := report(b, "exec of true in a warm sandbox", exec)
	to := report(b, "attach to the first output", attach)
	b.ReportMetric(float64(to)/float64(base), "attach/exec")
	b.ReportMetric(float64((to - base).Milliseconds()), "attach-exec-ms")
	b.ReportMetric(report(b, "sync of one commit", sync).Seconds(), "sync-s")
	b.ReportMetric(report(b, "start in a running session", start).Seconds(), "start-s")
	boot := report(b, "raw cold boot", raw)
	b.ReportMetric(float64(report(b, "claude in a fresh clone to its prompt", prompt))/float64(boot), "prompt/raw")
}
