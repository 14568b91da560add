package qemu

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// nest is where the guest of TestNestedKVM keeps what it runs.
const nest = "/nest"

// TestNestedKVM runs the driver with KVM where this host cannot: TCG offers
// AMD's virtualization to its guest, so KVM works one level down.
func TestNestedKVM(t *testing.T) {
	f := vmFixture(t)
	d, err := f.open()
	if err != nil {
		t.Fatal(err)
	}
	if a, err := d.host.Accel(t.Context()); err != nil || a == qemuvm.AccelKVM {
		t.Skipf("skipped: KVM works on this host, so all tests run with it (%v)", err)
	}
	b := newBox(t, f, func(s *backend.Spec) { s.Resources.MemoryMB, s.Resources.Nested = 3000, agentlab.NestedOn })
	b.boot()
	if got := b.output("modprobe kvm_amd && echo ok"); got != "ok" {
		t.Fatalf("the guest has no KVM: %s", got)
	}
	conn, err := b.client().Exec(b.ctx, guestapi.ExecRequest{
		Command: []string{"sh", "-c", "mkdir -p " + nest + "/tmp && tar xf - -C " + nest}, User: "root",
	})
	b.ok(err)
	w := stream.NewWriter(conn)
	b.ok(sendNest(w.Data(stream.Stdin), f))
	b.ok(w.Frame(stream.StdinEOF, nil))
	frames := stream.NewReader(conn)
	for {
		typ, p, err := frames.Next()
		b.ok(err)
		if typ == stream.Exit {
			break
		}
		if len(p) > 0 {
			t.Logf("tar: %s", p)
		}
	}
	out := b.output("cd " + nest + "; mkdir dev proc; mount --bind /dev dev; mount -t proc proc proc; chroot . /self nested 2>&1")
	if !strings.HasSuffix(out, "the nested guest answers") {
		t.Errorf("nested: %s", out)
	}
}

// nested is what runs in the guest: one sandbox with KVM, from its making to
// its end.
func nested() int {
	ctx, cancel := context.WithTimeout(context.Background(), bootTimeout)
	defer cancel()
	f := fixed{
		StateDir: "/tmp/state", CacheDir: "/tmp/cache", Runner: "/agent-runner",
		Image: vmdir.ImageFiles{Ref: "nested@0", RootDisk: "/root.img", Kernel: "/vmlinux", Modules: "/modules.cpio"},
	}
	err := func() error {
		d, err := f.open()
		if err != nil {
			return err
		}
		rehost(d, func(h *qemuvm.HostConfig) {
			h.Accel = qemuvm.AccelKVM     // nothing else will do
			h.ProbeDeadline = bootTimeout // this KVM is itself emulated
		})
		sp := f.spec(1)
		if err := d.Create(ctx, sp); err != nil {
			return err
		}
		if err := d.Start(ctx, sp.Ref()); err != nil {
			return err
		}
		var run startConfig
		err = supervisor.ReadStart(d.dir(sp.Ref()), &run)
		if err == nil && run.Accel != qemuvm.AccelKVM {
			err = errors.New("it runs with " + string(run.Accel))
		}
		for err == nil { // until the guest answers
			var c net.Conn
			if c, err = d.DialControl(ctx, sp.Ref()); err == nil {
				err = c.Close()
				break
			}
			select {
			case <-ctx.Done():
			case <-time.After(20 * time.Millisecond):
				err = nil
			}
		}
		if err != nil {
			log, _ := os.ReadFile(filepath.Join(d.dir(sp.Ref()), shimLog))
			err = fmt.Errorf("%w\n%s", err, log)
		}
		return errors.Join(err, d.Destroy(ctx, sp.Ref()))
	}()
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println("the nested guest answers")
	return 0
}

var libRE = regexp.MustCompile(`/[^ ()]+`)

// sendNest writes an archive of this program, QEMU with all that it needs, and
// an image whose init does nothing.
func sendNest(to io.Writer, f fixed) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	files := map[string]string{"self": self, "agent-runner": f.Runner, "vmlinux": f.Image.Kernel, "modules.cpio": f.Image.Modules}
	for _, program := range []string{qemuvm.DefaultQEMU, qemuvm.DefaultQEMUImg, self} {
		path, err := exec.LookPath(program)
		if err != nil {
			return err
		}
		if program != self {
			files["usr/bin/"+program] = path
		}
		libs, _ := exec.Command("ldd", path).Output()
		for _, lib := range libRE.FindAllString(string(libs), -1) {
			files[lib[1:]] = lib
		}
	}
	for _, dir := range []string{"/usr/share/qemu", "/usr/share/seabios"} {
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			path := filepath.Join(dir, e.Name())
			if st, err := os.Stat(path); err == nil && st.Mode().IsRegular() {
				files[path[1:]] = path
			}
		}
	}
	dir, err := os.MkdirTemp("", "agentlab-nest-*")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if files["root.img"], err = idleRoot(dir); err != nil {
		return err
	}
	tw := tar.NewWriter(to)
	for name, path := range files {
		if err := addFile(tw, name, path); err != nil {
			return err
		}
	}
	return tw.Close()
}

// idleRoot creates a file system whose init waits without end; agent-runner
// needs nothing else to answer.
func idleRoot(dir string) (string, error) {
	tree := filepath.Join(dir, "tree")
	for _, d := range []string{"etc", "sbin", "dev", "proc", "sys", "run", "tmp", "root", "var/lib"} {
		if err := os.MkdirAll(filepath.Join(tree, d), 0o755); err != nil {
			return "", err
		}
	}
	src := filepath.Join(dir, "init.go")
	if err := os.WriteFile(src, []byte("package main\n\nimport \"os\"\n\nfunc main() { r, _, _ := os.Pipe(); _, _ = r.Read(make([]byte, 1)) }\n"), 0o600); err != nil {
		return "", err
	}
	img := filepath.Join(dir, "root.img")
	for _, c := range []*exec.Cmd{
		exec.Command("go", "build", "-o", filepath.Join(tree, "sbin/init"), src),
		exec.Command("mke2fs", "-q", "-t", "ext4", "-d", tree, img, "48M"),
	} {
		c.Env = append(os.Environ(), "CGO_ENABLED=0", "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
		if out, err := c.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%s: %w\n%s", c.Path, err, out)
		}
	}
	return img, nil
}

func addFile(tw *tar.Writer, name, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if err := tw.WriteHeader(&tar.Header{Name: name, Mode: int64(st.Mode() & fs.ModePerm), Size: st.Size()}); err != nil {
		return err
	}
	_, err = io.Copy(tw, f)
	return err
}
