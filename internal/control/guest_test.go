//go:build linux

package control_test

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guest/guestd"
	"github.com/agentlab-vm/agentlab/internal/sshkey"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/test/guard"
)

func parseExit(b []byte) *stream.ExitStatus {
	var st stream.ExitStatus
	if json.Unmarshal(b, &st) != nil {
		return nil
	}
	return &st
}

func identity() guestapi.Identity {
	return guestapi.Identity{
		UID: agentlab.NewUID(), Hostname: "box-1", Time: time.Now().UTC(), Entropy: bytes.Repeat([]byte{7}, 64),
		Network: &guestapi.Network{Address: "10.77.0.2/24", Gateway: "10.77.0.1", DNS: []string{"10.77.0.1"}, MTU: 9000},
	}
}

func TestHealth(t *testing.T) {
	g := newGuest(t, nil)
	g.put(t, "proc/sys/kernel/random/boot_id", "abc\n")
	h, err := g.Health(guard.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	if h.Uptime != 12340*time.Millisecond || h.BootID != "abc" || h.Identity != "" || h.System != "unknown" || h.Version == "" {
		t.Errorf("%+v", h)
	}
}

func TestExec(t *testing.T) {
	g := newGuest(t, nil)
	g.put(t, "notrunnable", "#!/bin/sh\n")
	for _, tc := range []struct {
		name     string
		req      guestapi.ExecRequest
		out, err string
		st       stream.ExitStatus
	}{
		{"separate streams", sh("echo out; echo err >&2; exit 3"), "out\n", "err\n", stream.ExitStatus{Code: 3}},
		{"killed", sh("kill -TERM $$"), "", "", stream.ExitStatus{Code: 143, Signal: "TERM"}},
		{
			"not found", guestapi.ExecRequest{Command: []string{"no-such-command"}},
			"", "",
			stream.ExitStatus{Code: 127, Error: "no-such-command: command not found"},
		},
		{
			"no file", guestapi.ExecRequest{Command: []string{"/no/such"}},
			"", "",
			stream.ExitStatus{Code: 127, Error: "/no/such: no such file or directory"},
		},
		{
			"not executable", guestapi.ExecRequest{Command: []string{filepath.Join(g.root, "notrunnable")}},
			"", "",
			stream.ExitStatus{Code: 126, Error: filepath.Join(g.root, "notrunnable") + ": permission denied"},
		},
		{
			"not in the directory either", guestapi.ExecRequest{Command: []string{"notrunnable"}, Dir: g.root},
			"", "",
			stream.ExitStatus{Code: 127, Error: "notrunnable: command not found"},
		},
		{
			"no directory", guestapi.ExecRequest{Command: []string{"true"}, Dir: "/no/dir"},
			"", "",
			stream.ExitStatus{Code: 126, Error: "directory /no/dir: no such file or directory"},
		},
		{"home", sh("pwd"), filepath.Join(g.root, "home") + "\n", "", stream.ExitStatus{}},
		{"directory", guestapi.ExecRequest{Command: []string{"pwd"}, Dir: "/"}, "/\n", "", stream.ExitStatus{}},
		{
			"environment", guestapi.ExecRequest{Command: []string{"sh", "-c", "echo $A $FROM_ETC $USER ${TERM-none}"}, Env: map[string]string{"A": "a b"}},
			"a b yes " + g.me.Username + " none\n", "",
			stream.ExitStatus{},
		},
		{
			"login shell", guestapi.ExecRequest{Env: map[string]string{"ENV": ""}},
			"", "",
			stream.ExitStatus{Code: 5},
		},
		{"left behind", sh("sleep 100 & echo done"), "done\n", "", stream.ExitStatus{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := g.exec(t, tc.req)
			if tc.name == "login shell" {
				p.send(t, stream.Stdin, "exit 5\n")
			}
			out, errs, st := p.result(t)
			if out != tc.out || errs != tc.err || st != tc.st {
				t.Errorf("got %q, %q, %+v", out, errs, st)
			}
		})
	}
}

func sh(script string) guestapi.ExecRequest {
	return guestapi.ExecRequest{Command: []string{"sh", "-c", script}}
}

// Commands of the agent's user find the programs that the runner installs.
func TestProgramsOfTheRunnerAreFound(t *testing.T) {
	g := newGuest(t, nil)
	g.put(t, "run/agentlab/secrets/messages/agentlab-msg", "#!/bin/sh\necho found-$1\n")
	if err := os.Chmod(filepath.Join(g.root, "run/agentlab/secrets/messages/agentlab-msg"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, tty := range []bool{false, true} {
		req := guestapi.ExecRequest{Command: []string{"agentlab-msg", "it"}, TTY: tty}
		if out, errs, _ := g.exec(t, req).result(t); strings.TrimSpace(out) != "found-it" {
			t.Errorf("terminal %v: %q, %q", tty, out, errs)
		}
	}
}

// Commands and terminals of the agent's user have the environment that the
// runner has staged, as long as it is there, and no other user's.
func TestStagedEnvironment(t *testing.T) {
	const staged = "run/agentlab/secrets/bootstrap.json"
	g := newGuest(t, nil)
	show := func(env map[string]string) string {
		req := sh(`echo "${API_KEY-none} ${TWO_LINES-}"`)
		req.Env = env
		out, _, _ := g.exec(t, req).result(t)
		return out
	}
	if got := show(nil); got != "none \n" {
		t.Errorf("before: %q", got)
	}
	g.put(t, staged, `{"env":{"API_KEY":"sk-1","TWO_LINES":"a\nb","BAD=NAME":"x","":"x","NUL":"a\u0000b"},"job":{"task":"x"}}`)
	if got := show(nil); got != "sk-1 a\nb\n" {
		t.Errorf("staged: %q", got)
	}
	if got := show(map[string]string{"API_KEY": "mine"}); got != "mine a\nb\n" {
		t.Errorf("the request's own: %q", got)
	}
	conn, err := g.Attach(guard.Context(t), guestapi.AttachRequest{Rows: 30, Cols: 90})
	if err != nil {
		t.Fatal(err)
	}
	p := follow(t, conn)
	p.send(t, stream.Stdin, "echo terminal-$API_KEY; exit\n")
	p.shows(t, "terminal-sk-1")
	for name, content := range map[string]string{"damaged": `{"env":{"API_KEY":`, "not an object": `[1]`, "another shape": `{"env":["API_KEY"]}`} {
		g.put(t, staged, content)
		if got := show(nil); got != "none \n" {
			t.Errorf("%s: %q", name, got)
		}
	}
	// A link that the agent puts there shows nothing of another file.
	g.put(t, "root-only", `{"env":{"API_KEY":"of root"}}`)
	if err := os.Remove(filepath.Join(g.root, staged)); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(g.root, "root-only"), filepath.Join(g.root, staged)); err != nil {
		t.Fatal(err)
	}
	if got := show(nil); got != "none \n" {
		t.Errorf("through a link: %q", got)
	}
	// Another user of the guest gets nothing.
	g.put(t, "etc/passwd", "other:x:"+g.me.Uid+":"+g.me.Gid+"::/:/bin/sh\n"+g.file(t, "etc/passwd"))
	if err := os.Remove(filepath.Join(g.root, staged)); err != nil {
		t.Fatal(err)
	}
	g.put(t, staged, `{"env":{"API_KEY":"sk-1"}}`)
	req := sh("echo ${API_KEY-none}")
	req.User = "other"
	if out, _, _ := g.exec(t, req).result(t); out != "none\n" {
		t.Errorf("another user: %q", out)
	}
}

func TestExecRefused(t *testing.T) {
	g := newGuest(t, nil)
	for name, tc := range map[string]struct {
		req  guestapi.ExecRequest
		code agentlab.Code
	}{
		"user":     {guestapi.ExecRequest{User: "nobody-here"}, agentlab.CodeNotFound},
		"variable": {guestapi.ExecRequest{Env: map[string]string{"A=B": "c"}}, agentlab.CodeInvalid},
		"nul":      {guestapi.ExecRequest{Command: []string{"a\x00b"}}, agentlab.CodeInvalid},
	} {
		if _, err := g.Exec(guard.Context(t), tc.req); agentlab.CodeOf(err) != tc.code {
			t.Errorf("%s: %v, want %s", name, err, tc.code)
		}
	}
}

func TestExecInputAndVolume(t *testing.T) {
	g := newGuest(t, nil)
	data := make([]byte, 3<<20)
	_, _ = rand.Read(data)
	p := g.exec(t, guestapi.ExecRequest{Command: []string{"cat"}})
	if err := p.w.Frame(stream.Stdin, data); err != nil {
		t.Fatal(err)
	}
	p.send(t, stream.StdinEOF, "")
	out, _, st := p.result(t)
	if st.Code != 0 || sha256.Sum256([]byte(out)) != sha256.Sum256(data) {
		t.Errorf("exit %+v, %d bytes back", st, len(out))
	}
}

func TestExecSignal(t *testing.T) {
	g := newGuest(t, nil)
	p := g.sh(t, `trap 'echo caught; exit 9' USR1; echo ready; while :; do sleep 0.01; done`)
	p.shows(t, "ready")
	p.send(t, stream.Signal, "NOSUCH")
	p.send(t, stream.Signal, "USR1")
	out, _, st := p.result(t)
	if !strings.Contains(out, "caught") || st.Code != 9 {
		t.Errorf("%q %+v", out, st)
	}
}

// TestExecCut checks that the whole session dies with its client, what ignores
// the polite signals included.
func TestExecCut(t *testing.T) {
	g := newGuest(t, func(c *guestd.Config) { c.Grace = 50 * time.Millisecond })
	for _, tty := range []bool{false, true} {
		req := sh(`trap '' HUP TERM; sleep 1000 & echo pids $$ $!; wait; wait`)
		req.TTY = tty
		p := g.exec(t, req)
		p.shows(t, "\n")
		f := strings.Fields(p.output())
		_ = p.conn.Close()
		for _, pid := range f[1:] {
			n, err := strconv.Atoi(pid)
			if err != nil {
				t.Fatal(err)
			}
			guard.Until(t, "death of "+pid, func() bool { return dead(n) })
		}
	}
}

// dead reports whether a process is gone or only waits to be reaped.
func dead(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(b), ") Z ")
}

// TestExecCutByLink checks the same when the whole link goes.
func TestExecCutByLink(t *testing.T) {
	g := newGuest(t, nil)
	p := g.sh(t, `echo pid $$; exec sleep 1000`)
	p.shows(t, "\n")
	pid, err := strconv.Atoi(strings.Fields(p.output())[1])
	if err != nil {
		t.Fatal(err)
	}
	_ = g.link.Close()
	<-p.ended
	guard.Until(t, "death of the command", func() bool { return dead(pid) })
}

func TestExecTTY(t *testing.T) {
	g := newGuest(t, nil)
	req := sh(`tty >/dev/null && echo is a tty; stty size; read x; stty size; read x || echo eof; exit 4`)
	req.TTY, req.Rows, req.Cols = true, 33, 111
	p := g.exec(t, req)
	p.shows(t, "33 111")
	if err := p.w.JSON(stream.Resize, stream.WindowSize{Rows: 44, Cols: 99}); err != nil {
		t.Fatal(err)
	}
	p.send(t, stream.Stdin, "x\n")
	p.shows(t, "44 99")
	p.send(t, stream.StdinEOF, "")
	out, _, st := p.result(t)
	if !strings.Contains(out, "is a tty") || !strings.Contains(out, "eof") || st.Code != 4 {
		t.Errorf("%q %+v", out, st)
	}
}

func TestAttach(t *testing.T) {
	g := newGuest(t, nil)
	join := func(name string) *proc {
		conn, err := g.Attach(guard.Context(t), guestapi.AttachRequest{Session: name, Rows: 30, Cols: 90})
		if err != nil {
			t.Fatal(err)
		}
		return follow(t, conn)
	}
	a := join("")
	a.send(t, stream.Stdin, "stty -echo; mark=1; echo first-$((20+1)); stty size\n")
	a.shows(t, "first-21")
	a.shows(t, "30 90")
	b := join("main")
	b.shows(t, "first-21") // replayed
	b.send(t, stream.Stdin, "echo both-$((20+2))\n")
	a.shows(t, "both-22")
	b.shows(t, "both-22")
	_ = a.conn.Close()
	_ = b.conn.Close()
	c := join("main") // the shell is still the same
	c.send(t, stream.Stdin, "echo mark-$mark\n")
	c.shows(t, "mark-1")
	other := join("other")
	other.send(t, stream.Stdin, "echo other-$mark-\n")
	other.shows(t, "other--")
	c.send(t, stream.Stdin, "exit 6\n")
	if _, _, st := c.result(t); st.Code != 6 {
		t.Errorf("exit %+v", st)
	}
	if _, err := g.Attach(guard.Context(t), guestapi.AttachRequest{Session: "../x"}); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("a bad name: %v", err)
	}
}

// TestAttachFlood checks that a client that does not read neither stops the
// terminal permanently nor gets more than the stored output.
func TestAttachFlood(t *testing.T) {
	g := newGuest(t, nil)
	stuck, err := g.Attach(guard.Context(t), guestapi.AttachRequest{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stuck.Close() }()
	w := stream.NewWriter(stuck)
	if err := w.Frame(stream.Stdin, []byte("head -c 2000000 /dev/zero | tr '\\0' x; echo; echo the-e''nd\n")); err != nil {
		t.Fatal(err)
	}
	conn, err := g.Attach(guard.Context(t), guestapi.AttachRequest{})
	if err != nil {
		t.Fatal(err)
	}
	p := follow(t, conn)
	p.shows(t, "the-end")
}

func TestIdentity(t *testing.T) {
	g := newGuest(t, nil)
	id := identity()
	id.Bootstrap = &guestapi.Bootstrap{Token: "secret-token", Controller: "http://10.77.0.1:8844", VMID: 7}
	h, err := g.SetIdentity(guard.Context(t), id)
	if err != nil {
		t.Fatal(err)
	}
	if h.Identity != id.UID {
		t.Errorf("%+v", h)
	}
	g.kernel.mu.Lock()
	if len(g.kernel.entropy) != 1 || !g.kernel.now.Equal(id.Time) || g.kernel.hostname != "box-1" || len(g.kernel.networks) != 1 {
		t.Errorf("%+v", g.kernel)
	}
	g.kernel.mu.Unlock()
	if got := g.file(t, "etc/hosts"); got != "127.0.0.1 localhost\n::1 ip6-localhost\n127.0.1.1 box-1\n" {
		t.Errorf("hosts: %q", got)
	}
	if got := g.file(t, "etc/resolv.conf"); got != "nameserver 10.77.0.1\n" {
		t.Errorf("resolv.conf: %q", got)
	}
	var doc guestapi.Bootstrap
	if err := json.Unmarshal([]byte(g.file(t, "run/agentlab/bootstrap.json")), &doc); err != nil || doc != *id.Bootstrap {
		t.Errorf("%+v, %v", doc, err)
	}
	if fi, err := os.Stat(filepath.Join(g.root, "run/agentlab/bootstrap.json")); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", fi, err)
	}
	if to, err := os.Readlink(filepath.Join(g.root, "etc/agentlab/bootstrap.json")); err != nil || to != "/run/agentlab/bootstrap.json" {
		t.Errorf("%q %v", to, err)
	}
	machine, key := g.file(t, "etc/machine-id"), g.file(t, "etc/ssh/ssh_host_ed25519_key")
	if len(machine) != 33 {
		t.Errorf("machine-id %q", machine)
	}
	checkHostKey(t, key, g.file(t, "etc/ssh/ssh_host_ed25519_key.pub"))

	if _, err := g.SetIdentity(guard.Context(t), id); err != nil { // again: nothing changes
		t.Fatal(err)
	}
	if g.file(t, "etc/machine-id") != machine || g.file(t, "etc/ssh/ssh_host_ed25519_key") != key {
		t.Error("a repeated identity made new keys")
	}
	g.put(t, "etc/ssh/ssh_host_ed25519_key.pub", "") // after a power cut
	if _, err := g.SetIdentity(guard.Context(t), id); err != nil {
		t.Fatal(err)
	}
	key = g.file(t, "etc/ssh/ssh_host_ed25519_key")
	checkHostKey(t, key, g.file(t, "etc/ssh/ssh_host_ed25519_key.pub"))
	id.UID = agentlab.NewUID() // a clone
	var given guestapi.HostKey
	given.Private, given.Public = sshkey.New()
	id.HostKey = &given
	g.put(t, "etc/ssh/ssh_host_rsa_key", "of the template")
	if _, err := g.SetIdentity(guard.Context(t), id); err != nil {
		t.Fatal(err)
	}
	if g.file(t, "etc/machine-id") == machine || g.file(t, "etc/ssh/ssh_host_ed25519_key") == key {
		t.Error("a clone kept its template's machine-id or host key")
	}
	if g.file(t, "etc/ssh/ssh_host_ed25519_key") != given.Private || g.file(t, "etc/ssh/ssh_host_ed25519_key.pub") != given.Public {
		t.Error("a clone has another host key than the one that it got")
	}
	if _, err := os.Stat(filepath.Join(g.root, "etc/ssh/ssh_host_rsa_key")); err == nil {
		t.Error("a clone kept its template's RSA key")
	}
}

func TestMachineIDBakedIn(t *testing.T) {
	const baked = "0123456789abcdef0123456789abcdef\n"
	g := newGuest(t, nil)
	g.put(t, "etc/machine-id", baked)
	if _, err := g.SetIdentity(guard.Context(t), identity()); err != nil {
		t.Fatal(err)
	}
	if g.file(t, "etc/machine-id") == baked {
		t.Error("a machine-id of the image was kept")
	}
	g = newGuest(t, nil)
	g.put(t, "etc/machine-id", baked)
	g.put(t, "run/agentlab/machine-id.new", baked)
	if _, err := g.SetIdentity(guard.Context(t), identity()); err != nil {
		t.Fatal(err)
	}
	if g.file(t, "etc/machine-id") != baked {
		t.Error("the machine-id of this boot was replaced under the running system")
	}
}

func checkHostKey(t *testing.T, private, public string) {
	t.Helper()
	k, err := ssh.ParsePrivateKey([]byte(private))
	if err != nil {
		t.Fatal(err)
	}
	if got := string(ssh.MarshalAuthorizedKey(k.PublicKey())); got != public {
		t.Errorf("the public key %q is not that of the private key, %q", public, got)
	}
}

func TestIdentityRefused(t *testing.T) {
	g := newGuest(t, nil)
	for name, change := range map[string]func(*guestapi.Identity){
		"uid":      func(id *guestapi.Identity) { id.UID = "a/b" },
		"hostname": func(id *guestapi.Identity) { id.Hostname = "a\nb" },
		"entropy":  func(id *guestapi.Identity) { id.Entropy = make([]byte, 31) },
		"time":     func(id *guestapi.Identity) { id.Time = time.Time{} },
		"address":  func(id *guestapi.Identity) { id.Network.Address = "10.77.0.2" },
		"gateway":  func(id *guestapi.Identity) { id.Network.Gateway = "x" },
		"dns":      func(id *guestapi.Identity) { id.Network.DNS = []string{"10.0.0.1\nsearch x"} },
		"key":      func(id *guestapi.Identity) { id.HostKey = &guestapi.HostKey{Private: "x", Public: "x"} },
		"mtu":      func(id *guestapi.Identity) { id.Network.MTU = 10 },
	} {
		id := identity()
		change(&id)
		if _, err := g.SetIdentity(guard.Context(t), id); agentlab.CodeOf(err) != agentlab.CodeInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	if len(g.kernel.entropy) != 0 {
		t.Error("a refused identity changed something")
	}
}

// TestRunner follows the runner through a crash, the death of guestd, and its
// end.
func TestRunner(t *testing.T) {
	dir := t.TempDir()
	script := fmt.Sprintf(`cd %s; echo x >>starts; n=$(wc -l <starts)
		case $n in
		1) exit 1 ;;
		2) kill -KILL $$ ;;
		3) while ! [ -e go ]; do sleep 0.01; done ;;
		esac`, dir)
	g := newGuest(t, func(c *guestd.Config) {
		c.Runner, c.StagedWait = []string{"sh", "-c", script}, time.Hour
	})
	starts := func() string { b, _ := os.ReadFile(filepath.Join(dir, "starts")); return string(b) }
	id := identity()
	if _, err := g.SetIdentity(guard.Context(t), id); err != nil {
		t.Fatal(err)
	}
	if starts() != "" {
		t.Fatal("a runner without a bootstrap document")
	}
	id.Bootstrap = &guestapi.Bootstrap{Token: "t", Controller: "c", VMID: 1}
	if _, err := g.SetIdentity(guard.Context(t), id); err != nil {
		t.Fatal(err)
	}
	guard.Until(t, "third start", func() bool { return starts() == "x\nx\nx\n" })
	if _, err := g.SetIdentity(guard.Context(t), id); err != nil { // while it runs
		t.Fatal(err)
	}
	g.put(t, "run/agentlab/secrets/bootstrap.json", "{}")
	g.stop() // guestd dies, its runner does not
	g.start(t)
	// Commands do not wait for what was staged before.
	conn, err := g.Exec(guard.Context(t), sh("true"))
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	if err := os.WriteFile(filepath.Join(dir, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	// Its end was not seen, so it is started once more to find that out.
	guard.Until(t, "fourth start", func() bool { return starts() == "x\nx\nx\nx\n" })
	guard.Until(t, "end", func() bool {
		_, err := os.Stat(filepath.Join(g.root, "run/agentlab/runner.done"))
		return err == nil
	})
	if _, err := g.SetIdentity(guard.Context(t), id); err != nil {
		t.Fatal(err)
	}
	g.stop()
	g.start(t)
	if _, err := g.Health(guard.Context(t)); err != nil {
		t.Fatal(err)
	}
	if got := starts(); got != "x\nx\nx\nx\n" {
		t.Errorf("started again after its end: %q", got)
	}
}
