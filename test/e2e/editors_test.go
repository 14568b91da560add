package e2e

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab/test/guard"
)

// checkEditors connects programs of this machine to a session with the configuration of
// 'agentlab ssh-config': scp, rsync, and the sequence with which VS Code starts its
// server and connects to it.
func (l *lab) checkEditors(session string) {
	l.Helper()
	home := l.TempDir()
	env := append(slices.Clone(l.env), "HOME="+home)
	tool := func(name string, args ...string) string {
		l.Helper()
		cmd := exec.Command(name, args...)
		cmd.Dir, cmd.Env = home, env
		out, err := cmd.CombinedOutput()
		if err != nil {
			l.Fatalf("%s %q: %v\n%s", name, args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	tool(filepath.Join(l.bin, "agentlab"), "ssh-config", "--install", "--yes")
	// ssh finds ~ in the password database, not in HOME.
	config := filepath.Join(home, ".ssh", "config")
	host := session + ".agentlab"
	if got := tool("ssh", "-F", config, host, "id -un; cd /workspace && git rev-parse --show-toplevel"); got != "agent\n/work/repo" {
		l.Errorf("ssh: %q", got)
	}

	const server = `import http.server
s = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
print("listeningOn=%d" % s.server_port, flush=True)
s.serve_forever()
`
	if err := os.WriteFile(filepath.Join(home, "server.py"), []byte(server), 0o600); err != nil {
		l.Fatal(err)
	}
	tool("ssh", "-F", config, host, "mkdir -p .vscode-server/bin/test")
	tool("scp", "-q", "-F", config, "server.py", host+":.vscode-server/bin/test/")
	tool("rsync", "-a", "-e", "ssh -F "+config, host+":/workspace/", "copy/")
	if _, err := os.Stat(filepath.Join(home, "copy", "greeting.txt")); err != nil {
		l.Errorf("rsync: %v", err)
	}

	// VS Code starts its server by a script on standard input, and reaches the port of
	// the server through the connection.
	port, err := guard.FreePort()
	if err != nil {
		l.Fatal(err)
	}
	start := exec.Command("ssh", "-F", config, "-T", "-D", strconv.Itoa(port), "-o", "ConnectTimeout=60", "-o", "ExitOnForwardFailure=yes", host, "bash")
	start.Env, start.Stderr = env, os.Stderr
	in, err1 := start.StdinPipe()
	out, err2 := start.StdoutPipe()
	if err1 != nil || err2 != nil || start.Start() != nil {
		l.Fatal("ssh was not started")
	}
	defer func() { _, _ = in.Close(), start.Wait() }()
	script := `echo "platform==$(uname -s)=="; cd ~/.vscode-server/bin/test && echo ready > index.html
nohup python3 server.py > log 2>&1 < /dev/null &
until grep -m1 listeningOn log; do :; done
`
	if _, err := io.WriteString(in, script); err != nil {
		l.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	listening := 0
	for listening == 0 && lines.Scan() {
		if p, ok := strings.CutPrefix(lines.Text(), "listeningOn="); ok {
			listening, _ = strconv.Atoi(p)
		}
	}
	if listening == 0 {
		l.Fatalf("the server did not start: %v", lines.Err())
	}
	if got := tool("curl", "-sS", "--noproxy", "", "--socks5-hostname", "127.0.0.1:"+strconv.Itoa(port), "http://127.0.0.1:"+strconv.Itoa(listening)+"/"); got != "ready" {
		l.Errorf("through the connection: %q", got)
	}
}
