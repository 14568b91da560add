package e2e

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"text/tabwriter"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/test/guard"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// killTask works, and then uploads, long enough to be killed in the middle.
const killTask = `echo working; sleep 4; echo finished; mkdir out; for i in $(seq 400); do echo $i > out/$i; done`

// stage is a moment in the life of a job, recognised by its events.
type stage struct {
	name string
	is   func(l *lab, e api.Event) bool
}

func phase(name string) func(*lab, api.Event) bool {
	return func(_ *lab, e api.Event) bool { return e.Kind == agentlab.EventJobPhase && e.Data["phase"] == name }
}

func sandboxState(s agentlab.SandboxState) func(*lab, api.Event) bool {
	return func(_ *lab, e api.Event) bool {
		return e.Kind == agentlab.EventSandboxState && e.Data["to"] == string(s)
	}
}

var stages = []stage{
	{"created", func(_ *lab, e api.Event) bool { return e.Kind == agentlab.EventJobCreated }},
	{"provisioning", sandboxState(agentlab.SandboxProvisioning)},
	{"booting", sandboxState(agentlab.SandboxBooting)},
	{"clone", phase("clone")},
	{"agent", func(l *lab, e api.Event) bool {
		return phase("agent")(l, e) && eventually(commandLimit, func() bool {
			return strings.Contains(l.run("", "job", "logs", e.JobID).stdout, "working")
		})
	}},
	{"upload", phase("upload")},
	{"ended", func(_ *lab, e api.Event) bool {
		return e.Kind == agentlab.EventJobStatus && agentlab.JobStatus(fmt.Sprint(e.Data["status"])).Final()
	}},
}

// victim is one of our processes and how to kill it.
type victim struct {
	name string
	kill func(l *lab, vmid int) error
}

var victims = []victim{
	{"agentlabd", func(l *lab, _ int) error { return l.kill9("agentlabd", "run") }},
	{"supervisor", func(l *lab, vmid int) error { return l.kill9("agentlabd", "vmm", fmt.Sprintf("/%d-", vmid)) }},
	{"qemu", func(l *lab, vmid int) error { return l.killQEMU(vmid) }},
	{"runner", func(l *lab, vmid int) error { return l.killGuest(vmid, "agent-runner run") }},
	{"guestd", func(l *lab, vmid int) error { return l.killGuest(vmid, "agent-runner guestd") }},
}

func (l *lab) kill9(words ...string) error {
	pids := l.processes(words...)
	if len(pids) == 0 {
		return fmt.Errorf("no process %v", words)
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			return err
		}
	}
	if !eventually(settleLimit, func() bool { return !slices.ContainsFunc(pids, guard.Alive) }) {
		return fmt.Errorf("processes %d of %v did not end", pids, words)
	}
	return nil
}

func (l *lab) killQEMU(vmid int) error {
	for _, pid := range l.processes("qemu-system") {
		cwd, err := filepath.EvalSymlinks(filepath.Join("/proc", strconv.Itoa(pid), "cwd"))
		if err == nil && strings.Contains(cwd+cmdline(pid), fmt.Sprintf("/%d-", vmid)) {
			return syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	return fmt.Errorf("no QEMU of %d", vmid)
}

// killGuest kills a program in the guest, a moment after the command that
// asks for it has ended: the way to guestd is through guestd itself.
func (l *lab) killGuest(vmid int, pattern string) error {
	pattern = "[" + pattern[:1] + "]" + pattern[1:] // not this shell itself
	script := `pgrep -f '` + pattern + `' || exit 1
		setsid sh -c "sleep 0.1; pkill -9 -f '` + pattern + `'" >/dev/null 2>&1 </dev/null &
		echo killing`
	r := l.run("", "exec", "--user", "root", strconv.Itoa(vmid), "--", "sh", "-c", script)
	if !strings.Contains(r.stdout, "killing") {
		return fmt.Errorf("nothing killed: %v", r)
	}
	return nil
}

// outcomes tells which ends are right when a victim dies at a stage; none
// means that the victim does not exist then. FAILED must come with a reason.
func outcomes(victimName, stageName string) []string {
	const completed, failed = "COMPLETED", "FAILED"
	i := slices.IndexFunc(stages, func(s stage) bool { return s.name == stageName })
	booting, clone, upload := 2, 3, 5
	switch victimName {
	case "agentlabd":
		return []string{completed}
	case "supervisor", "qemu":
		switch {
		case i < booting:
			return nil
		case i == booting:
			return []string{failed, completed} // an interrupted start is repeated
		case i < upload:
			return []string{failed}
		case i == upload:
			return []string{completed, failed} // its report may have been faster
		}
		return []string{completed} // it had ended; only the tidying up is left
	default:
		if i < clone || i > upload {
			return nil
		}
		return []string{completed}
	}
}

// killCase is a cell of the kill table: who dies when, and the right ends.
type killCase struct {
	victim victim
	stage  stage
	want   []string
}

// Killing any of our processes at any stage ends the job with a status and a
// reason, and leaves no process, file or sandbox.
func TestKill(t *testing.T) {
	t.Parallel()
	repo := sampleRepo(t)
	var mu sync.Mutex
	table := map[string]map[string]string{}
	for _, v := range victims {
		table[v.name] = map[string]string{}
	}
	var cases []killCase
	for _, v := range victims {
		for _, s := range stages {
			if want := outcomes(v.name, s.name); want != nil {
				cases = append(cases, killCase{v, s, want})
			}
		}
	}
	cases = sample.Cover(t, cases, func(c killCase) []string { return []string{c.victim.name} })
	t.Run("all", func(t *testing.T) { // returns when those that run beside each other have ended
		for _, c := range cases {
			t.Run(c.victim.name+" at "+c.stage.name, func(t *testing.T) {
				t.Parallel()
				j := killAt(t, repo, c.victim, c.stage)
				mu.Lock()
				table[c.victim.name][c.stage.name] = j.Status
				mu.Unlock()
				if !slices.Contains(c.want, j.Status) {
					t.Errorf("job is %s (%s), want %v", j.Status, j.Reason, c.want)
				}
				if j.Status == "FAILED" && j.Reason == "" {
					t.Error("FAILED without a reason")
				}
			})
		}
	})
	t.Log("outcomes:\n" + outcomeTable(table))
}

func killAt(t *testing.T, repo string, v victim, s stage) api.Job {
	t.Helper()
	l := newLab(t)
	l.ok("daemon", "start")
	id := l.submit("--repo", repo, "--agent", "shell", "--task", killTask)
	if err := l.killWhen(id, v, s); err != nil {
		t.Fatal(err)
	}
	j := l.finish(id)
	if j.Status == "COMPLETED" {
		if log := l.ok("job", "logs", id); strings.Count(log, "finished") != 1 {
			t.Errorf("the log was damaged: %q", log)
		}
	}
	l.noSandboxes()
	l.noSandboxFiles()
	return j
}

// killWhen follows the job's and its sandbox's events and kills the victim
// at the first that belongs to the stage.
func (l *lab) killWhen(id string, v victim, s stage) error {
	ctx, cancel := context.WithTimeout(context.Background(), commandLimit)
	defer cancel()
	vmid := 0
	for e, err := range l.client().FollowEvents(ctx, client.EventQuery{}) {
		if err != nil {
			return err
		}
		if e.SandboxVMID != 0 {
			vmid = e.SandboxVMID
		}
		if !s.is(l, e) {
			if e.Kind == agentlab.EventJobStatus && agentlab.JobStatus(fmt.Sprint(e.Data["status"])).Final() {
				break
			}
			continue
		}
		err := v.kill(l, vmid)
		if err != nil && s.name == "ended" {
			return nil // the tidying up was faster
		}
		return err
	}
	return fmt.Errorf("stage %s never came", s.name)
}

func outcomeTable(table map[string]map[string]string) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
	fmt.Fprint(w, "killed")
	for _, s := range stages {
		fmt.Fprint(w, "\t", s.name)
	}
	fmt.Fprintln(w)
	for _, v := range victims {
		fmt.Fprint(w, v.name)
		for _, s := range stages {
			status := table[v.name][s.name]
			if status == "" {
				status = "-"
			}
			fmt.Fprint(w, "\t", status)
		}
		fmt.Fprintln(w)
	}
	_ = w.Flush()
	return b.String()
}
