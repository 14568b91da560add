package agentcmd

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/creack/pty"
)

// fakeZellij is a stand-in for Zellij, which cannot be installed on machines for
// development. It accepts the command lines that zellij-utils/src/cli.rs of Zellij 0.44
// and 0.45 accepts, of those that AgentLab uses, and nothing else. Its sessions run the
// programs of a layout on real terminals.
type fakeZellij struct{ dir string }

// fakeCommands are the accepted command lines. Each group is an argument.
var fakeCommands = []struct {
	pattern *regexp.Regexp
	run     func(z fakeZellij, m []string) error
}{
	{line(`list-sessions --no-formatting`), fakeZellij.list},
	{line(`delete-session (\S+)`), func(_ fakeZellij, m []string) error { return fmt.Errorf("Session: %q not found.", m[1]) }},
	{line(`kill-session (\S+)`), func(z fakeZellij, m []string) error { return z.ask(m[1], "kill") }},
	{line(`--layout (\S+) attach --create-background (\S+)`), fakeZellij.create},
	{line(`attach (\S+)`), fakeZellij.attach},
	{line(`--session (\S+) run --name (\S+) --close-on-exit -- (.+)`), func(z fakeZellij, m []string) error {
		return z.ask(m[1], append([]string{"run"}, strings.Fields(m[3])...)...)
	}},
	{line(`web --start --daemonize --ip 127\.0\.0\.1 --port (\d+)`), fakeZellij.startWeb},
	{line(`web --create-token`), fakeZellij.createToken},
	{line(`web --revoke-token (\S+)`), func(z fakeZellij, m []string) error { return os.Remove(filepath.Join(z.dir, "token_"+m[1])) }},
	{line(`fake-server (\S+) (\S+)`), fakeZellij.serve},
	{line(`fake-web (\d+)`), fakeZellij.serveWeb},
}

func line(pattern string) *regexp.Regexp { return regexp.MustCompile("^" + pattern + "$") }

func fakeZellijMain(args []string) int {
	z := fakeZellij{filepath.Join(os.Getenv("HOME"), "zj")}
	command := strings.Join(args, " ")
	err := errors.Join(os.MkdirAll(z.dir, 0o700), os.WriteFile(filepath.Join(z.dir, "last"), []byte(command), 0o600))
	if os.Getenv("SHELL") == "" || os.Getenv("ZELLIJ") != "" {
		err = errors.New("the environment is wrong")
	}
	for _, c := range fakeCommands {
		if m := c.pattern.FindStringSubmatch(command); m != nil && err == nil {
			if err = c.run(z, m); err == nil {
				return 0
			}
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	fmt.Fprintf(os.Stderr, "error: unexpected arguments: %s (%v)\n", command, err)
	return 2
}

func (z fakeZellij) socket(name string) string { return filepath.Join(z.dir, name+".s") }

func (z fakeZellij) list([]string) error {
	found, _ := filepath.Glob(z.socket("*"))
	n := 0
	for _, at := range found {
		if c, err := net.Dial("unix", at); err == nil {
			_ = c.Close()
			fmt.Printf("%s [Created 5s ago] \n", strings.TrimSuffix(filepath.Base(at), ".s"))
			n++
		}
	}
	if n == 0 {
		return errors.New("No active zellij sessions found.")
	}
	return nil
}

// ask sends words to the server of a session.
func (z fakeZellij) ask(name string, words ...string) error {
	c, err := net.Dial("unix", z.socket(name))
	if err != nil {
		return fmt.Errorf("No session named %q found.", name)
	}
	defer func() { _ = c.Close() }()
	if err := json.NewEncoder(c).Encode(words); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, c)
	return err
}

// background starts a further process of the fake, and waits for its first output.
func background(args ...string) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := &exec.Cmd{Path: exe, Args: append([]string{"zellij"}, args...)}
	out, err := cmd.StdoutPipe()
	if cmd.Stderr = cmd.Stdout; err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return err
	}
	if first, err := bufio.NewReader(out).ReadString('\n'); first != "started\n" {
		return fmt.Errorf("the server did not start: %q, %w", first, err)
	}
	return nil
}

func (z fakeZellij) create(m []string) error {
	if c, err := net.Dial("unix", z.socket(m[2])); err == nil {
		_ = c.Close()
		return errors.New("Session already exists")
	}
	return background("fake-server", m[2], m[1])
}

func (z fakeZellij) attach(m []string) error {
	c, err := net.Dial("unix", z.socket(m[1]))
	if err != nil {
		return err
	}
	if err := json.NewEncoder(c).Encode([]string{"attach"}); err != nil {
		return err
	}
	fmt.Print("\x1b[?1049h\x1b[?2026h")
	go func() { // also where SIGHUP is ignored
		_, _ = io.Copy(c, os.Stdin)
		_ = c.Close()
	}()
	_, err = io.Copy(os.Stdout, c)
	return err
}

// fakeServer runs the panes of a session.
type fakeServer struct {
	mu    sync.Mutex
	panes []*os.File
	shown []byte // by all panes
	conns []net.Conn
}

func (z fakeZellij) serve(m []string) error {
	text, err := os.ReadFile(m[2])
	if err != nil {
		return err
	}
	commands, err := checkLayout(string(text))
	if err != nil {
		return fmt.Errorf("layout: %w", err)
	}
	_ = os.Remove(z.socket(m[1]))
	l, err := net.Listen("unix", z.socket(m[1]))
	if err != nil {
		return err
	}
	s := &fakeServer{}
	for _, c := range commands {
		if err := s.start(c, l); err != nil {
			return err
		}
	}
	fmt.Println("started")
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return err
		}
		go s.answer(c, l)
	}
}

// start runs a command in a new pane. The session ends with its last one.
func (s *fakeServer) start(argv []string, l net.Listener) error {
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, "ZELLIJ") })
	f, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 50, Cols: 200})
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.panes = append(s.panes, f)
	s.mu.Unlock()
	go func() {
		buf := make([]byte, 4096)
		for {
			n, err := f.Read(buf)
			s.mu.Lock()
			s.shown = append(s.shown, buf[:n]...)
			for _, c := range s.conns {
				_, _ = c.Write(buf[:n])
			}
			if err != nil {
				s.panes = slices.DeleteFunc(s.panes, func(o *os.File) bool { return o == f })
				if len(s.panes) == 0 {
					_ = l.Close()
				}
				s.mu.Unlock()
				_ = cmd.Wait()
				return
			}
			s.mu.Unlock()
		}
	}()
	return nil
}

func (s *fakeServer) answer(c net.Conn, l net.Listener) {
	in := bufio.NewReader(c)
	request, err := in.ReadBytes('\n')
	var words []string
	if err != nil || json.Unmarshal(request, &words) != nil {
		return
	}
	switch words[0] {
	case "kill":
		s.mu.Lock()
		for _, f := range s.panes {
			_ = f.Close()
		}
		s.mu.Unlock()
		_ = l.Close()
	case "run":
		_ = s.start(words[1:], l)
	case "attach":
		s.mu.Lock()
		_, _ = c.Write(s.shown)
		s.conns = append(s.conns, c)
		first := s.panes[0]
		s.mu.Unlock()
		_, _ = io.Copy(first, in)
	}
	_ = c.Close()
}

func (z fakeZellij) startWeb(m []string) error { return background("fake-web", m[1]) }

func (z fakeZellij) serveWeb(m []string) error {
	l, err := net.Listen("tcp4", "127.0.0.1:"+m[1])
	if err != nil {
		return err
	}
	pid := filepath.Join(z.dir, "web.pid")
	if err := os.WriteFile(pid, fmt.Append(nil, os.Getpid()), 0o600); err != nil {
		return err
	}
	fmt.Println("started")
	return http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/info/version" {
			_, _ = io.WriteString(w, "0.45.0")
		}
	}))
}

func (z fakeZellij) createToken([]string) error {
	list, _ := filepath.Glob(filepath.Join(z.dir, "token_*"))
	name := fmt.Sprintf("token_%d", len(list)+1)
	fmt.Printf("Created token successfully\n\n%s: 5f0c1e0e-0000-4000-8000-00000000000%d\n", name, len(list))
	return os.WriteFile(filepath.Join(z.dir, "token_"+name), nil, 0o600)
}

// kdlNode is a node of a KDL document.
type kdlNode struct {
	name     string
	args     []string
	props    map[string]string
	children []kdlNode
}

var kdlToken = regexp.MustCompile(`^(?:[ \t]+|[a-z_]+=?|[0-9]+|"(?:[^"\\]|\\["\\]|\\u\{[0-9a-f]{1,6}\})*"|[{}\n])`)

// parseKDL parses the part of KDL 1.0 that layouts use.
func parseKDL(text string) (nodes []kdlNode, err error) {
	var tokens []string
	for text != "" {
		t := kdlToken.FindString(text)
		if t == "" {
			return nil, fmt.Errorf("syntax error at %.20q", text)
		}
		if text = text[len(t):]; strings.Trim(t, " \t") != "" {
			tokens = append(tokens, t)
		}
	}
	nodes, rest, err := kdlNodes(tokens)
	if err == nil && len(rest) > 0 {
		err = fmt.Errorf("unexpected %q", rest[0])
	}
	return nodes, err
}

func kdlNodes(t []string) (nodes []kdlNode, rest []string, err error) {
	for len(t) > 0 && t[0] != "}" {
		if t[0] == "\n" {
			t = t[1:]
			continue
		}
		n := kdlNode{name: t[0], props: map[string]string{}}
		for t = t[1:]; len(t) > 0 && t[0] != "\n" && t[0] != "{" && t[0] != "}"; t = t[1:] {
			if key, ok := strings.CutSuffix(t[0], "="); ok && len(t) > 1 {
				n.props[key] = strings.Trim(t[1], `"`)
				t = t[1:]
				continue
			}
			n.args = append(n.args, strings.Trim(t[0], `"`))
		}
		if len(t) > 0 && t[0] == "{" {
			if n.children, t, err = kdlNodes(t[1:]); err != nil || len(t) == 0 {
				return nil, nil, errors.Join(err, errors.New("a brace is missing"))
			}
			t = t[1:]
		}
		nodes = append(nodes, n)
	}
	return nodes, t, nil
}

// layoutWords are the words of layouts, from zellij-utils/src/kdl/kdl_layout_parser.rs and kdl/mod.rs,
// with their properties.
var layoutWords = map[string][]string{
	"layout": {}, "default_tab_template": {}, "children": {}, "args": {}, "plugin": {"location"}, "tab": {"name", "focus"},
	"pane":           {"name", "focus", "size", "borderless", "stacked", "expanded", "close_on_exit", "command"},
	"on_force_close": {}, "session_serialization": {}, "web_sharing": {},
}

// checkLayout checks a layout, and returns the commands of its panes.
func checkLayout(text string) (commands [][]string, err error) {
	nodes, err := parseKDL(text)
	if err != nil {
		return nil, err
	}
	if len(nodes) != 4 || nodes[0].name != "layout" {
		return nil, errors.New("the nodes are not a layout and its options")
	}
	for i, want := range []string{`on_force_close [detach]`, `session_serialization [false]`, `web_sharing [on]`} {
		if got := fmt.Sprintf("%s %v", nodes[i+1].name, nodes[i+1].args); got != want {
			return nil, fmt.Errorf("option %s", got)
		}
	}
	var walk func(n kdlNode, stacked bool) error
	walk = func(n kdlNode, stacked bool) error {
		words, known := layoutWords[n.name]
		for key := range n.props {
			known = known && slices.Contains(words, key)
		}
		if !known || n.props["expanded"] != "" && !stacked || n.name == "args" && len(n.args) == 0 {
			return fmt.Errorf("node %+v", n)
		}
		isBar := len(n.children) == 1 && n.children[0].name == "plugin"
		if n.name == "pane" && n.props["stacked"] == "" && !isBar {
			c := []string{os.Getenv("SHELL")}
			if program := n.props["command"]; program != "" {
				c = append([]string{program}, n.children[0].args...)
			}
			commands = append(commands, c)
		}
		for _, child := range n.children {
			if err := walk(child, n.props["stacked"] == "true"); err != nil {
				return err
			}
		}
		return nil
	}
	return commands, walk(nodes[0], false)
}
