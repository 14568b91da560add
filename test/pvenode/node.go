package pvenode

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

// Config describes a fake node. Its zero value is one node "pve" of version
// 8.4 with storages local-zfs (zfspool) and local (dir), bridges vmbr0 and
// vmbr1, and guests that boot at once and answer the guest agent.
type Config struct {
	// Version is "8.4" or "9.2"; "" is 8.4.
	Version string
	// Nodes are the names of the cluster's nodes; clients connect to the
	// first one.
	Nodes []string
	// Storages replaces the two standard ones.
	Storages []Storage
	// Bridges are those that every node has.
	Bridges []string
	// Memory is what each node has, in bytes; 0 is 64 GiB. MemoryOf overrides
	// it by node name.
	Memory   int64
	MemoryOf map[string]int64
	// Waits shortens the waits of a real node; a zero field is the real one.
	Waits Waits
	// BareFaults keeps the text of a fault out of the body, as versions before
	// 8.4 do: it is in the reason phrase alone.
	BareFaults bool
	// NoStatus is a node without the daemon that gathers its status: lists say
	// "unknown", as the recordings do.
	NoStatus bool
	// Boot starts what runs in a VM; nil boots a ScriptedGuest.
	Boot func(ctx context.Context, b Boot) (Guest, error)
	// OnCall is called before and after (done) the work of every call that the
	// API knows, on every face, with the number of the call since the node
	// began; it may block. Method and path are those of the API's table.
	OnCall func(number int64, method, path string, done bool)
	// Files makes real files of the volumes of dir storages; nil makes none.
	Files Files
	// Contents keeps the contents of disks; nil keeps none.
	Contents Contents
	// Dir is where the node keeps real files: snippets, the certificate, and
	// volumes with Files. "" is a directory of the test.
	Dir string
	// Listen is the address of the REST API; "" is a free port of 127.0.0.1.
	Listen string
}

// Waits are how long a real node waits before it gives up. Zero fields are the
// real durations, which stand beside them.
type Waits struct {
	ConfigLock   time.Duration // 10 s
	CreateLock   time.Duration // 5 s
	CloneLock    time.Duration // 1 s
	StorageLock  time.Duration // 10 s
	Unauthorized time.Duration // 3 s
	Proxy        time.Duration // 30 s
	Agent        time.Duration // 3 s
	Zvol         time.Duration // 10 s, in a call
	ZvolWorker   time.Duration // 300 s, in a worker
	Second       time.Duration // 1 s: the unit of every timeout that a caller gives
}

// ShortWaits returns waits for tests that say that they do not test waiting. Proxy is
// a real node's: it cuts off every call, also those of a busy machine.
func ShortWaits() Waits {
	return Waits{
		ConfigLock: 200 * time.Millisecond, CreateLock: 100 * time.Millisecond, CloneLock: 50 * time.Millisecond,
		StorageLock: 500 * time.Millisecond, Unauthorized: time.Millisecond,
		Agent: 5 * time.Millisecond, Zvol: 20 * time.Millisecond, ZvolWorker: 600 * time.Millisecond,
		Second: 20 * time.Millisecond,
	}
}

func (w Waits) withDefaults() Waits {
	for _, f := range []struct {
		at   *time.Duration
		real time.Duration
	}{
		{&w.ConfigLock, 10 * time.Second}, {&w.CreateLock, 5 * time.Second}, {&w.CloneLock, time.Second},
		{&w.StorageLock, 10 * time.Second}, {&w.Unauthorized, 3 * time.Second}, {&w.Proxy, 30 * time.Second},
		{&w.Agent, 3 * time.Second}, {&w.Zvol, 10 * time.Second}, {&w.ZvolWorker, 300 * time.Second},
		{&w.Second, time.Second},
	} {
		if *f.at == 0 {
			*f.at = f.real
		}
	}
	return w
}

// Node is a fake Proxmox VE, running from New until the end of its test.
type Node struct {
	name string // of the node that clients connect to
	cfg  Config
	dir  string

	mu       sync.Mutex
	nodes    map[string]*member
	vms      map[int]*vm
	cts      map[int]string // containers: node by number
	storages map[string]*storage
	tasks    taskTable
	acc      access
	pools    map[string]*pool
	fw       map[string]*fwFile // "cluster" or a VMID
	nextPID  int
	nextIDs  [2]int // lower, upper of datacenter.cfg
	started  time.Time
	told     map[int]map[string]any // what broadcast has sent

	locks  flocks
	faults faults
	count  counters

	rest    *restServer
	ctx     context.Context // ends with the test
	workers sync.WaitGroup

	tools
}

// member is one node of the cluster.
type member struct {
	online  bool
	memory  int64
	bridges map[string]bool
}

// New starts a fake node, which ends with the test: running guests are
// stopped and every worker is waited for.
func New(tb testing.TB, cfg Config) *Node {
	tb.Helper()
	n, err := build(cfg, tb.TempDir)
	if err != nil {
		tb.Fatalf("fake Proxmox node: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	n.ctx = ctx
	if err := n.serveREST(); err != nil {
		cancel()
		tb.Fatalf("fake Proxmox node: %v", err)
	}
	if !cfg.NoStatus {
		n.broadcast()
	}
	tb.Cleanup(func() {
		cancel()
		n.rest.close()
		n.killGuests()
		n.workers.Wait()
		n.closeTools()
	})
	return n
}

func build(cfg Config, tempDir func() string) (*Node, error) {
	switch cfg.Version {
	case "":
		cfg.Version = "8.4"
	case "8.4", "9.2":
	default:
		return nil, fmt.Errorf("version %q is not supported; use 8.4 or 9.2", cfg.Version)
	}
	if len(cfg.Nodes) == 0 {
		cfg.Nodes = []string{"pve"}
	}
	if len(cfg.Bridges) == 0 {
		cfg.Bridges = []string{"vmbr0", "vmbr1"}
	}
	if len(cfg.Storages) == 0 {
		cfg.Storages = []Storage{{ID: "local-zfs", Type: ZFSPool}, {ID: "local", Type: Dir}}
	}
	if cfg.Memory == 0 {
		cfg.Memory = 64 << 30
	}
	if cfg.Dir == "" {
		cfg.Dir = tempDir()
	}
	cfg.Waits = cfg.Waits.withDefaults()
	n := &Node{
		name: cfg.Nodes[0], cfg: cfg, dir: cfg.Dir,
		nodes: map[string]*member{}, vms: map[int]*vm{}, cts: map[int]string{}, storages: map[string]*storage{},
		pools: map[string]*pool{}, fw: map[string]*fwFile{},
		nextPID: 4096, nextIDs: [2]int{100, 1000000}, started: time.Now(),
	}
	n.tasks.init()
	n.acc.init(n.v9())
	n.locks.init()
	n.count.init()
	for _, name := range cfg.Nodes {
		m := &member{online: true, memory: cfg.Memory, bridges: map[string]bool{}}
		if own, ok := cfg.MemoryOf[name]; ok {
			m.memory = own
		}
		for _, b := range cfg.Bridges {
			m.bridges[b] = true
		}
		n.nodes[name] = m
	}
	for _, s := range cfg.Storages {
		if err := n.addStorage(s); err != nil {
			return nil, err
		}
	}
	return n, nil
}

// v9 reports whether the node behaves as version 9.
func (n *Node) v9() bool { return n.cfg.Version == "9.2" }

// Name returns the name of the node that clients connect to.
func (n *Node) Name() string { return n.name }

// HostPath returns where a path of the node is on this machine.
func (n *Node) HostPath(path string) string { return filepath.Join(n.dir, filepath.Clean("/"+path)) }

// URL returns the address of the REST API, without a path.
func (n *Node) URL() string { return "https://" + n.rest.addr() }

// Addr returns host and port of the REST API.
func (n *Node) Addr() string { return n.rest.addr() }

func (n *Node) listen() (net.Listener, error) {
	addr := n.cfg.Listen
	if addr == "" {
		addr = "127.0.0.1:0"
	}
	var lc net.ListenConfig
	return lc.Listen(context.Background(), "tcp", addr)
}

// pid draws the process id of a worker or a QEMU; mu is held.
func (n *Node) pid() int {
	n.nextPID += 13
	return n.nextPID
}

func writeFile(path string, content []byte, mode os.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, content, mode)
}
