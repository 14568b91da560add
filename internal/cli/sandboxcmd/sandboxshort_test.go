package sandboxcmd

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// A job may end, and its sandbox be destroyed, before the command that made
// both reads the sandbox: the job's outcome decides.
func TestSandboxOfAShortJob(t *testing.T) {
	for status, want := range map[agentlab.JobStatus]int{agentlab.JobCompleted: cli.ExitOK, agentlab.JobFailed: cli.ExitFailure} {
		const id = "job-aaaaaaaaaaaaa"
		sb := api.Sandbox{VMID: 1000, Name: "box", JobID: id, State: string(agentlab.SandboxRequested)}
		gone := sb
		gone.State = string(agentlab.SandboxDestroyed)
		mux := http.NewServeMux()
		answer := func(pattern string, v any) {
			mux.HandleFunc(pattern, func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(v) })
		}
		answer("POST /v1/sandboxes", sb)
		answer("GET /v1/sandboxes/1000", gone)
		answer("GET /v1/jobs/"+id, api.Job{ID: id, Status: string(status), SandboxVMID: sb.VMID})
		mux.HandleFunc("GET /v1/events", func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Query().Get("follow") == "" {
				_ = json.NewEncoder(w).Encode(api.List[api.Event]{})
				return
			}
			w.Header().Set("Content-Type", "text/event-stream")
			for i, kind := range []string{agentlab.EventSandboxState, agentlab.EventJobStatus} {
				_, _ = fmt.Fprintf(w, "id: %d\nevent: event\ndata: {\"id\":%d,\"kind\":%q,\"job_id\":%q,\"sandbox_vmid\":1000}\n\n", i+1, i+1, kind, id)
			}
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		})
		var out, errs bytes.Buffer
		a := &cli.App{Commands: Commands(), Stdin: strings.NewReader(""), Stdout: &out, Stderr: &errs, Now: time.Now}
		code := a.Run(t.Context(), []string{"--socket", worktest.ServeAPI(t, mux), "sandbox", "new", "--name", "box", "--agent", "shell", "--task", "true"})
		if code != want || !strings.Contains(out.String(), "DESTROYED") {
			t.Errorf("%s: exit code %d\n%s\n%s", status, code, out.String(), errs.String())
		}
	}
}
