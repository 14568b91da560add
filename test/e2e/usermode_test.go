package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/test/guard"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// person is an ordinary user of the machine, with a home of its own.
type person struct {
	testing.TB
	name, home, bin string
	uid, gid        uint32
	env             []string
}

// newPerson makes a user with subordinate ids. When the test ends, none of its
// processes may be left, and the user is removed.
func newPerson(t testing.TB) *person {
	t.Helper()
	sample.Long(t, "it boots virtual machines")
	if os.Geteuid() != 0 {
		t.Skip("skipped: making a user takes root")
	}
	for _, tool := range []string{"useradd", "userdel", "newuidmap", "unshare", "setpriv"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("skipped: %s is missing; scripts/deps.sh run test installs it", tool)
		}
	}
	bin, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	home, err := os.MkdirTemp("", "agentlab-person-*")
	if err != nil {
		t.Fatal(err)
	}
	p := &person{TB: t, name: fmt.Sprintf("agentlab-e2e-%d", os.Getpid()), home: home}
	t.Cleanup(p.remove)
	p.root("useradd", "--no-create-home", "--home-dir", home, "--shell", "/bin/bash", p.name)
	u, err := user.Lookup(p.name)
	if err != nil {
		t.Fatal(err)
	}
	uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
	gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	p.uid, p.gid = uint32(uid), uint32(gid)
	p.bin = filepath.Join(home, "bin")
	p.root("cp", "-r", bin, p.bin)
	p.own(home)
	p.env = []string{
		"HOME=" + home, "USER=" + p.name, "LOGNAME=" + p.name, "LANG=C.UTF-8", "PATH=" + p.bin + ":/usr/local/bin:/usr/bin:/bin",
		"GIT_CONFIG_GLOBAL=/dev/null", "TMPDIR=" + home,
	}
	for _, kv := range os.Environ() { // the way to packages
		if name, _, _ := strings.Cut(kv, "="); strings.HasSuffix(strings.ToLower(name), "_proxy") {
			p.env = append(p.env, kv)
		}
	}
	if r := p.run(p.env, "unshare", "--user", "--map-root-user", "--map-auto", "true"); r.code != 0 {
		t.Skipf("skipped: ordinary users cannot make user namespaces here: %s", r.stderr)
	}
	return p
}

// root runs a command of the test's own.
func (p *person) root(args ...string) {
	p.Helper()
	if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
		p.Fatalf("%q: %v\n%s", args, err, out)
	}
}

func (p *person) own(path string) {
	p.Helper()
	p.root("chown", "-R", p.name+":", path)
}

// run runs a command as the person.
func (p *person) run(env []string, args ...string) result {
	p.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), commandLimit)
	defer cancel()
	path := args[0]
	if own := filepath.Join(p.bin, path); fileExists(own) {
		path = own
	}
	cmd := exec.CommandContext(ctx, path, args[1:]...)
	cmd.Dir, cmd.Env = p.home, env
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: p.uid, Gid: p.gid}}
	return p.wait(cmd)
}

// runWithout runs a command as the person on a machine that lacks a program.
func (p *person) runWithout(program string, args ...string) result {
	p.Helper()
	path, err := exec.LookPath(program)
	if err != nil {
		p.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), commandLimit)
	defer cancel()
	const script = `mount --bind /dev/null "$1" && shift && exec setpriv --reuid="$1" --regid="$1" --clear-groups -- "${@:2}"`
	cmd := exec.CommandContext(ctx, "unshare", append([]string{"--mount", "bash", "-c", script, "bash", path, p.name}, args...)...)
	cmd.Dir, cmd.Env = p.home, p.env
	return p.wait(cmd)
}

func (p *person) wait(cmd *exec.Cmd) result {
	p.Helper()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) {
		p.Fatalf("%q: %v", cmd.Args, err)
	}
	return result{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

// processes are those of the person.
func (p *person) processes() (pids []int) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		p.Fatal(err)
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || !guard.Alive(pid) {
			continue
		}
		if st, err := os.Stat("/proc/" + e.Name()); err == nil && st.Sys().(*syscall.Stat_t).Uid == p.uid {
			pids = append(pids, pid)
		}
	}
	return pids
}

func (p *person) remove() {
	if p.uid != 0 {
		if p.Failed() {
			log, _ := os.ReadFile(filepath.Join(p.home, ".local", "state", "agentlab", "logs", "agentlabd.log"))
			p.Logf("daemon log:\n%s", tail(string(log), 60))
		}
		if !eventually(settleLimit, func() bool { return len(p.processes()) == 0 }) {
			for _, pid := range p.processes() {
				p.Errorf("process %d is left: %s", pid, cmdline(pid))
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
		_ = os.RemoveAll(filepath.Join("/tmp", "agentlab-"+strconv.FormatUint(uint64(p.uid), 10)))
		if out, err := exec.Command("userdel", p.name).CombinedOutput(); err != nil {
			p.Errorf("userdel: %v\n%s", err, out)
		}
	}
	_ = os.RemoveAll(p.home)
}

func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// job runs a job on a new repository, to its fetched commit, and looks at the
// socket of the daemon that was started for it.
func (p *person) job(env []string, socket string) {
	p.Helper()
	repo := sampleRepo(p)
	own := filepath.Join(p.home, "repo-"+filepath.Base(filepath.Dir(socket)))
	p.root("cp", "-r", repo, own)
	p.own(own)
	r := p.run(env, "agentlab", "--json", "job", "run", "--repo", own, "--agent", "shell", "--task", mendTask)
	var j api.Job
	if err := json.Unmarshal([]byte(r.stdout), &j); err != nil || r.code != 0 || j.Status != string(agentlab.JobCompleted) {
		p.Fatalf("%v\n%v", err, r)
	}
	if st, err := os.Stat(socket); err != nil || st.Sys().(*syscall.Stat_t).Uid != p.uid {
		p.Errorf("the daemon's socket %s: %v", socket, err)
	}
	if r := p.run(env, "agentlab", "job", "fetch", j.ID, "--repo", own); r.code != 0 {
		p.Errorf("fetch: %v", r)
	}
	if r := p.run(env, "git", "-C", own, "show", "refs/agentlab/"+j.ID+":greeting.txt"); r.stdout != "hello\n" {
		p.Errorf("the fetched file: %v", r)
	}
	if r := p.run(env, "agentlab", "init"); r.code != 0 || !strings.Contains(r.stdout, "image base") {
		p.Errorf("init: %v", r)
	}
	if r := p.run(env, "agentlab", "daemon", "stop"); r.code != 0 {
		p.Errorf("stop: %v", r)
	}
}

// An ordinary user builds the image and runs jobs without root; if the machine
// lacks a package, the error names it before anything is started.
func TestOrdinaryUser(t *testing.T) {
	t.Parallel()
	p := newPerson(t)
	const missing, remedy = "newuidmap", "apt-get install uidmap"
	t.Run("without newuidmap", func(t *testing.T) {
		p.TB = t
		r := p.runWithout(missing, "agentlab", "job", "run", "--agent", "shell", "--task", "true")
		if r.code != 1 || !strings.Contains(r.stderr, missing) || !strings.Contains(r.stderr, remedy) {
			t.Errorf("job run: %v", r)
		}
		for _, list := range [][]string{{"job", "list"}, {"sandbox", "list", "--all"}} {
			var got api.List[json.RawMessage]
			r := p.runWithout(missing, append([]string{"agentlab", "--json"}, list...)...)
			if err := json.Unmarshal([]byte(r.stdout), &got); err != nil || len(got.Items) != 0 {
				t.Errorf("%q after a refused job: %v", list, r)
			}
		}
		for _, command := range []string{"init", "status"} {
			r := p.runWithout(missing, "agentlab", command)
			if r.code != 1 || !strings.Contains(r.stdout, "image base") || !strings.Contains(r.stdout, remedy) {
				t.Errorf("%s: %v", command, r)
			}
		}
		if r := p.runWithout(missing, "agentlab", "daemon", "stop"); r.code != 0 {
			t.Errorf("stop: %v", r)
		}
	})
	t.Run("with XDG_RUNTIME_DIR", func(t *testing.T) {
		p.TB = t
		run := filepath.Join(p.home, "run")
		p.root("install", "-d", "-m", "0700", "-o", p.name, run)
		p.job(append(p.env, "XDG_RUNTIME_DIR="+run), filepath.Join(run, "agentlab", "agentlabd.sock"))
	})
	t.Run("without XDG_RUNTIME_DIR", func(t *testing.T) {
		p.TB = t
		p.job(p.env, filepath.Join("/tmp", "agentlab-"+strconv.FormatUint(uint64(p.uid), 10), "agentlabd.sock"))
	})
	p.TB = t
}
