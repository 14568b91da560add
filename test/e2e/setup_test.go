package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

// setupSamples is the number of samples of each figure of BenchmarkSetup.
const setupSamples = 3

// setupRepo makes a repository with a command under setup.
func setupRepo(t testing.TB, command string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "repo")
	for name, text := range map[string]string{
		".agentlab.yaml": fmt.Sprintf("setup:\n  - %q\n", command),
		".gitignore":     "/deps\n",
	} {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, args := range [][]string{{"init", "-q", "-b", "main"}, {"add", "."}, {"commit", "-qm", "first"}} {
		git(t, dir, args...)
	}
	return dir
}

// keepSetups turns on the snapshots after setup.
func (l *lab) keepSetups() {
	l.Helper()
	dir := filepath.Join(l.home, "config")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		l.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.yaml"), []byte("limits:\n  setup_cache_gb: 20\n"), 0o600); err != nil {
		l.Fatal(err)
	}
}

func TestSecondJobSkipsSetup(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.keepSetups()
	t.Run("scripts", func(t *testing.T) { runScripts(l, t, "qemu", txtar(t, "setup")...) })
	l.noSandboxes()
}

func (l *lab) setups() (list api.List[api.Setup]) {
	l.Helper()
	if err := json.Unmarshal([]byte(l.ok("--json", "setup", "list")), &list); err != nil {
		l.Fatal(err)
	}
	return list
}

// The daemon is killed while the snapshot after setup is saved. The job completes, and
// there is one whole snapshot or none.
func TestKillDuringSetupSnapshot(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.keepSetups()
	repo := setupRepo(t, "mkdir deps; head -c 20000000 /dev/urandom >deps/data")
	id := strings.TrimSpace(l.ok("job", "run", "--no-wait", "--repo", repo, "--agent", "shell", "--task", "ls deps | wc -l"))
	if !eventually(settleLimit, func() bool { return len(l.setups().Items) == 1 }) {
		t.Fatal("no snapshot is made")
	}
	if err := l.kill9("agentlabd", "run"); err != nil {
		t.Fatal(err)
	}
	l.ok("daemon", "start")
	var j api.Job
	if !eventually(settleLimit, func() bool {
		err := json.Unmarshal([]byte(l.ok("--json", "job", "show", id)), &j)
		return err == nil && agentlab.JobStatus(j.Status).Final()
	}) || j.Status != string(agentlab.JobCompleted) {
		t.Fatalf("%+v", j)
	}
	l.noSandboxes()
	if !eventually(settleLimit, func() bool {
		entries, _ := os.ReadDir(filepath.Join(l.home, "state", "snapshots"))
		list := l.setups().Items
		return len(entries) == len(list) && (len(list) == 0 || list[0].State == string(agentlab.SnapshotReady))
	}) {
		t.Errorf("%+v", l.setups())
	}
}

// BenchmarkSetup compares a whole job whose repository was set up before with one that
// runs the command under setup and makes the snapshot, and with one without snapshots. The
// command downloads and builds the packages of BenchmarkWorkspaceCache.
func BenchmarkSetup(b *testing.B) {
	l, n := newNetLab(b)
	l.keepSetups()
	index, _ := packageIndex(b)
	n.HandleHTTP("pypi.example.com", 80, index)
	repo := setupRepo(b, installPackages("deps"))
	run := func(reused bool, args ...string) time.Duration {
		return timed(func() {
			j, r := l.job(append([]string{"--repo", repo, "--agent", "shell", "--image", "base", "--task", "ls deps >/dev/null"}, args...)...)
			if j.Status != "COMPLETED" || reused != (j.Setup != nil && j.Setup.Reused) {
				b.Fatalf("%+v %v\n%s", j.Setup, r, l.ok("job", "logs", j.ID))
			}
			l.noSandboxes()
		})
	}
	run(false, "--no-setup-cache")
	var plain, first, second []time.Duration
	for b.Loop() {
		for range setupSamples {
			plain = append(plain, run(false, "--no-setup-cache"))
			first = append(first, run(false))
			second = append(second, run(true))
			l.ok("setup", "rm", "--all")
		}
	}
	without := report(b, "job without snapshots after setup", plain)
	cold := report(b, "first job: runs setup and makes the snapshot", first)
	warm := report(b, "second job: continues the snapshot", second)
	b.ReportMetric(float64(warm)/float64(cold), "second/first")
	b.ReportMetric(float64(warm)/float64(without), "second/plain")
	b.ReportMetric(float64(cold)/float64(without), "first/plain")
}
