package e2e

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/test/fakenet"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// The golden path on Proxmox VE, where the daemon runs on the node.
func TestProxmoxShell(t *testing.T) { testProxmox(t, "shell", (*pveLab).goldenJob) }

// The golden path on Proxmox VE through its API, with a token of the smallest
// role.
func TestProxmoxREST(t *testing.T) { testProxmox(t, "rest", (*pveLab).goldenJob) }

func TestProxmoxShellWorkspace(t *testing.T) { testProxmox(t, "shell", (*pveLab).goldenWorkspace) }

func TestProxmoxRESTWorkspace(t *testing.T) { testProxmox(t, "rest", (*pveLab).goldenWorkspace) }

func TestProxmoxShellSalvage(t *testing.T) { testProxmox(t, "shell", (*pveLab).goldenSalvage) }

func TestProxmoxRESTSalvage(t *testing.T) { testProxmox(t, "rest", (*pveLab).goldenSalvage) }

// TestProxmoxScripts uses one transport: above it all is the same.
func TestProxmoxScripts(t *testing.T) {
	testProxmox(t, "shell", func(p *pveLab, t *testing.T) { runScripts(p.lab, t, "proxmox", proxmoxScripts(t)...) })
}

func testProxmox(t *testing.T, transport string, run func(*pveLab, *testing.T)) {
	t.Parallel()
	p := newProxmoxHost(t, transport)
	if p == nil {
		return
	}
	run(p, t)
	p.clean()
}

// newProxmoxHost returns a node with its network, or nil outside of the namespaces of
// the test.
func newProxmoxHost(t *testing.T, transport string) *pveLab {
	if !insidePVE(t) {
		return nil
	}
	p := newPVELab(t, transport)
	t.Cleanup(func() {
		if t.Failed() {
			p.consoles()
		}
	})
	p.ok("host", "network", "apply")
	return p
}

// The scripts of TestAcceptanceQEMU on Proxmox VE.
func TestProxmoxShellAcceptance(t *testing.T) { proxmoxAcceptance(t, "shell") }

// The same through the API.
func TestProxmoxRESTAcceptance(t *testing.T) { proxmoxAcceptance(t, "rest") }

func proxmoxAcceptance(t *testing.T, transport string) {
	sample.OnlyFull(t, "all scripts in emulated machines, one after the other, take half an hour")
	t.Parallel()
	if p := newProxmoxHost(t, transport); p != nil {
		p.acceptance(t)
		p.clean()
	}
}

// proxmoxScripts is one of the scripts, or all in a full run. The one about
// attempts needs four machines at once, and runs in a full run only.
func proxmoxScripts(t *testing.T) []string {
	t.Helper()
	files := scripts(t)
	if !sample.Full() {
		files = slices.DeleteFunc(files, func(path string) bool { return filepath.Base(path) == "attempts.txtar" })
	}
	return sample.Of(t, 1, files)
}

// acceptance runs the scripts of TestAcceptanceQEMU, one after the other.
func (p *pveLab) acceptance(t *testing.T) {
	for _, path := range acceptance(t) {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".txtar"), func(t *testing.T) {
			sub := p.in(t)
			t.Cleanup(func() { // after the script
				sub.deleteSessions()
				sub.destroyAll()
				for _, which := range [][]string{nil, {"--trash"}} {
					var list api.List[api.Workspace]
					if err := json.Unmarshal([]byte(sub.ok(append([]string{"--json", "workspace", "list"}, which...)...)), &list); err != nil {
						t.Fatal(err)
					}
					for _, v := range list.Items {
						sub.ok("workspace", "delete", v.ID, "--purge", "--yes")
					}
				}
				sub.clean()
			})
			runScripts(sub.lab, t, "proxmox", path)
		})
	}
}

// deleteSessions deletes all sessions, which keep their workspaces.
func (p *pveLab) deleteSessions() {
	p.Helper()
	var list api.List[api.Session]
	if err := json.Unmarshal([]byte(p.ok("--json", "session", "list")), &list); err != nil {
		p.Fatal(err)
	}
	for _, s := range list.Items {
		p.run("", "session", "stop", s.ID) // it may have no sandbox
		p.ok("session", "delete", s.ID, "--yes", "--keep-workspace")
	}
}

// in is the same lab, whose checks fail a subtest.
func (p *pveLab) in(t *testing.T) *pveLab {
	sub, l := *p, *p.lab
	l.TB, sub.lab = t, &l
	return &sub
}

const pvePassword = "hunter2-s3cret/&$token"

// goldenJob is one job from a repository by URL to its artifacts, after which
// nothing is left. While its agent works, guest control and the daemon are
// killed, and it is tried what the guest may reach.
func (p *pveLab) goldenJob(t *testing.T) {
	host, err := fakenet.NewGitHost(t.TempDir(), fakenet.GitConfig{User: "x-access-token", Password: pvePassword, Private: true})
	if err != nil {
		t.Fatal(err)
	}
	bare, err := host.Create(t.Context(), "org/repo.git", map[string]string{"README": "hello\n", ".agentlab.yaml": "outputs:\n  - out/**\n"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.internet.Net.Git("git.example.com", host); err != nil {
		t.Fatal(err)
	}
	p.secret("git.url", "http://git.example.com")
	p.secret("git.token", pvePassword)
	p.secret("env.GREETING", "a value for the agent alone")

	began := time.Now()
	const task = `[ "$GREETING" = "a value for the agent alone" ] && echo "the secret is there"
echo working; while [ ! -e /tmp/go ]; do sleep 0.2; done; echo finished
echo more >> README; git commit -qam More; mkdir -p out && echo built > out/result.txt; df -B1G --output=size / | tail -1; nproc`
	p.node.ResetCalls()
	id := p.submit("--repo", "http://git.example.com/org/repo.git", "--ref", "main", "--agent", "shell", "--task", task)
	if !eventually(commandLimit, func() bool { return strings.Contains(p.run("", "job", "logs", id).stdout, "working") }) {
		t.Fatalf("the agent does not run: %s", p.run("", "job", "show", id))
	}
	t.Logf("the agent worked after %v and %d calls of the node: %v", time.Since(began).Round(time.Second), p.node.TotalCalls(), p.node.Calls())
	p.killedDaemon(t, id)
	p.killedGuestControl(t, id)
	p.egress(t, id)
	p.ok("exec", id, "--", "touch", "/tmp/go")
	j := p.finish(id)
	log := p.ok("job", "logs", j.ID)
	if j.Status != "COMPLETED" || j.Result.Commits != 1 || !j.Result.Pushed {
		t.Fatalf("%+v\nlog:\n%s", j, log)
	}
	t.Logf("the job took %v and %d calls of the node: %v; log:\n%s", time.Since(began).Round(time.Second), p.node.TotalCalls(), p.node.Calls(), log)
	if !strings.Contains(log, "the secret is there") || strings.Contains(log, "a value for the agent") {
		t.Errorf("log:\n%s", log)
	}
	if strings.Count(log, "finished") != 1 || strings.Count(log, "working") != 1 { // it was not begun again
		t.Errorf("log:\n%s", log)
	}
	pushed, err := host.Git(t.Context(), "-C", bare, "show", "agentlab/"+j.ID+":README")
	if err != nil || strings.TrimSpace(pushed) != "hello\nmore" {
		t.Errorf("pushed %q, %v", pushed, err)
	}
	var paths []string
	for _, a := range j.Artifacts {
		paths = append(paths, a.Path)
	}
	if !slices.Contains(paths, "outputs/out/result.txt") {
		t.Errorf("no artifact of the task among %v", paths)
	}
	out := filepath.Join(t.TempDir(), "result")
	p.ok("job", "artifacts", "download", j.ID, "outputs/out/result.txt", "--out", out)
	if text, _ := os.ReadFile(out); string(text) != "built\n" {
		t.Errorf("the artifact holds %q", text)
	}
	p.noSandboxes()
	p.clean()
}

// killedDaemon kills the daemon; the next one goes on with what runs.
func (p *pveLab) killedDaemon(t *testing.T, id string) {
	t.Helper()
	for _, pid := range p.processes("agentlabd", "run") {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	var r result
	if !eventually(settleLimit, func() bool { r = p.run("", "exec", id, "--", "true"); return r.code == 0 }) {
		t.Fatalf("after the kill: %v", r)
	}
}

// killedGuestControl kills guest control inside the guest: it is started
// again, and nothing else with it. Everything that the guest's system began
// went well.
func (p *pveLab) killedGuestControl(t *testing.T, id string) {
	t.Helper()
	const runs = "pgrep -u agent -f '[a]gent-runner run'"
	before := p.ok("exec", id, "--", "sh", "-c", runs)
	p.ok("exec", id, "--", "sudo", "systemd-run", "--quiet", "--on-active=1", "systemctl", "kill", "-s", "KILL", "--kill-whom=main", "agentlab-guest.service")
	var r result
	if !eventually(settleLimit, func() bool {
		r = p.run("", "exec", id, "--", "systemctl", "show", "-p", "NRestarts", "--value", "agentlab-guest.service")
		return r.code == 0 && strings.TrimSpace(r.stdout) != "0"
	}) {
		t.Fatalf("guest control was not started again: %v", r)
	}
	if after := p.ok("exec", id, "--", "sh", "-c", runs); after != before {
		t.Errorf("the runner was %q and is %q", before, after)
	}
	const well = "cloud-init status --wait >/dev/null 2>&1; cloud-init status | head -n 1; systemctl --failed --no-legend --plain"
	if out := p.ok("exec", id, "--", "sh", "-c", well); strings.TrimSpace(out) != "status: done" {
		t.Errorf("the guest's system: %s", out)
	}
}

// egress tries from a real guest what it may reach and what it may not.
func (p *pveLab) egress(t *testing.T, id string) {
	t.Helper()
	p.internet.Net.HandleHTTP("web.example.com", 80, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("hello")) }))
	p.internet.Net.SetName("rebind.example.com", mustAddr("192.168.1.50"))
	curl := func(url string) result {
		return p.run("", "exec", id, "--", "curl", "-sS", "-m", "5", "-o", "/dev/null", "-w", "%{http_code}", url)
	}
	if r := curl("http://web.example.com/hello"); r.code != 0 || r.stdout != "200" {
		t.Errorf("the web: %v", r)
	}
	p.lan.Net.ForgetOutside()
	for _, url := range []string{
		"http://192.168.1.50/", "http://192.168.1.2:8006/", "http://192.168.1.1/", "http://10.77.0.1:22/", "http://rebind.example.com/",
		"http://169.254.169.254/latest/", "http://100.64.0.1/", "http://[fd00::1]/",
	} {
		if r := curl(url); r.code == 0 {
			t.Errorf("%s answered %s", url, r.stdout)
		}
	}
	if seen := p.lan.Net.Outside().Flows; len(seen) > 0 {
		t.Errorf("the LAN was reached: %v", seen)
	}
	if out := p.ok("egress", "log", "--job", id); !strings.Contains(out, "192.168.1.50") || !strings.Contains(out, "web.example.com") {
		t.Errorf("the egress log:\n%s", out)
	}
}
