package fake

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab/internal/stream"
)

// process is one simulated process.
type process struct {
	g           *guest
	ctx         context.Context // its cause is a signal if one killed it
	cancel      context.CancelCauseFunc
	stdin       *inbox
	out, errOut io.Writer
	env         map[string]string
}

// signalled is the cause of a process's end.
type signalled string

// Error returns the signal's name.
func (s signalled) Error() string { return "killed by " + string(s) }

// signals lists the signals that end a simulated process, with their numbers.
var signals = map[string]int{"HUP": 1, "INT": 2, "QUIT": 3, "KILL": 9, "PIPE": 13, "TERM": 15}

func (g *guest) newProcess(out, errOut io.Writer, env map[string]string) *process {
	ctx, cancel := context.WithCancelCause(g.ctx)
	p := &process{g: g, ctx: ctx, cancel: cancel, stdin: newInbox(), out: out, errOut: errOut, env: maps.Clone(env)}
	if p.env == nil {
		p.env = map[string]string{}
	}
	context.AfterFunc(ctx, p.stdin.end)
	return p
}

// feed passes frames to the process until the connection ends, and then ends
// the process.
func (p *process) feed(frames *stream.Reader) {
	for {
		t, data, err := frames.Next()
		if err != nil {
			p.cancel(signalled("HUP"))
			return
		}
		p.frame(t, data)
	}
}

func (p *process) frame(t stream.Type, data []byte) {
	switch t {
	case stream.Stdin:
		p.stdin.put(data)
	case stream.StdinEOF:
		p.stdin.end()
	case stream.Signal:
		if _, ok := signals[string(data)]; ok {
			p.cancel(signalled(data))
		}
	default:
	}
}

// run runs a command to its end.
func (p *process) run(argv []string) stream.ExitStatus {
	code := 0
	if len(argv) == 0 {
		code = p.shell()
	} else {
		code = p.command(argv)
	}
	if sig := signalled(""); errors.As(context.Cause(p.ctx), &sig) {
		return stream.ExitStatus{Code: 128 + signals[string(sig)], Signal: string(sig)}
	}
	if code == 127 {
		return stream.ExitStatus{Code: 127, Error: "no such program in a fake guest"}
	}
	return stream.ExitStatus{Code: code}
}

// command runs one program.
func (p *process) command(argv []string) int {
	if argv[0] == "agentlab-agent" && len(argv) > 1 && (argv[1] == "files" || argv[1] == "workspace") {
		return p.agentFiles(argv[1:])
	}
	if program := p.g.in.h.cfg.Programs[argv[0]]; program != nil {
		uid := ""
		p.g.in.h.volumeFiles(p.g.in.rec.Spec.UID, func(v *volume) { uid = v.UID })
		return program(uid, argv[1:], p.stdin, p.out, p.errOut)
	}
	switch argv[0] {
	case "true", ":":
		return 0
	case "false":
		return 1
	case "echo":
		fmt.Fprintln(p.out, strings.Join(argv[1:], " "))
		return 0
	case "sync":
		return 0
	case "cat":
		if len(argv) > 1 {
			return p.readFiles(argv[1:])
		}
		if _, err := io.Copy(p.out, p.stdin); err != nil {
			return 1
		}
		return 0
	case "rm":
		for _, path := range argv[1:] {
			p.files(path, func(disk map[string]string) { delete(disk, path) })
		}
		return 0
	case "env":
		for _, k := range slices.Sorted(maps.Keys(p.env)) {
			fmt.Fprintf(p.out, "%s=%s\n", k, p.env[k])
		}
		return 0
	case "hostname":
		mem, _ := p.g.in.memory(p.g)
		fmt.Fprintln(p.out, mem.Hostname)
		return 0
	case "sleep":
		return p.sleep(argv[1:])
	case "volume":
		return p.volume(argv[1:])
	case "listen":
		return p.g.listen(argv[1:])
	case "egress":
		return p.g.egress(argv[1:])
	case "agent-runner":
		return p.probe(argv[1:])
	case "exit":
		return exitCode(argv[1:])
	case "curl":
		return p.curl(argv[len(argv)-1])
	case "sh", "bash":
		if len(argv) == 3 && strings.HasSuffix(argv[1], "c") {
			return p.script(argv[2])
		}
		if len(argv) == 1 {
			return p.shell()
		}
	}
	fmt.Fprintf(p.errOut, "%s: not found\n", argv[0])
	return 127
}

// curl fetches a URL of the controller.
func (p *process) curl(url string) int {
	ctx, cancel := context.WithTimeout(p.ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 3
	}
	resp, err := p.g.httpClient().Do(req)
	if err != nil {
		return 7
	}
	defer resp.Body.Close()
	if _, err := io.Copy(p.out, resp.Body); err != nil {
		return 18
	}
	return 0
}

func exitCode(args []string) int {
	if len(args) == 0 {
		return 0
	}
	n, err := strconv.Atoi(args[0])
	if err != nil {
		return 2
	}
	return n & 0xff
}

func (p *process) sleep(args []string) int {
	seconds := 0.0
	if len(args) == 1 {
		s, err := strconv.ParseFloat(args[0], 64)
		if err != nil {
			return 1
		}
		seconds = s
	}
	if sleep(p.ctx, time.Duration(seconds*float64(time.Second))) != nil {
		return 1
	}
	return 0
}

// script runs commands separated by ";" until one is exit.
func (p *process) script(text string) (code int) {
	for part := range strings.SplitSeq(text, ";") {
		argv := strings.Fields(part)
		if len(argv) == 0 {
			continue
		}
		if p.ctx.Err() != nil {
			return 1
		}
		if toErr := argv[len(argv)-1] == ">&2"; toErr && argv[0] == "echo" {
			fmt.Fprintln(p.errOut, strings.Join(argv[1:len(argv)-1], " "))
			code = 0
			continue
		}
		if n := len(argv); n > 2 && argv[n-2] == ">" {
			code = p.writeFile(argv[n-1], argv[:n-2])
			continue
		}
		code = p.command(argv)
		if argv[0] == "exit" {
			break
		}
	}
	return code
}

// writeFile runs a command and writes its output to a file of the guest's disk.
func (p *process) writeFile(path string, argv []string) int {
	if strings.HasPrefix(path, volumePath) && p.g.isFrozen() {
		fmt.Fprintf(p.errOut, "sh: %s: the workspace is frozen\n", path)
		return 1
	}
	var text bytes.Buffer
	out := p.out
	p.out = &text
	code := p.command(argv)
	p.out = out
	p.files(path, func(disk map[string]string) { disk[path] = text.String() })
	return code
}

// readFiles prints files of the guest's disk.
func (p *process) readFiles(paths []string) (code int) {
	for _, path := range paths {
		var text string
		var ok bool
		p.files(path, func(disk map[string]string) { text, ok = disk[path] })
		if !ok {
			fmt.Fprintf(p.errOut, "cat: %s: No such file or directory\n", path)
			code = 1
			continue
		}
		_, _ = io.WriteString(p.out, text)
	}
	return code
}

// shell runs the lines that it reads.
func (p *process) shell() (code int) {
	lines := bufio.NewScanner(p.stdin)
	for lines.Scan() {
		line := strings.TrimSpace(lines.Text())
		if line != "" {
			code = p.script(line)
		}
		if line == "exit" || strings.HasPrefix(line, "exit ") {
			break
		}
	}
	return code
}

// inbox is the standard input of a process: a write never blocks, because a
// process that does not read must still get its signals.
type inbox struct {
	mu    sync.Mutex
	cond  *sync.Cond
	buf   bytes.Buffer
	ended bool
}

// maxInbox limits the buffered input of a process, in bytes; more is dropped.
const maxInbox = 4 << 20

func newInbox() *inbox {
	b := &inbox{}
	b.cond = sync.NewCond(&b.mu)
	return b
}

func (b *inbox) put(p []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.ended && b.buf.Len()+len(p) <= maxInbox {
		b.buf.Write(p)
		b.cond.Broadcast()
	}
}

func (b *inbox) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ended = true
	b.cond.Broadcast()
}

// Read waits for input.
func (b *inbox) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for b.buf.Len() == 0 {
		if b.ended {
			return 0, io.EOF
		}
		b.cond.Wait()
	}
	return b.buf.Read(p)
}

// session is a named shell that stays when its clients disconnect.
type session struct {
	p *process

	mu     sync.Mutex
	recent []byte
	joined map[*stream.Writer]struct{}
	ended  chan struct{}
	exit   stream.ExitStatus
}

// maxRecent limits the recent output that a new client gets first, in bytes.
const maxRecent = 16 << 10

func (g *guest) session(name string) *session {
	g.mu.Lock()
	defer g.mu.Unlock()
	if s := g.sessions[name]; s != nil {
		return s
	}
	s := &session{joined: map[*stream.Writer]struct{}{}, ended: make(chan struct{})}
	s.p = g.newProcess(s, s, nil)
	if g.sessions == nil {
		g.sessions = map[string]*session{}
	}
	g.sessions[name] = s
	g.in.h.spawn(func() {
		s.exit = s.p.run(nil)
		s.p.cancel(nil)
		g.mu.Lock()
		delete(g.sessions, name)
		g.mu.Unlock()
		close(s.ended)
	})
	return s
}

// Write sends output to all clients.
func (s *session) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recent = append(s.recent, p...)
	if over := len(s.recent) - maxRecent; over > 0 {
		s.recent = append([]byte(nil), s.recent[over:]...)
	}
	for w := range s.joined {
		if w.Frame(stream.Stdout, p) != nil {
			delete(s.joined, w)
		}
	}
	return len(p), nil
}

// join serves one client until it or the session ends.
func (s *session) join(w *stream.Writer, frames *stream.Reader) {
	s.mu.Lock()
	if len(s.recent) > 0 {
		_ = w.Frame(stream.Stdout, s.recent)
	}
	s.joined[w] = struct{}{}
	s.mu.Unlock()
	left := make(chan struct{})
	s.p.g.in.h.spawn(func() {
		defer close(left)
		for {
			t, data, err := frames.Next()
			if err != nil {
				return
			}
			if t != stream.StdinEOF { // the shell stays when its clients disconnect
				s.p.frame(t, data)
			}
		}
	})
	select {
	case <-left:
	case <-s.p.g.ctx.Done():
	case <-s.ended:
		_ = w.JSON(stream.Exit, s.exit)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.joined, w)
}
