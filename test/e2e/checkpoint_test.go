package e2e

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// lostTask makes three commits, and then works on a file that contains the time.
const lostTask = `for i in 1 2 3; do echo $i > f$i; git add f$i; git commit -qm "commit $i"; done
echo working; while :; do date +%s > clock.txt; sleep 1; done`

// fetchedWork is the output of job fetch.
type fetchedWork struct {
	Commits    int    `json:"commits"`
	Ref        string `json:"ref"`
	ChangesRef string `json:"changes_ref"`
	Checkpoint *struct {
		JobStatus string `json:"job_status"`
	} `json:"checkpoint"`
}

// fetchWork fetches the work of a job. clock is the time in its file.
func (l *lab) fetchWork(repo, id string) (got fetchedWork, clock time.Time, r result) {
	l.Helper()
	r = l.run(repo, "--json", "job", "fetch", "--with-changes", id)
	if r.code == 0 {
		if err := json.Unmarshal([]byte(r.stdout), &got); err != nil {
			l.Fatalf("job fetch: %v: %v", err, r)
		}
	}
	if got.ChangesRef != "" {
		out, err := exec.CommandContext(l.Context(), "git", "-C", repo, "show", got.ChangesRef+":clock.txt").Output()
		if n, nerr := strconv.ParseInt(strings.TrimSpace(string(out)), 10, 64); err == nil && nerr == nil {
			clock = time.Unix(n, 0)
		}
	}
	return got, clock, r
}

// workSurvives waits for two checkpoints of a job with lostTask, calls kill, and then
// fetches everything.
func (l *lab) workSurvives(t *testing.T, repo, id string, kill func()) {
	t.Helper()
	var got fetchedWork
	var first, clock time.Time
	var r result
	if !eventually(commandLimit, func() bool {
		got, first, r = l.fetchWork(repo, id)
		return got.Commits == 3 && !first.IsZero()
	}) {
		t.Fatalf("there is no checkpoint: %v\n%s", r, l.ok("job", "show", id))
	}
	if got.Checkpoint == nil || got.Checkpoint.JobStatus != "RUNNING" || !strings.Contains(r.stderr, "this is the checkpoint of") {
		t.Errorf("%+v\n%v", got, r)
	}
	if !eventually(commandLimit, func() bool { _, clock, _ = l.fetchWork(repo, id); return clock.After(first) }) {
		t.Fatal("there is no second checkpoint")
	}
	t.Logf("a checkpoint was at most %v old before it was replaced", time.Since(first).Round(time.Second))
	second := clock
	kill()
	killed := time.Now()
	j := l.finish(id)
	if j.Status != "FAILED" || j.Reason == "" {
		t.Errorf("job is %s (%s)", j.Status, j.Reason)
	}
	git(t, repo, "update-ref", "-d", got.Ref)
	got, clock, r = l.fetchWork(repo, id)
	if got.Commits != 3 || got.Checkpoint == nil || got.Checkpoint.JobStatus != "FAILED" {
		t.Fatalf("%+v\n%v", got, r)
	}
	if log := git(t, repo, "log", "--format=%s", "-3", got.Ref); log != "commit 3\ncommit 2\ncommit 1" {
		t.Errorf("commits %q", log)
	}
	t.Logf("the uncommitted file is %v old", killed.Sub(clock).Round(time.Second))
	if clock.Before(second) { // how often checkpoints are made is in TestPace of the runner
		t.Errorf("the uncommitted file is of %v, before the last checkpoint of %v", clock, second)
	}
	if r := l.run(repo, "job", "diff", id); r.code != 0 || !strings.Contains(r.stdout, "clock.txt") {
		t.Errorf("job diff: %v", r)
	}
}

// salvages extracts the work of a job with lostTask from the disk that its lost VM left.
func (l *lab) salvages(t *testing.T, repo, id string) {
	t.Helper()
	kept := strconv.Itoa(l.vmOf(t, id))
	if !eventually(commandLimit, func() bool { sb := l.sandbox(t, kept); return sb.Salvage && sb.State == "STOPPED" }) {
		t.Fatalf("the disk is not kept: %+v", l.sandbox(t, kept))
	}
	var j api.Job
	r := l.run("", "--json", "job", "salvage", id)
	if err := json.Unmarshal([]byte(r.stdout), &j); err != nil || j.Status != "COMPLETED" || j.Salvages != id || j.Result.Commits != 3 {
		t.Fatalf("%+v\n%v\n%s", j, r, l.ok("job", "logs", j.ID))
	}
	got, _, r := l.fetchWork(repo, j.ID)
	if r.code != 0 {
		t.Fatal(r)
	}
	if log := git(t, repo, "log", "--format=%s", "-3", got.Ref); got.Commits != 3 || log != "commit 3\ncommit 2\ncommit 1" {
		t.Errorf("%+v %q\n%v", got, log, r)
	}
	if r := l.run("", "sandbox", "destroy", kept); r.code != 0 || !strings.Contains(r.stderr, "agentlab job salvage "+id) {
		t.Errorf("%v", r)
	}
	l.ok("sandbox", "destroy", "--purge", kept)
	l.noSandboxes()
}

// Kill -9 of the daemon, the supervisor and QEMU loses no commit, and of a file
// at most the last minute.
func TestWorkSurvivesALostVM(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	repo := sampleRepo(t)
	id := l.submit("--repo", repo, "--agent", "shell", "--task", lostTask)
	l.workSurvives(t, repo, id, func() {
		vmid := l.vmOf(t, id)
		if err := l.kill9("agentlabd", "run"); err != nil {
			t.Fatal(err)
		}
		if err := l.kill9("agentlabd", "vmm", "/"+strconv.Itoa(vmid)+"-"); err != nil {
			t.Fatal(err)
		}
		if err := l.killQEMU(vmid); err != nil {
			t.Logf("QEMU ended with its supervisor: %v", err)
		}
	})
	l.salvages(t, repo, id)
}

// vmOf returns the number of the VM of a job.
func (l *lab) vmOf(t *testing.T, id string) int {
	t.Helper()
	var j api.Job
	if err := json.Unmarshal([]byte(l.ok("--json", "job", "show", id)), &j); err != nil || j.SandboxVMID == 0 {
		t.Fatalf("%+v, %v", j, err)
	}
	return j.SandboxVMID
}

// The same on Proxmox VE, where the guest is a network namespace with the real
// runner and agent.
func TestProxmoxWorkSurvivesALostVM(t *testing.T) {
	t.Parallel()
	if !insideLightPVE(t) {
		return
	}
	p := newLightPVELab(t, "shell", pvenode.Config{})
	files, err := os.MkdirTemp("/dev/shm", "agentlab-guest-*")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(files) })
	p.guests.files, p.guests.bin = files, p.bin
	p.plainProfile("repo: {clone_path: " + filepath.Join(files, "repo") + "}\n")
	p.ok("host", "network", "apply")
	repo := sampleRepo(t)
	id := p.submit("--repo", repo, "--profile", "plain", "--agent", "shell", "--task", lostTask)
	p.workSurvives(t, repo, id, func() {
		vmid := p.vmOf(t, id)
		if err := p.kill9("agentlabd", "run"); err != nil {
			t.Fatal(err)
		}
		p.node.PowerOff(vmid)
	})
	p.noSandboxes()
	p.clean()
}
