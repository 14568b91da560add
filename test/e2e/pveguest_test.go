package e2e

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/link"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// lightGuests are what runs in the VMs of a fake node where a test has no use
// for machines: of each, a network namespace whose cable is the VM's tap
// device on the bridge, so that the rules there are met, and a guest control
// server in it that can say who it is and no more.
type lightGuests struct {
	mu    sync.Mutex
	disks map[string]string // content of guestapi.ControlFile by smbios uuid: it outlives a boot, not a VM
	files string            // directory of files of a guest that runs agent-runner; "" for those that do not
	bin   string            // directory of agent-runner
}

// lightGuest is one boot of one of them.
type lightGuest struct {
	*pvenode.ScriptedGuest
	ip, boot string

	inside   chan func() // functions to run in its namespace
	mu       sync.Mutex
	ended    bool
	server   *http.Server // nil until it knows whom to obey
	identity string
	works    bool // agent-runner was started
}

// boot is the node's Config.Boot.
func (g *lightGuests) boot(_ context.Context, b pvenode.Boot) (pvenode.Guest, error) {
	m := &lightGuest{ScriptedGuest: &pvenode.ScriptedGuest{}, boot: agentlab.NewUID()}
	if !strings.Contains(b.Config["description"], "agentlab-uid: ") {
		return m.Start(b), nil // foreign
	}
	disk := b.Config["smbios1"]
	m.OnEnd = m.end
	m.OnAgent = func(command string, args map[string]any) (any, bool, error) {
		if command != "guest-file-write" { // of the one file that is ever written
			return nil, false, nil
		}
		text, err := base64.StdEncoding.DecodeString(fmt.Sprint(args["buf-b64"]))
		if err == nil {
			err = g.seeded(m, disk, string(text))
		}
		return nil, false, err
	}
	m.Start(b)
	if err := m.plug(b); err != nil {
		return nil, err
	}
	g.mu.Lock()
	seed := g.disks[disk]
	g.mu.Unlock()
	if seed == "" {
		seed = controlOf(b.Seed["user-data"])
	}
	if seed == "" {
		return m, nil // the guest agent will bring it
	}
	return m, g.seeded(m, disk, seed)
}

// controlOf is the content of guestapi.ControlFile in user-data; "" when none.
func controlOf(userData string) string {
	var doc struct {
		Files []struct {
			Path    string `yaml:"path"`
			Content string `yaml:"content"`
		} `yaml:"write_files"`
	}
	if yaml.Unmarshal([]byte(userData), &doc) != nil {
		return ""
	}
	for _, f := range doc.Files {
		if text, err := base64.StdEncoding.DecodeString(f.Content); err == nil && f.Path == guestapi.ControlFile {
			return string(text)
		}
	}
	return ""
}

// plug makes the namespace and its cable.
func (m *lightGuest) plug(b pvenode.Boot) error {
	mac, _, _ := strings.Cut(strings.TrimPrefix(b.Config["net0"], "virtio="), ",")
	opts := map[string]string{}
	for pair := range strings.SplitSeq(b.Config["ipconfig0"], ",") {
		k, v, _ := strings.Cut(pair, "=")
		opts[k] = v
	}
	m.ip, _, _ = strings.Cut(opts["ip"], "/")
	tap := fmt.Sprintf("tap%di0", b.VMID)
	m.inside = make(chan func())
	tid := make(chan int)
	go m.live(tid)
	if err := run("ip link add %s type veth peer name eth0 address %s netns %d", tap, mac, <-tid); err != nil {
		return err
	}
	err := m.do(func() error {
		return run("ip link set lo up; ip addr add %s dev eth0; ip link set eth0 up", opts["ip"])
	})
	if err != nil {
		return err
	}
	if err := run("ip link set %s master vmbr1 up", tap); err != nil {
		return err
	}
	return m.do(func() error { return run("ip route add default via %s", opts["gw"]) })
}

// live is a thread in a namespace of its own, which ends with it. It sends its
// number first. The first thread of the process keeps its namespace, because
// it represents the process.
func (m *lightGuest) live(tid chan<- int) {
	runtime.LockOSThread()
	if threadID() == os.Getpid() {
		defer runtime.UnlockOSThread()
		ended := make(chan struct{})
		go func() { // on another thread, since this one is taken
			defer close(ended)
			m.live(tid)
		}()
		<-ended
		return
	}
	newNetwork()
	tid <- threadID()
	for do := range m.inside {
		do()
	}
}

// do runs fn in the namespace.
func (m *lightGuest) do(fn func() error) (err error) {
	done := make(chan struct{})
	m.inside <- func() {
		err = fn()
		close(done)
	}
	<-done
	return err
}

func run(format string, args ...any) error {
	out, err := exec.Command("sh", "-ec", fmt.Sprintf(format, args...)).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// seeded starts guest control once it is known whom to obey.
func (g *lightGuests) seeded(m *lightGuest, disk, text string) error {
	var c guestapi.ControlConfig
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		return err
	}
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return err
	}
	g.mu.Lock()
	if g.disks == nil {
		g.disks = map[string]string{}
	}
	g.disks[disk] = text
	g.mu.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.server != nil || m.ended {
		return nil
	}
	var raw net.Listener
	err = m.do(func() (err error) {
		raw, err = net.Listen("tcp4", net.JoinHostPort(m.ip, fmt.Sprint(link.ControlPort)))
		return err
	})
	if err != nil {
		return err
	}
	l, err := link.ListenTLS(raw, c.HostKey, key)
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+guestapi.PathHealth, func(w http.ResponseWriter, _ *http.Request) { m.health(w) })
	mux.HandleFunc("PUT "+guestapi.PathIdentity, func(w http.ResponseWriter, r *http.Request) {
		var id guestapi.Identity
		err := json.NewDecoder(r.Body).Decode(&id)
		if err != nil || id.UID != c.UID {
			http.Error(w, fmt.Sprintf("identity %q of the guest of %q: %v", id.UID, c.UID, err), http.StatusBadRequest)
			return
		}
		m.mu.Lock()
		m.identity = id.UID
		if g.files != "" && id.Bootstrap != nil {
			err = m.work(g, *id.Bootstrap)
		}
		m.mu.Unlock()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		m.health(w)
	})
	m.server = &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	go func() { _ = m.server.Serve(l) }()
	return nil
}

// work starts agent-runner with a bootstrap document in the namespace. The caller
// holds m.mu.
func (m *lightGuest) work(g *lightGuests, b guestapi.Bootstrap) error {
	text, err := json.Marshal(b)
	if err != nil {
		return err
	}
	file := filepath.Join(g.files, "bootstrap.json")
	if err := os.WriteFile(file, text, 0o600); err != nil || m.works {
		return err
	}
	cmd := exec.Command(filepath.Join(g.bin, "agent-runner"), "run", "--bootstrap", file, "--run-dir", filepath.Join(g.files, "run"))
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + g.files, "TMPDIR=" + g.files}
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := m.do(cmd.Start); err != nil {
		return err
	}
	m.works = true
	go func() { _ = cmd.Wait() }()
	return nil
}

// killAll kills what runs in the namespace, as the end of a VM does.
func (m *lightGuest) killAll() {
	own := ""
	_ = m.do(func() (err error) { own, err = os.Readlink("/proc/thread-self/ns/net"); return err })
	links, _ := filepath.Glob("/proc/[0-9]*/ns/net")
	for _, l := range links {
		pid, _ := strconv.Atoi(strings.Split(l, "/")[2])
		if ns, err := os.Readlink(l); err == nil && ns == own && own != "" && pid != os.Getpid() {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}

func (m *lightGuest) health(w http.ResponseWriter) {
	m.mu.Lock()
	defer m.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(guestapi.Health{Version: "test", BootID: m.boot, Identity: m.identity, System: "running"})
}

// end takes the namespace away, and the tap device with it.
func (m *lightGuest) end() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.server != nil {
		_ = m.server.Close()
	}
	m.ended = true
	if m.works {
		m.killAll()
	}
	close(m.inside)
	_ = run("ip link delete tap%di0 || true", m.Boot().VMID) // sooner than the kernel would
}
