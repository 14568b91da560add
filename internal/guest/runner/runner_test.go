package runner

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
	"github.com/agentlab-vm/agentlab/test/guard"
)

func TestJobWithoutRepo(t *testing.T) {
	s := newShellSandbox(t, `echo "in $PWD with $API_KEY as $AGENTLAB_JOB_ID"; echo err >&2; `+untilSeen)
	rep := s.finishIn("agent")
	if rep.Status != "COMPLETED" || rep.ExitCode == nil || *rep.ExitCode != 0 || rep.Message != "" {
		t.Errorf("report %+v", rep)
	}
	want := fmt.Sprintf("in %s with [redacted] as %s\nerr\n", s.cfg.ClonePath, s.JobID)
	if got := s.Log(); got != want {
		t.Errorf("log %q, want %q", got, want)
	}
	if got := s.Paths(); !slices.Equal(got, []string{"agent.log", "report.json"}) || s.File("agent.log") != want {
		t.Errorf("artifacts %q, log %q", got, s.File("agent.log"))
	}
	var r jobReport
	if err := json.Unmarshal([]byte(s.File("report.json")), &r); err != nil || r.Status != "COMPLETED" || r.JobID != s.JobID || r.LogBytes != int64(len(want)) {
		t.Errorf("report.json %+v %v", r, err)
	}
	if _, err := os.Stat(s.cfg.ClonePath); err == nil {
		t.Error("the work tree is left")
	}
	if all := s.Reports(); all[len(all)-1].Phase != "done" {
		t.Errorf("reports %+v", all)
	}
}

func TestOutcomes(t *testing.T) {
	cases := []struct {
		name, agent, script string
		status, message     string
		code                int
	}{
		{"exit code", "shell", "exit 7", "FAILED", "exited with code 7", 7},
		{"pipefail", "shell", "false | true; echo no", "FAILED", "exited with code 1", 1},
		{"unset variable", "shell", "echo $NOT_SET", "FAILED", "exited with code", 1},
		{"signal", "shell", "kill -SEGV $$", "FAILED", "signal 11", 139},
		{"no such program", "opencode", "task", "FAILED", "choose one with --image", 127},
		{"unknown agent", "hal", "task", "FAILED", "unknown agent", 126},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv("PATH", "/usr/bin:/bin")
			job := shellJob(c.script)
			job.Agent = c.agent
			s := newSandbox(t, guestapi.BootstrapResponse{Job: job}, artifact.Limits{})
			rep := s.finish()
			if rep.Status != c.status || !strings.Contains(rep.Message, c.message) || rep.ExitCode == nil || *rep.ExitCode != c.code {
				t.Errorf("report %+v code %v", rep, rep.ExitCode)
			}
			if s.Log() == "" && c.code > 125 && c.code != 139 {
				t.Error("the log says nothing")
			}
		})
	}
}

func TestKeepaliveKeepsTheCheckout(t *testing.T) {
	job := shellJob("echo work > file")
	job.Keepalive = true
	s := newSandbox(t, guestapi.BootstrapResponse{Job: job}, artifact.Limits{})
	s.finish()
	if p, err := os.ReadFile(filepath.Join(s.cfg.ClonePath, "file")); err != nil || string(p) != "work\n" {
		t.Errorf("%q %v", p, err)
	}
}

func TestSandboxWithoutJob(t *testing.T) {
	s := newSandbox(t, guestapi.BootstrapResponse{
		Env: map[string]string{"API_KEY": secret + "'s"}, ClaudeSettingsJSON: `{"model":"x"}`,
		Git: &guestapi.Git{URL: "https://example.com", Token: "tok-123456"},
	}, artifact.Limits{})
	for range 2 {
		if err := s.run(); err != nil {
			t.Fatal(err)
		}
	}
	if s.Fetches() != 1 || len(s.Reports()) != 0 {
		t.Errorf("%d fetches, reports %+v", s.Fetches(), s.Reports())
	}
	env, err := os.ReadFile(filepath.Join(s.cfg.RunDir, "env.sh"))
	if err != nil || !strings.Contains(string(env), `export API_KEY='`+secret+`'\''s'`) {
		t.Errorf("env.sh %q %v", env, err)
	}
	if p, err := os.ReadFile(filepath.Join(s.cfg.Home, ".claude/settings.json")); err != nil || string(p) != `{"model":"x"}` {
		t.Errorf("settings %q %v", p, err)
	}
	st, err := os.Stat(s.cfg.RunDir)
	if err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("mode %v %v", st.Mode(), err)
	}
	entries, _ := os.ReadDir(s.cfg.RunDir)
	for _, e := range entries {
		want := os.FileMode(0o600)
		if e.IsDir() {
			want = 0o700
		}
		if fi, _ := e.Info(); fi.Mode().Perm() != want {
			t.Errorf("%s has mode %v", e.Name(), fi.Mode())
		}
	}
	if err := Wipe(s.cfg.RunDir, s.cfg.Home); err != nil {
		t.Fatal(err)
	}
	s.wiped()
}

// A sandbox that is only prepared keeps its secrets for its user, but none of
// the runner's own rights, also if the runner is killed while it hands the
// sandbox over.
func TestPreparedSandbox(t *testing.T) {
	url := newGitServer(t, "").add(t, "repo", newRepo(t, map[string]string{projectFile: "outputs: ['*.txt']\n"}))
	s := newSandbox(t, guestapi.BootstrapResponse{
		Env: map[string]string{"API_KEY": secret}, ClaudeSettingsJSON: `{"model":"x"}`,
		Job:    &guestapi.Job{RepoURL: url, Agent: "none", Mode: "dangerous", Upload: true, Keepalive: true},
		Runner: guestapi.RunnerTarget{Token: "runner-token"}, Artifact: &guestapi.ArtifactTarget{Token: "upload-token"},
	}, artifact.Limits{})
	writeFile(t, filepath.Join(s.cfg.Home, ".bashrc"), "alias ll='ls -l'\n")
	if err := s.run(); err != nil {
		t.Fatal(err)
	}
	if rep := s.Final(); rep.Status != "COMPLETED" || rep.ExitCode != nil || rep.Result.Commits != 0 || rep.Result.BaseCommit == "" {
		t.Errorf("%+v %+v", rep, rep.Result)
	}
	if got := s.Paths(); !slices.Equal(got, []string{"report.json"}) {
		t.Errorf("artifacts %q", got)
	}
	reports := len(s.Reports())
	check := func() {
		t.Helper()
		if p, err := os.ReadFile(filepath.Join(s.cfg.ClonePath, "file.txt")); err != nil || string(p) != "three\n" {
			t.Errorf("%q %v", p, err)
		}
		if p, err := os.ReadFile(filepath.Join(s.cfg.RunDir, "env.sh")); err != nil || !strings.Contains(string(p), secret) {
			t.Errorf("env.sh %q %v", p, err)
		}
		if _, err := os.Stat(filepath.Join(s.cfg.Home, ".claude/settings.json")); err != nil {
			t.Error(err)
		}
		var resp guestapi.BootstrapResponse
		if ok, err := dir(s.cfg.RunDir).load(fileResponse, &resp); !ok || err != nil || resp.Job != nil || resp.Artifact != nil || resp.Runner.Token != "" || resp.Env["API_KEY"] != secret {
			t.Errorf("%+v %v %v", resp, ok, err)
		}
		out, err := exec.Command("env", "-i", "HOME="+s.cfg.Home, "SSH_CONNECTION=1", "bash", "-c", ". ~/.bashrc; echo $API_KEY; alias ll").Output()
		if err != nil || string(out) != secret+"\nalias ll='ls -l'\n" {
			t.Errorf("a shell over ssh: %q %v", out, err)
		}
		if out, err = exec.Command("env", "-i", "HOME="+s.cfg.Home, "bash", "-uec", ". ~/.bashrc; echo ${API_KEY-unset}").Output(); err != nil || string(out) != "unset\n" {
			t.Errorf("another shell: %q %v", out, err)
		}
		path := "/usr/bin:/bin:" + dir(s.cfg.RunDir).path(dirMessages)
		out, err = exec.Command("env", "-i", "HOME="+s.cfg.Home, "PATH=/usr/bin:/bin", "bash", "-uec", ". ~/.bashrc; . ~/.bashrc; echo $PATH").Output()
		if err != nil || string(out) != path+"\n" {
			t.Errorf("search path %q, %v, want %q", out, err, path)
		}
	}
	check()
	for range 2 { // killed right after it gave its rights away, and started again
		if err := dir(s.cfg.RunDir).save(fileFinal, guestapi.Report{Status: "COMPLETED", Phase: "done"}); err != nil {
			t.Fatal(err)
		}
		if err := s.run(); err != nil {
			t.Fatal(err)
		}
		check()
	}
	if s.Fetches() != 1 || len(s.Reports()) != reports {
		t.Errorf("%d fetches, reports %+v", s.Fetches(), s.Reports()[reports:])
	}
}

// Whatever an image or an agent made of the shell's file, the job is done.
func TestShellFileThatCannotBeChanged(t *testing.T) {
	for name, create := range map[string]func(name string) error{
		"pipe":      func(name string) error { return syscall.Mkfifo(name, 0o600) },
		"directory": func(name string) error { return os.Mkdir(name, 0o700) },
		"endless":   func(name string) error { return os.Symlink("/dev/zero", name) },
		"dangling":  func(name string) error { return os.Symlink("/nowhere/at/all", name) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newShellSandbox(t, "echo done")
			if err := create(filepath.Join(s.cfg.Home, ".bashrc")); err != nil {
				t.Fatal(err)
			}
			if err := s.run(); err != nil {
				t.Fatal(err)
			}
			if rep := s.Final(); rep.Status != "COMPLETED" {
				t.Errorf("%+v", rep)
			}
		})
	}
}

// Secrets must not reach a disk.
func TestRefusesADisk(t *testing.T) {
	s := newShellSandbox(t, "true")
	s.cfg.RunDir = filepath.Join(t.TempDir(), "run")
	if d := dir(s.cfg.RunDir); d.open() == nil {
		t.Skip("the directory for temporary files is on a tmpfs here, so there is no disk to refuse")
	}
	if err := s.run(); err == nil || !strings.Contains(err.Error(), "tmpfs") {
		t.Errorf("got %v", err)
	}
	if s.Fetches() != 0 {
		t.Error("the token was spent")
	}
}

func TestBootstrapDenied(t *testing.T) {
	s := newShellSandbox(t, "true")
	writeFile(t, s.cfg.Bootstrap, fmt.Sprintf(`{"token":"wrong","controller":%q,"vmid":%d}`, s.URL(), s.VMID))
	if err := s.run(); err != nil {
		t.Errorf("a denied token is final, got %v", err)
	}
	if len(s.Reports()) != 0 {
		t.Error("a report without a token")
	}
}

// The answer was lost with the token that it was for; the controller sends
// another one.
func TestBootstrapWithAnotherToken(t *testing.T) {
	s := newShellSandbox(t, "true")
	s.cfg.Timing.Denied = guard.Patience
	good, err := os.ReadFile(s.cfg.Bootstrap)
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, s.cfg.Bootstrap, fmt.Sprintf(`{"token":"spent","controller":%q,"vmid":%d}`, s.URL(), s.VMID))
	done := make(chan error, 1)
	go func() { done <- s.run() }()
	s.Wait("refusal", func() bool { return s.Denials() > 0 })
	writeFile(t, s.cfg.Bootstrap+".new", string(good))
	if err := os.Rename(s.cfg.Bootstrap+".new", s.cfg.Bootstrap); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if rep := s.Final(); rep.Status != "COMPLETED" || s.Denials() != 1 {
		t.Errorf("%+v, %d denials", rep, s.Denials())
	}
}

func TestBootstrapIsRetried(t *testing.T) {
	s := newShellSandbox(t, "true")
	s.Stop()
	s.Fail(agentlab.Errorf(agentlab.CodeUnavailable, "not yet"))
	done := make(chan error, 1)
	go func() { done <- s.run() }()
	time.AfterFunc(100*time.Millisecond, s.Start)
	time.AfterFunc(300*time.Millisecond, func() { s.Fail(nil) })
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if rep := s.Final(); rep.Status != "COMPLETED" || s.Fetches() != 1 {
		t.Errorf("%+v, %d fetches", rep, s.Fetches())
	}
}

func TestTimeout(t *testing.T) {
	job := shellJob(`trap 'echo got TERM; sleep 0.1; exit 0' TERM; echo started; while :; do sleep 0.05; done`)
	job.Seconds = 3600
	s := newSandbox(t, guestapi.BootstrapResponse{Job: job}, artifact.Limits{})
	p := s.start()
	s.Wait("start", func() bool { return strings.Contains(s.Log(), "started") })
	s.Expire()
	p.wait()
	s.wiped()
	rep := s.Final()
	if rep.Status != "TIMEOUT" || !strings.Contains(s.Log(), "got TERM") {
		t.Errorf("%+v log %q", rep, s.Log())
	}
	if !slices.Contains(s.Paths(), "agent.log") {
		t.Errorf("artifacts %q", s.Paths())
	}
}

// An agent that does not listen is killed, with all that it started.
func TestCancelKillsTheWholeTree(t *testing.T) {
	s := newShellSandbox(t, `trap '' TERM
setsid bash -c 'trap "" TERM; echo $$ > escaped; while :; do sleep 0.05; done' &
while [ ! -s escaped ]; do sleep 0.02; done
echo "escaped $(cat escaped)"; while :; do sleep 0.05; done`)
	s.cfg.Timing.Grace = time.Second
	done := make(chan error, 1)
	go func() { done <- s.run() }()
	s.Wait("escaped process", func() bool { return strings.Contains(s.Log(), "escaped ") })
	var pid int
	if _, err := fmt.Sscanf(s.Log(), "escaped %d", &pid); err != nil {
		t.Fatal(err)
	}
	s.Direct("CANCELLED")
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	rep := s.Final()
	if rep.Status != "CANCELLED" || rep.ExitCode == nil || *rep.ExitCode != 137 {
		t.Errorf("%+v %v", rep, rep.ExitCode)
	}
	if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); err == nil {
		t.Errorf("process %d is left", pid)
	}
}

// The report of a job that the controller ends has the controller's reason.
func TestStopReportsTheReason(t *testing.T) {
	const reason = "its model host api.example.com:443 is denied by the network policy (rule mode.allowlist)"
	s := newShellSandbox(t, "echo started; sleep 600")
	done := make(chan error, 1)
	go func() { done <- s.run() }()
	s.Wait("start", func() bool { return strings.Contains(s.Log(), "started") })
	s.DirectFor("CANCELLED", reason)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if rep := s.Final(); rep.Status != "CANCELLED" || rep.Message != reason {
		t.Errorf("%+v", rep)
	}
}

// What the agent leaves in the background does not hold the job up.
func TestBackgroundProcessesEnd(t *testing.T) {
	s := newShellSandbox(t, `sleep 600 & echo "pid $!"`)
	rep := s.finish()
	if rep.Status != "COMPLETED" {
		t.Errorf("%+v", rep)
	}
	var pid int
	if _, err := fmt.Sscanf(s.Log(), "pid %d", &pid); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); err == nil {
		t.Errorf("process %d is left", pid)
	}
}

// The controller restarts in the middle of the log and of the work.
func TestControllerRestart(t *testing.T) {
	s := newShellSandbox(t, `for i in $(seq 1 60); do echo "line $i"; sleep 0.02; done`)
	done := make(chan error, 1)
	go func() { done <- s.run() }()
	for _, at := range []string{"line 5\n", "line 25\n"} {
		s.Wait(at, func() bool { return strings.Contains(s.Log(), at) })
		s.Stop()
		s.Start()
	}
	s.Wait("line 40", func() bool { return strings.Contains(s.Log(), "line 40\n") })
	s.Stop()
	time.AfterFunc(2*time.Second, s.Start)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	var want strings.Builder
	for i := range 60 {
		fmt.Fprintf(&want, "line %d\n", i+1)
	}
	if got := s.Log(); got != want.String() {
		t.Errorf("log %q", got)
	}
	if rep := s.Final(); rep.Status != "COMPLETED" {
		t.Errorf("%+v", rep)
	}
}

// The controller has given the job up: its tokens are void.
func TestControllerGivesUp(t *testing.T) {
	s := newShellSandbox(t, `echo started; sleep 600`)
	done := make(chan error, 1)
	go func() { done <- s.run() }()
	s.Wait("start", func() bool { return strings.Contains(s.Log(), "started") })
	s.Revoke()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	s.wiped()
}

func TestLogQuotas(t *testing.T) {
	s := newSandbox(t, guestapi.BootstrapResponse{Job: shellJob(`for i in $(seq 1 2000); do echo "line $i of many lines"; done; echo done > out`)}, artifact.Limits{LogBytes: 5000})
	if rep := s.finish(); rep.Status != "COMPLETED" {
		t.Errorf("%+v", rep)
	}
	if got := s.Log(); len(got) > 5200 || !strings.Contains(got, "quota") {
		t.Errorf("%d bytes of log", len(got))
	}
	if got := s.File("agent.log"); !strings.Contains(got, "line 2000 of") {
		t.Errorf("agent.log has %d bytes", len(got))
	}
}

// The result does not fit: the job must not pass for completed.
func TestUploadRefused(t *testing.T) {
	repo := newRepo(t, nil)
	job := shellJob(`head -c 20000 /dev/urandom > big; git add big; git commit -qm big`)
	job.RepoURL = newGitServer(t, "").add(t, "repo", repo)
	s := newSandbox(t, guestapi.BootstrapResponse{Job: job}, artifact.Limits{FileBytes: 10000})
	rep := s.finish()
	if rep.Status != "FAILED" || !strings.Contains(rep.Message, artBundle) {
		t.Errorf("%+v", rep)
	}
	if !slices.Contains(s.Paths(), "report.json") {
		t.Errorf("artifacts %q", s.Paths())
	}
	s.isLeft("big")
}

// isLeft checks that a file of the checkout is left on the disk, which the controller
// keeps for work that it does not have.
func (s *sandbox) isLeft(name string) {
	s.t.Helper()
	if _, err := os.Stat(filepath.Join(s.cfg.ClonePath, name)); err != nil {
		s.t.Errorf("the work is deleted: %v", err)
	}
}

// The controller ended the job, or no longer accepts the runner, before it had the work.
func TestWorkIsLeftOnTheDisk(t *testing.T) {
	for name, end := range map[string]func(s *sandbox){"ended": (*sandbox).End, "revoked": (*sandbox).Revoke} {
		t.Run(name, func(t *testing.T) {
			repo := newRepo(t, nil)
			job := shellJob(`echo 1 > a; git add a; git commit -qm 1; echo started; while [ ! -e ../go ]; do sleep 0.02; done`)
			job.RepoURL = newGitServer(t, "").add(t, "repo", repo)
			s := newSandbox(t, guestapi.BootstrapResponse{Job: job}, artifact.Limits{})
			done := make(chan error, 1)
			go func() { done <- s.run() }()
			s.Wait("start", func() bool { return strings.Contains(s.Log(), "started") })
			end(s)
			writeFile(t, filepath.Join(filepath.Dir(s.cfg.ClonePath), "go"), "")
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			s.wiped()
			s.isLeft("a")
		})
	}
}

// Values split by the agent's own writes are still redacted.
func TestRedactionAcrossWrites(t *testing.T) {
	s := newShellSandbox(t, `printf hunter2-; sleep 0.1; printf 'very-secret and '; printf %s "$API_KEY" | base64; set -x; : "$API_KEY"`)
	s.finish()
	if got := s.Log(); strings.Contains(got, "very-") || strings.Count(got, "[redacted]") < 3 {
		t.Errorf("log %q", got)
	}
}
