package pvenode

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
)

// The programs in Bin are small scripts that run this test binary again, with
// the socket of the node in the environment: no program has to be built, and
// a test may kill one as any other process.
const (
	socketEnv  = "PVETEST_SOCKET"
	programEnv = "PVETEST_PROGRAM"
	nodeEnv    = "PVENODE_NODE"
)

var programs = []string{"qm", "pvesh", "pvesm", "pveum"}

//nolint:gochecknoinits // a test binary that runs as a program of a node must do so before its tests run
func init() {
	if program := os.Getenv(programEnv); program != "" && os.Getenv(socketEnv) != "" {
		os.Exit(runClient(os.Getenv(socketEnv), os.Getenv(nodeEnv), program, os.Args[1:]))
	}
}

// toolRequest is what a program sends first.
type toolRequest struct {
	Node, Program string
	Args          []string
}

// runClient runs the process of a program: it prints what it receives.
func runClient(socket, node, program string, args []string) int {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGQUIT)
	conn, err := net.Dial("unix", socket)
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: cannot connect to the fake node: %v\n", program, err)
		return 111
	}
	defer func() { _ = conn.Close() }()
	if err := json.NewEncoder(conn).Encode(toolRequest{node, program, args}); err != nil {
		return 111
	}
	go func() {
		for range signals {
			_, _ = conn.Write([]byte("T"))
		}
	}()
	r := bufio.NewReader(conn)
	for {
		kind, data, err := readFrame(r)
		if err != nil {
			fmt.Fprintf(os.Stderr, "%s: cannot connect to the fake node: %v\n", program, err)
			return 111
		}
		switch kind {
		case 'o':
			_, _ = os.Stdout.Write(data)
		case 'e':
			_, _ = os.Stderr.Write(data)
		case 'x':
			return int(data[0])
		}
	}
}

func readFrame(r io.Reader) (kind byte, data []byte, err error) {
	var head [5]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}
	data = make([]byte, binary.BigEndian.Uint32(head[1:]))
	_, err = io.ReadFull(r, data)
	return head[0], data, err
}

// Bin returns a directory with qm, pvesh, pvesm and pveum, which speak with
// this node as root on it.
func (n *Node) Bin() string { return n.BinOf(n.name) }

// Host returns the words before a command that run it as on this node: with
// the node's programs in /usr/local/sbin and locks of its own.
func (n *Node) Host() []string {
	return []string{
		"unshare", "--mount", "--propagation", "private", "sh", "-c",
		`mkdir -p /run/lock && mount --bind "$1" /usr/local/sbin && mount -t tmpfs tmpfs /run/lock && shift && exec "$@"`, "sh", n.Bin(),
	}
}

// BinOf is Bin on another node of the cluster.
func (n *Node) BinOf(node string) string {
	n.toolsOnce.Do(func() { n.toolsErr = n.serveTools() })
	if n.toolsErr != nil {
		panic(fmt.Sprintf("fake Proxmox node: programs: %v", n.toolsErr))
	}
	dir := filepath.Join(n.toolsDir, "bin-"+node)
	n.toolsMu.Lock()
	defer n.toolsMu.Unlock()
	if n.toolsMade[node] { // written once: one may be running
		return dir
	}
	exe, err := os.Executable()
	if err != nil {
		panic(fmt.Sprintf("fake Proxmox node: programs: %v", err))
	}
	for _, p := range programs {
		// Under the race detector every process would linger for a second
		// before it ends.
		script := fmt.Sprintf("#!/bin/sh\n%s='%s' %s='%s' %s='%s' GORACE=\"atexit_sleep_ms=0 $GORACE\" exec '%s' \"$@\"\n",
			socketEnv, n.toolsSocket, programEnv, p, nodeEnv, node, exe)
		if err := writeProgram(filepath.Join(dir, p), script); err != nil {
			panic(fmt.Sprintf("fake Proxmox node: programs: %v", err))
		}
	}
	if n.toolsMade == nil {
		n.toolsMade = map[string]bool{}
	}
	n.toolsMade[node] = true
	return dir
}

// writeProgram writes a file that is executed: no other process may be forked
// while it is open for writing, which would keep it busy.
func writeProgram(path, script string) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	return writeFile(path, []byte(script), 0o755)
}

// tools is the server of the programs.
type tools struct {
	toolsOnce             sync.Once
	toolsErr              error
	toolsMu               sync.Mutex
	toolsMade             map[string]bool // which nodes have their programs
	toolsDir, toolsSocket string
	toolsListener         net.Listener
	toolsConns            sync.WaitGroup
	toolsRunning          atomic.Int64
	toolsTerminated       atomic.Int64
}

// ToolsRunning returns how many processes of programs in Bin are alive.
func (n *Node) ToolsRunning() int { return int(n.toolsRunning.Load()) }

// ToolsTerminated returns how many of them were sent SIGTERM.
func (n *Node) ToolsTerminated() int { return int(n.toolsTerminated.Load()) }

func (n *Node) serveTools() error {
	// A path of a socket has at most 107 bytes: not below the test's directory.
	dir, err := os.MkdirTemp("", "pve-")
	if err != nil {
		return err
	}
	n.toolsDir, n.toolsSocket = dir, filepath.Join(dir, "s")
	var lc net.ListenConfig
	n.toolsListener, err = lc.Listen(n.ctx, "unix", n.toolsSocket)
	if err != nil {
		return err
	}
	n.toolsConns.Add(1)
	go func() {
		defer n.toolsConns.Done()
		for {
			conn, err := n.toolsListener.Accept()
			if err != nil {
				return
			}
			n.toolsConns.Add(1)
			go func() {
				defer n.toolsConns.Done()
				n.serveTool(conn)
			}()
		}
	}()
	return nil
}

// closeTools ends the server and waits for the programs that still run.
func (n *Node) closeTools() {
	if n.toolsListener == nil {
		return
	}
	_ = n.toolsListener.Close()
	n.toolsConns.Wait()
	_ = os.RemoveAll(n.toolsDir)
}

func (n *Node) serveTool(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithCancel(n.ctx)
	defer cancel()
	stop := context.AfterFunc(n.ctx, func() { _ = conn.Close() })
	defer stop()
	dec := json.NewDecoder(conn)
	var req toolRequest
	if dec.Decode(&req) != nil {
		return
	}
	var gone atomic.Bool
	n.toolsRunning.Add(1)
	go func() {
		watchClient(io.MultiReader(dec.Buffered(), conn), func() { cancel(); n.toolsTerminated.Add(1) }, &gone)
		n.toolsRunning.Add(-1)
	}()
	f := &frames{to: conn}
	code := n.RunOn(ctx, req.Node, req.Program, req.Args, Stdio{
		Out: frameWriter{f, 'o'}, Err: frameWriter{f, 'e'}, Gone: gone.Load,
	})
	f.send('x', []byte{byte(code)})
}

// watchClient waits for signals of the process, and for its end.
func watchClient(r io.Reader, terminate func(), gone *atomic.Bool) {
	b := make([]byte, 16)
	for {
		k, err := r.Read(b)
		for _, c := range b[:k] {
			if c == 'T' {
				terminate()
			}
		}
		if err != nil {
			gone.Store(true)
			return
		}
	}
}

type frames struct {
	mu sync.Mutex
	to io.Writer
}

func (f *frames) send(kind byte, data []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	head := append([]byte{kind}, binary.BigEndian.AppendUint32(nil, uint32(len(data)))...)
	_, _ = f.to.Write(append(head, data...))
}

type frameWriter struct {
	f    *frames
	kind byte
}

func (w frameWriter) Write(b []byte) (int, error) {
	w.f.send(w.kind, b)
	return len(b), nil
}
