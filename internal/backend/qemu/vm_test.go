package qemu

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/control"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/sockpath"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
	"github.com/agentlab-vm/agentlab/test/fakenet"
	"github.com/agentlab-vm/agentlab/test/sample"
	"github.com/agentlab-vm/agentlab/test/smalldisk"
)

// box is one sandbox of a test.
type box struct {
	testing.TB
	f   fixed
	d   *Driver
	ref backend.Ref
	ctx context.Context
}

func newBox(t testing.TB, f fixed, change func(*backend.Spec)) *box {
	t.Helper()
	d, err := f.open()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*bootTimeout)
	t.Cleanup(cancel)
	sp := f.spec(1)
	if change != nil {
		change(&sp)
	}
	b := &box{TB: t, f: f, d: d, ref: sp.Ref(), ctx: ctx}
	b.ok(d.Create(ctx, sp))
	return b
}

func (b *box) ok(err error) {
	b.Helper()
	if err != nil {
		b.Fatalf("%v (code %s)", err, agentlab.CodeOf(err))
	}
}

func (b *box) client() *control.Client {
	return control.New(func(ctx context.Context) (net.Conn, error) { return b.d.DialControl(ctx, b.ref) })
}

// boot starts the sandbox and waits until its guest answers.
func (b *box) boot() {
	b.Helper()
	b.ok(b.d.Start(b.ctx, b.ref))
	eventually(b, bootTimeout, "the guest answers", func() error {
		_, err := b.client().Health(b.ctx)
		return err
	})
}

// identify gives the guest its identity.
func (b *box) identify() guestapi.Health {
	b.Helper()
	in, err := b.d.Inspect(b.ctx, b.ref)
	b.ok(err)
	id := guestapi.Identity{
		UID: b.ref.UID, Hostname: in.Name, Time: time.Now(), Entropy: make([]byte, 64), Network: b.d.Info().GuestNetwork,
		RootBytes: int64(in.Spec.Resources.RootSizeGB) << 30,
	}
	_, _ = rand.Read(id.Entropy)
	h, err := b.client().SetIdentity(b.ctx, id)
	b.ok(err)
	return h
}

// sh starts a command in the guest as root; its output and its end are read
// from the connection.
func (b *box) sh(script string) net.Conn {
	b.Helper()
	conn, err := b.client().Exec(b.ctx, guestapi.ExecRequest{Command: []string{"sh", "-c", script}, User: "root"})
	b.ok(err)
	b.Cleanup(func() { _ = conn.Close() })
	b.ok(stream.NewWriter(conn).Frame(stream.StdinEOF, nil))
	return conn
}

// output runs a command in the guest to its end.
func (b *box) output(script string) string {
	b.Helper()
	frames := stream.NewReader(b.sh(script))
	var out strings.Builder
	for {
		t, p, err := frames.Next()
		b.ok(err)
		switch t {
		case stream.Stdout, stream.Stderr:
			out.Write(p)
		case stream.Exit:
			return strings.TrimSpace(out.String())
		}
	}
}

func (b *box) awaitPower(want backend.PowerState) backend.Instance {
	b.Helper()
	var in backend.Instance
	eventually(b, bootTimeout, "power "+string(want), func() (err error) {
		if in, err = b.d.Inspect(b.ctx, b.ref); err == nil && in.Power != want {
			err = fmt.Errorf("power is %s (%s)", in.Power, in.Reason)
		}
		return err
	})
	return in
}

func (b *box) noted(name string) int {
	b.Helper()
	pid, err := noted(b.d.dir(b.ref), name)
	b.ok(err)
	return pid
}

func (b *box) signal(name string, s syscall.Signal) {
	b.Helper()
	b.ok(syscall.Kill(b.noted(name), s))
}

// TestCrashes ends a running VM in many ways. Each must be reported with its
// reason, leave no process, and allow a new start.
func TestCrashes(t *testing.T) {
	b := newBox(t, vmFixture(t), nil)
	type crash struct {
		name, reason string
		end          func()
	}
	for _, test := range sample.Of(t, 2, []crash{ // the next one boots after it
		{"supervisor killed", "its supervisor process was killed", func() { b.signal(shimPID, syscall.SIGKILL) }},
		{"QEMU killed", "QEMU was killed by SIGKILL", func() { b.signal(qemuPID, syscall.SIGKILL) }},
		{"supervisor terminated", "the supervisor process was terminated", func() { b.signal(shimPID, syscall.SIGTERM) }},
		{"kernel panic", "guest kernel panic: sysrq triggered crash", func() { b.sh("echo c > /proc/sysrq-trigger") }},
		{"power-off", "", func() { b.sh("systemctl poweroff --force --force") }},
		{"reboot", "rebooted itself", func() { b.sh("systemctl reboot --force --force") }},
	}) {
		ok := t.Run(test.name, func(t *testing.T) {
			b.TB = t
			b.boot()
			test.end()
			power := backend.PowerCrashed
			if test.reason == "" {
				power = backend.PowerStopped
			}
			in := b.awaitPower(power)
			if !strings.Contains(in.Reason, test.reason) || in.GuestRebooted != (test.name == "reboot") {
				t.Errorf("%+v, want reason %q", in, test.reason)
			}
			eventually(t, bootTimeout, "no process is left", func() error {
				if left := processes(b.f.StateDir); len(left) > 0 {
					return fmt.Errorf("%q", left)
				}
				return nil
			})
			if _, err := b.d.DialControl(b.ctx, b.ref); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
				t.Errorf("DialControl: %v, want code unavailable", err)
			}
		})
		if !ok {
			break
		}
	}
	b.TB = t
	b.boot()
	b.ok(b.d.Stop(b.ctx, b.ref, bootTimeout))
	if in := b.awaitPower(backend.PowerStopped); in.Reason != "" {
		t.Errorf("a stopped sandbox has the reason %q", in.Reason)
	}
}

// TestGuest looks at what the guest got. A copy of a template gets the same as a
// guest that boots.
func TestGuest(t *testing.T) {
	for name, warm := range map[string]bool{"boots": false, "from a template": true} {
		t.Run(name, func(t *testing.T) { guest(t, warm) })
	}
}

func guest(t *testing.T, warm bool) {
	fixture := vmFixture
	if warm {
		fixture = warmFixture
	}
	f := fixture(t)
	top := f.StateDir
	// Deeper than a unix socket's name may be long.
	f.StateDir = filepath.Join(top, strings.Repeat("d", 60), strings.Repeat("e", 60))
	t.Cleanup(func() { f.destroyAll(t) })
	inet, err := net.Listen("unix", filepath.Join(top, "i"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = inet.Close() }()
	f.Internet = inet.Addr().String()
	has := agentlab.Resources{Cores: 2, MemoryMB: 700, RootSizeGB: 33}
	if warm { // those of the template that all tests share
		has.Cores, has.MemoryMB = 1, 512
	}
	b := newBox(t, f, func(s *backend.Spec) { s.Resources = has })
	if _, err := readMemory(b.d.dir(b.ref)); (err == nil) != warm {
		t.Fatalf("it starts from a template: %v", err)
	}
	b.boot()
	b.identify()

	for script, want := range map[string]string{
		"nproc": strconv.Itoa(has.Cores),
		"cat /sys/class/net/eth0/address /sys/class/net/eth0/mtu":                                                                                    qemuvm.GuestMAC + "\n" + strconv.Itoa(qemuvm.GuestMTU),
		"cat /sys/block/vda/serial":                                                                                                                  qemuvm.RootSerial,
		"cat /sys/class/virtio-ports/*/name | grep .":                                                                                                qemuvm.ControlPort,
		"cat /sys/devices/system/clocksource/clocksource0/current_clocksource":                                                                       "tsc",
		"cat /sys/class/misc/hw_random/rng_current":                                                                                                  "virtio_rng.0",
		"cat /sys/block/vda/queue/discard_max_bytes | grep -c '^0$'":                                                                                 "0",
		"ip -6 -o addr show dev eth0 scope global | awk '{print $4}'":                                                                                "fd77::2/64",
		fmt.Sprintf("awk '/MemTotal/ {print ($2 > %d && $2 < %d)}' /proc/meminfo", has.MemoryMB<<10*6/7, has.MemoryMB<<10):                           "1",
		"python3 -c 'import http.client, json, urllib.request; print(json.dumps([1]))'":                                                              "[1]",
		"python3 -m venv --without-pip /tmp/v && /tmp/v/bin/python -m ensurepip --version | cut -d' ' -f1; python3 -m pip --version | cut -d' ' -f1": "pip\npip",
		"echo '#include <stdio.h>\nint main(void) { puts(\"C\"); }' > /tmp/c.c && make -s -C /tmp c && /tmp/c":                                       "C",
		"cd /tmp && for p in file git-lfs less make ssh tmux unzip vim; do command -v $p >/dev/null || echo $p is missing; done":                     "",
	} {
		if got := b.output(script); got != want {
			t.Errorf("%s: %q, want %q", script, got, want)
		}
	}
	// The file system grows while the guest works already.
	eventually(t, bootTimeout, "the file system fills its disk", func() error {
		if size := b.output("df --output=size -BG / | tail -1 | tr -d ' G'"); size < "31" || size > "33" {
			return fmt.Errorf("%s GiB", size)
		}
		return nil
	})
	t.Run("Internet", func(t *testing.T) {
		b.TB = t
		go func() {
			c, err := inet.Accept()
			if err != nil {
				return
			}
			defer func() { _ = c.Close() }()
			line, _ := fakenet.ReadDialLine(c)
			_, _ = io.WriteString(c, "ok\nHTTP/1.0 200 OK\r\n\r\nasked for "+line)
		}()
		if got := b.output("curl -s http://192.0.78.9:81/"); got != "asked for tcp 192.0.78.9:81" {
			t.Errorf("the guest got %q", got)
		}
		log, err := os.ReadFile(filepath.Join(b.d.dir(b.ref), "egress.log"))
		if err != nil || !strings.Contains(string(log), `"addr":"192.0.78.9","port":81`) {
			t.Errorf("%s: %s, %v", "egress.log", log, err)
		}
	})
	t.Run("Permissions", func(t *testing.T) {
		err := filepath.WalkDir(b.f.StateDir, func(path string, e os.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := e.Info()
			if err == nil && info.Mode().Perm()&0o077 != 0 {
				t.Errorf("%s has mode %s", path, info.Mode())
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	})
	b.TB = t
	b.sh("systemctl reboot --force --force")
	if in := b.awaitPower(backend.PowerCrashed); !in.GuestRebooted {
		t.Errorf("after a reboot: %+v", in)
	}
}

// TestHangup sends the shim what a terminal and a dying parent send.
func TestHangup(t *testing.T) {
	b := newBox(t, warmFixture(t), nil)
	b.boot()
	shim := b.noted(shimPID)
	if sid, err := unix.Getsid(shim); err != nil || sid != shim {
		t.Errorf("the shim is in session %d, %v; its own is %d", sid, err, shim)
	}
	b.ok(syscall.Kill(shim, syscall.SIGHUP))
	b.ok(syscall.Kill(shim, syscall.SIGPIPE))
	if got := b.output("echo alive"); got != "alive" {
		t.Errorf("after SIGHUP: %q", got)
	}
	if err := runSupervisor(t.Context(), b.d.dir(b.ref), ""); agentlab.CodeOf(err) != agentlab.CodeBusy {
		t.Errorf("a second shim: %v, want code busy", err)
	}
	if in := b.awaitPower(backend.PowerRunning); in.IP != "10.77.0.2" {
		t.Errorf("the guest's address is %q", in.IP)
	}
}

// TestLostDirectory removes a sandbox's directory while it runs.
func TestLostDirectory(t *testing.T) {
	b := newBox(t, vmFixture(t), nil)
	b.ok(b.d.Start(b.ctx, b.ref))
	if left := processes(b.f.StateDir); len(left) != 2 {
		t.Fatalf("the processes of a running sandbox: %q", left)
	}
	b.ok(os.RemoveAll(b.d.dir(b.ref)))
	eventually(t, bootTimeout, "supervisor and QEMU end", func() error {
		if left := processes(b.f.StateDir); len(left) > 0 {
			return fmt.Errorf("%q", left)
		}
		return nil
	})
}

// TestHangingSupervisor stops a supervisor that no longer answers.
func TestHangingSupervisor(t *testing.T) {
	b := newBox(t, vmFixture(t), nil)
	b.ok(b.d.Start(b.ctx, b.ref))
	b.signal(shimPID, syscall.SIGSTOP)
	b.ok(b.d.Stop(b.ctx, b.ref, 0))
	b.awaitPower(backend.PowerStopped)
	b.ok(b.d.Destroy(b.ctx, b.ref))
}

// pausedNow asks the supervisor why the guest's CPUs are stopped: on a full
// disk it cannot write that down.
func (b *box) pausedNow() (string, error) {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return sockpath.Dial(ctx, filepath.Join(b.d.dir(b.ref), "shim.sock"))
	}
	c := http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
	req, err := http.NewRequestWithContext(b.ctx, http.MethodGet, "http://shim/v1/status", nil)
	b.ok(err)
	resp, err := c.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	var st struct{ Paused string }
	err = json.NewDecoder(resp.Body).Decode(&st)
	return st.Paused, err
}

// TestDiskFullInVM fills the host's disk from inside a guest, which must wait
// for room and lose nothing.
func TestDiskFullInVM(t *testing.T) {
	f := vmFixture(t)
	resize := smalldisk.Tmpfs(t, f.StateDir, "64m")
	t.Cleanup(func() { f.destroyAll(t) })
	b := newBox(t, f, nil)
	b.boot()
	sum := make(chan string, 1)
	go func() {
		sum <- b.output("head -c 120000000 /dev/zero | tr '\\0' x > /big && sync && echo 3 > /proc/sys/vm/drop_caches && sha256sum < /big")
	}()
	paused := func(want bool) {
		t.Helper()
		eventually(t, bootTimeout, fmt.Sprintf("paused is %v", want), func() error {
			reason, err := b.pausedNow()
			if err == nil && (reason != "") != want {
				err = fmt.Errorf("paused: %q", reason)
			}
			return err
		})
	}
	paused(true)
	b.awaitPower(backend.PowerRunning)
	resize("1g")
	paused(false)
	const want = "c619fc9f7806623f00ce535058ab4595b0087aa1040ca3569d9070ebb4188f85  -" // 120000000 times x
	if got := <-sum; got != want {
		t.Errorf("the guest wrote %s", got)
	}
}

// TestStartFails makes QEMU fail; the error must say why, and the next start
// must work.
func TestStartFails(t *testing.T) {
	b := newBox(t, vmFixture(t), nil)
	path := filepath.Join(b.d.dir(b.ref), fileRoot)
	whole, err := os.ReadFile(path)
	b.ok(err)
	b.ok(os.Rename(path, path+".away"))
	b.ok(os.WriteFile(path, []byte("no disk"), 0o600))
	if err := b.d.Start(b.ctx, b.ref); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Errorf("Start on what is no overlay: %v, want code denied", err)
	}
	whole[47] = 1 // its table of clusters begins where none can
	b.ok(os.WriteFile(path, whole, 0o600))
	err = b.d.Start(b.ctx, b.ref)
	if agentlab.CodeOf(err) != agentlab.CodeUnavailable || !strings.Contains(err.Error(), "L1 table") {
		t.Errorf("Start: %v, want code unavailable and QEMU's words", err)
	}
	b.ok(os.Rename(path+".away", path))
	b.ok(b.d.Start(b.ctx, b.ref))

	b.ok(b.d.Stop(b.ctx, b.ref, 0))
	img := b.f.Image
	img.Ref, img.Kernel = "gone@0", "/nonexistent/vmlinux"
	h, err := vmdir.ReadHandle(b.d.dir(b.ref))
	b.ok(err)
	h.Image = img
	b.ok(durable.ReplaceJSON(filepath.Join(b.d.dir(b.ref), vmdir.FileConfig), h, durable.None))
	err = b.d.Start(b.ctx, b.ref)
	if agentlab.CodeOf(err) != agentlab.CodeNotFound || agentlab.HintOf(err) == "" {
		t.Errorf("Start without its image: %v, want code not_found and a hint", err)
	}
}

// TestConsoleFollow follows the console over the end of the sandbox.
func TestConsoleFollow(t *testing.T) {
	b := newBox(t, warmFixture(t), nil)
	rc, err := b.d.ConsoleLog(b.ctx, b.ref, true)
	b.ok(err)
	defer func() { _ = rc.Close() }()
	b.boot()
	b.output("echo from the guest > /dev/console")
	found := make(chan error, 1)
	go func() {
		text, err := io.ReadAll(rc)
		if !bytes.Contains(text, []byte("from the guest")) {
			err = errors.Join(err, fmt.Errorf("the console holds %q", text))
		}
		found <- err
	}()
	b.ok(b.d.Destroy(b.ctx, b.ref)) // which ends the reading
	select {
	case err := <-found:
		b.ok(err)
	case <-b.ctx.Done():
		t.Fatal("follow does not end with the sandbox")
	}
}
