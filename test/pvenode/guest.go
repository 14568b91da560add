package pvenode

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
)

// Boot is what a VM is started with.
type Boot struct {
	VMID int
	// Config is the effective configuration, values as its file has them.
	Config map[string]string
	// Disks are the drives with a volume, by slot.
	Disks map[string]Disk
	// Seed are the files of the cloud-init drive: user-data, network-config,
	// meta-data and vendor-data; nil when there is no drive.
	Seed map[string]string
	// Snapshot is the snapshot whose memory it continues with; "" boots.
	Snapshot string
}

// Disk is a drive of a VM.
type Disk struct {
	Volid, Format string
	Path          string // on the node
	File          string // on this machine; there with Config.Files
	Size          int64
	CDROM         bool
}

// Contents keeps the contents of the disks of VMs, and the memory of their
// guests, for tests whose guests have some. Its methods are called while a
// worker holds the VM.
type Contents interface {
	// Saved is called when all disks, and the memory if the snapshot has it,
	// are saved.
	Saved(vmid int, snapshot string, memory bool) error
	// RolledBack is called when the disks are those of a snapshot again.
	RolledBack(vmid int, snapshot string) error
	// Deleted is called when a snapshot is deleted.
	Deleted(vmid int, snapshot string)
	// Cloned is called when the disks of a new VM are copies of a snapshot's, or,
	// if snapshot is "", of what the VM has now.
	Cloned(vmid int, snapshot string, to int) error
}

// saved calls Contents.Saved.
func (n *Node) saved(vmid int, snapshot string, memory bool) *Error {
	if n.cfg.Contents == nil {
		return nil
	}
	if err := n.cfg.Contents.Saved(vmid, snapshot, memory); err != nil {
		return dief("%s", err.Error())
	}
	return nil
}

// Guest is a QEMU process with what runs in it.
type Guest interface {
	// Status is "running", "paused" or "shutdown", as QMP says it.
	Status() string
	Pause() error
	Resume() error
	Reset() error
	// Powerdown presses the power button.
	Powerdown() error
	// Kill ends it at once.
	Kill()
	// Done is closed when it has ended, for whatever reason.
	Done() <-chan struct{}
	// Agent sends one command to the guest agent, e.g. "guest-ping", and
	// returns what it answers under "return". ErrNoAgent when none answers;
	// other errors are the agent's own words.
	Agent(ctx context.Context, command string, args map[string]any) (json.RawMessage, error)
	Pid() int
}

// ErrNoAgent is what Guest.Agent returns while no agent answers.
var ErrNoAgent = fmt.Errorf("no guest agent is running")

// AgentError is an error that the guest agent answered.
type AgentError struct{ Desc string }

// Error implements error.
func (e *AgentError) Error() string { return e.Desc }

// ScriptedGuest is a guest without a machine. The zero value answers the
// guest agent, has one interface with the addresses of its configuration, and
// obeys the power button.
type ScriptedGuest struct {
	// NoAgent keeps the guest agent silent; SetAgent changes it later.
	NoAgent bool
	// Deaf ignores the power button and guest-shutdown.
	Deaf bool
	// OnAgent overrides single commands of the guest agent; handled false
	// leaves it to the guest.
	OnAgent func(command string, args map[string]any) (result any, handled bool, err error)
	// OnFile is called when a file of the guest was written by its agent.
	OnFile func(name, content string)
	// OnEnd is called once when it has ended.
	OnEnd func()

	boot                Boot
	mu                  sync.Mutex
	paused              bool
	files               map[string]string
	execs               map[int]*execResult
	handles             map[int]string
	nextHandle, nextPID int
	frozen              bool
	done                chan struct{}
	once                sync.Once
}

type execResult struct {
	code      int
	out, errs string
}

// Start makes the guest one of a boot; it is what a Config.Boot function
// calls.
func (g *ScriptedGuest) Start(b Boot) *ScriptedGuest {
	g.boot, g.done = b, make(chan struct{})
	g.files, g.execs, g.handles = map[string]string{}, map[int]*execResult{}, map[int]string{}
	return g
}

// SetAgent turns the guest agent on or off.
func (g *ScriptedGuest) SetAgent(on bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.NoAgent = !on
}

// File returns the content of a file that file-write wrote.
func (g *ScriptedGuest) File(name string) (string, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	s, ok := g.files[name]
	return s, ok
}

// Boot returns what it was started with.
func (g *ScriptedGuest) Boot() Boot { return g.boot }

// Status implements Guest.
func (g *ScriptedGuest) Status() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.paused {
		return "paused"
	}
	return "running"
}

// Pause implements Guest.
func (g *ScriptedGuest) Pause() error { g.setPaused(true); return nil }

// Resume implements Guest.
func (g *ScriptedGuest) Resume() error { g.setPaused(false); return nil }

func (g *ScriptedGuest) setPaused(p bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.paused = p
}

// Reset implements Guest.
func (g *ScriptedGuest) Reset() error { return nil }

// Powerdown implements Guest.
func (g *ScriptedGuest) Powerdown() error {
	g.mu.Lock()
	deaf := g.Deaf || g.paused
	g.mu.Unlock()
	if !deaf {
		g.Kill()
	}
	return nil
}

// Kill implements Guest.
func (g *ScriptedGuest) Kill() {
	g.once.Do(func() {
		close(g.done)
		if g.OnEnd != nil {
			g.OnEnd()
		}
	})
}

// Done implements Guest.
func (g *ScriptedGuest) Done() <-chan struct{} { return g.done }

// Pid implements Guest.
func (g *ScriptedGuest) Pid() int { return 0 }

// Agent implements Guest.
func (g *ScriptedGuest) Agent(_ context.Context, command string, args map[string]any) (json.RawMessage, error) {
	g.mu.Lock()
	silent := g.NoAgent || g.paused
	g.mu.Unlock()
	if silent {
		return nil, ErrNoAgent
	}
	if g.OnAgent != nil {
		if result, handled, err := g.OnAgent(command, args); handled || err != nil {
			return encode(result), err
		}
	}
	result, err := g.agent(command, args)
	return encode(result), err
}

func encode(v any) json.RawMessage {
	if v == nil {
		v = map[string]any{}
	}
	b, err := json.Marshal(v)
	if err != nil {
		return json.RawMessage("{}")
	}
	return b
}

// agent is what a small guest agent answers.
func (g *ScriptedGuest) agent(command string, args map[string]any) (any, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch command {
	case "guest-ping":
		return nil, nil
	case "guest-network-get-interfaces":
		return g.interfaces(), nil
	case "guest-shutdown":
		if !g.Deaf {
			go g.Kill()
		}
		return nil, nil
	case "guest-get-osinfo":
		return map[string]any{"kernel-release": "6.1.0-fake", "machine": "x86_64", "kernel-version": "#1 SMP"}, nil
	case "guest-get-host-name":
		return map[string]any{"host-name": g.boot.Config["name"]}, nil
	case "guest-get-fsinfo":
		return []any{}, nil
	case "guest-info":
		return map[string]any{"version": "7.2.22", "supported_commands": []any{}}, nil
	case "guest-fsfreeze-status":
		return map[bool]string{true: "frozen", false: "thawed"}[g.frozen], nil
	case "guest-fsfreeze-freeze", "guest-fsfreeze-thaw":
		g.frozen = command == "guest-fsfreeze-freeze"
		return 0, nil
	}
	return g.agentFiles(command, args)
}

// agentFiles are the commands about files and programs.
func (g *ScriptedGuest) agentFiles(command string, args map[string]any) (any, error) {
	handle, _ := args["handle"].(float64)
	name := g.handles[int(handle)]
	switch command {
	case "guest-file-open":
		path := fmt.Sprint(args["path"])
		if _, ok := g.files[path]; !ok && args["mode"] == nil {
			return nil, &AgentError{Desc: fmt.Sprintf("failed to open file '%s' (mode: 'r'): No such file or directory", path)}
		}
		g.nextHandle++
		g.handles[g.nextHandle] = path
		return g.nextHandle, nil
	case "guest-file-write":
		b, err := base64.StdEncoding.DecodeString(fmt.Sprint(args["buf-b64"]))
		if name == "" || err != nil {
			return nil, &AgentError{Desc: "Invalid parameter 'handle'"}
		}
		g.files[name] = string(b)
		if g.OnFile != nil {
			go g.OnFile(name, string(b))
		}
		return map[string]any{"count": len(b), "eof": false}, nil
	case "guest-file-read":
		return map[string]any{"count": len(g.files[name]), "buf-b64": base64.StdEncoding.EncodeToString([]byte(g.files[name])), "eof": true}, nil
	case "guest-file-close":
		delete(g.handles, int(handle))
		return nil, nil
	case "guest-exec":
		return g.exec(args)
	case "guest-exec-status":
		pid, _ := args["pid"].(int)
		r := g.execs[pid]
		if r == nil {
			return nil, &AgentError{Desc: "Invalid parameter 'pid'"}
		}
		delete(g.execs, pid)
		out := map[string]any{"exited": true, "exitcode": r.code}
		if r.out != "" {
			out["out-data"], out["out-truncated"] = base64.StdEncoding.EncodeToString([]byte(r.out)), false
		}
		if r.errs != "" {
			out["err-data"], out["err-truncated"] = base64.StdEncoding.EncodeToString([]byte(r.errs)), false
		}
		return out, nil
	}
	return nil, &AgentError{Desc: fmt.Sprintf("The command %s has not been found", command)}
}

// exec runs nothing: every program of /bin succeeds, but for the one script
// that is known.
func (g *ScriptedGuest) exec(args map[string]any) (any, error) {
	path := fmt.Sprint(args["path"])
	if !strings.HasPrefix(path, "/bin/") || strings.Contains(path, " ") {
		return nil, &AgentError{Desc: "Guest agent command failed, error was 'Failed to execute child process \u201c" + path + "\u201d (No such file or directory)'"}
	}
	g.nextPID += 2
	pid := 175 + g.nextPID
	g.execs[pid] = &execResult{}
	if arg, _ := args["arg"].([]string); len(arg) == 2 && arg[1] == "echo out; echo err >&2; exit 3" {
		g.execs[pid] = &execResult{code: 3, out: "out\n", errs: "err\n"}
	}
	return map[string]any{"pid": pid}, nil
}

// interfaces are lo and the devices of the config, with the static addresses
// of ipconfigN; guests that use DHCP override it by OnAgent.
func (g *ScriptedGuest) interfaces() any {
	stats := map[string]any{"rx-bytes": 110, "rx-packets": 1, "rx-errs": 0, "rx-dropped": 0, "tx-bytes": 266, "tx-packets": 3, "tx-errs": 0, "tx-dropped": 0}
	list := []any{map[string]any{
		"name": "lo", "hardware-address": "00:00:00:00:00:00", "statistics": stats,
		"ip-addresses": []any{
			map[string]any{"ip-address": "127.0.0.1", "ip-address-type": "ipv4", "prefix": 8},
			map[string]any{"ip-address": "::1", "ip-address-type": "ipv6", "prefix": 128},
		},
	}}
	for i := range 32 {
		conf, ok := g.boot.Config["net"+itoa(i)]
		if !ok {
			continue
		}
		dev := map[string]any{"name": "eth" + itoa(i), "hardware-address": strings.ToLower(parseNet(conf)["macaddr"]), "statistics": stats}
		if ips := staticAddresses(g.boot.Config["ipconfig"+itoa(i)]); len(ips) > 0 {
			dev["ip-addresses"] = ips
		}
		list = append(list, dev)
	}
	return list
}

func staticAddresses(ipconfig string) []any {
	m, _ := ipconfigProps.parse(ipconfig)
	var out []any
	for key, kind := range map[string]string{"ip": "ipv4", "ip6": "ipv6"} {
		if addr, bits, ok := strings.Cut(m[key], "/"); ok {
			out = append(out, map[string]any{"ip-address": addr, "ip-address-type": kind, "prefix": atoi(bits)})
		}
	}
	return out
}

func (n *Node) boot(ctx context.Context, b Boot) (Guest, error) {
	if n.cfg.Boot != nil {
		return n.cfg.Boot(ctx, b)
	}
	return (&ScriptedGuest{}).Start(b), nil
}

// BootWith is a Config.Boot that makes a guest of every boot.
func BootWith(guest func(b Boot) Guest) func(context.Context, Boot) (Guest, error) {
	return func(_ context.Context, b Boot) (Guest, error) { return guest(b), nil }
}
