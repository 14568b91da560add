package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/agentlab-vm/agentlab/test/mcpclient"
)

// A client of MCP runs a job on a repository and uses a sandbox, with nothing but tools.
func TestMCP(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	repo := sampleRepo(t)
	ctx, cancel := context.WithTimeout(context.Background(), commandLimit)
	defer cancel()
	server := exec.Command(filepath.Join(l.bin, "agentlab"), "mcp")
	server.Dir, server.Env = repo, l.env
	s, err := mcpclient.Start(ctx, server, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	call := func(tool string, args map[string]any) (object map[string]any, text string) {
		t.Helper()
		line, err := json.Marshal(args)
		if err != nil {
			t.Fatal(err)
		}
		var r *mcp.CallToolResult
		if r, err = s.Call(ctx, tool, string(line)); err != nil || r.IsError {
			t.Fatalf("%s %s: %v, %+v", tool, line, err, r)
		}
		object, _ = r.StructuredContent.(map[string]any)
		return object, mcpclient.Text(r)
	}
	job, _ := call("job_run", map[string]any{"repo": ".", "agent": "shell", "task": "git commit -q --allow-empty -m done; git config core.fsync; echo unsaved > new"})
	id := fmt.Sprint(job["job_id"])
	for job["status"] == "QUEUED" || job["status"] == "RUNNING" {
		job, _ = call("job_wait", map[string]any{"job": id, "timeout": "5s"})
	}
	if job["status"] != "COMPLETED" {
		t.Fatalf("%v", job)
	}
	if _, log := call("job_logs", map[string]any{"job": id}); log != "all\n" {
		t.Errorf("log %q", log)
	}
	call("job_fetch", map[string]any{"job": id})
	if got, err := exec.Command("git", "-C", repo, "log", "-1", "--format=%s", "refs/agentlab/"+id).Output(); err != nil || string(got) != "done\n" {
		t.Errorf("%q, %v", got, err)
	}
	if _, diff := call("job_diff", map[string]any{"job": id}); !strings.Contains(diff, "\n+unsaved\n") {
		t.Errorf("diff %q", diff)
	}
	call("sandbox_new", map[string]any{"name": "play"})
	got, _ := call("exec", map[string]any{"sandbox": "play", "command": `printf '\033[31mred\033[0m'; echo err >&2; exit 7`})
	if got["exit_code"] != 7.0 || got["stdout"] != "red" || got["stderr"] != "err\n" {
		t.Errorf("%v", got)
	}
	call("sandbox_destroy", map[string]any{"sandbox": "play"})
	l.noSandboxes()
}
