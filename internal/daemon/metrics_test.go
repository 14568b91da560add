package daemon

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

// metrics returns the metrics as the API does.
func (h *home) metrics(t *testing.T) string {
	t.Helper()
	body, err := h.client.Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = body.Close() }()
	text, err := io.ReadAll(body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// series returns the names and labels of the series of AgentLab in a text.
func series(text string) (out []string) {
	for line := range strings.Lines(text) {
		if name, _, ok := strings.Cut(line, " "); ok && strings.HasPrefix(name, "agentlab_") {
			out = append(out, name)
		}
	}
	return out
}

// What happens to a sandbox and a job is in the metrics, the series stay the same,
// and no text of a user is in them.
func TestMetrics(t *testing.T) {
	const canary = "canary-7c1f2a"
	h := newHome(t)
	h.start(t)
	ctx := t.Context()
	before := h.metrics(t)
	if _, err := h.client.CreateSandbox(ctx, api.SandboxCreate{Name: canary + "-box"}); err != nil {
		t.Fatal(err)
	}
	h.await(t, canary+"-box", agentlab.SandboxReady)
	if _, err := h.client.DestroySandbox(ctx, canary+"-box"); err != nil {
		t.Fatal(err)
	}
	h.nothingRuns(t)
	j, err := h.client.CreateJob(ctx, api.JobCreate{Task: "echo " + canary, Agent: "shell"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.client.CancelJob(ctx, j.ID); err != nil {
		t.Fatal(err)
	}
	h.ended(t, j.ID)

	after := h.metrics(t)
	if strings.Contains(after, canary) || strings.Contains(after, j.ID) || strings.Contains(after, h.paths.Home) {
		t.Errorf("a text of a user is in the metrics:\n%s", after)
	}
	if a, b := series(before), series(after); len(a) < 100 || strings.Join(a, "\n") != strings.Join(b, "\n") {
		t.Errorf("%d series before and %d after", len(a), len(b))
	}
	for _, want := range []string{
		`agentlab_sandboxes_created_total [12]`,
		`agentlab_sandboxes\{state="DESTROYED"\} [12]`,
		`agentlab_sandbox_transitions_total\{state="READY"\} [12]`,
		`agentlab_sandbox_start_seconds_count\{path="cold"\} [12]`,
		`agentlab_jobs_created_total 1`,
		`agentlab_jobs\{status="CANCELLED"\} 1`,
		`agentlab_jobs_ended_total\{status="CANCELLED"\} 1`,
		`agentlab_store_write_seconds_count [1-9][0-9]*`,
		`agentlab_build_info\{backend="fake",version="[^"]+"\} 1`,
		`agentlab_metrics_read_failures_total 0`,
	} {
		if !regexp.MustCompile(`(?m)^` + want + `$`).MatchString(after) {
			t.Errorf("no line %s", want)
		}
	}
	if t.Failed() {
		t.Log(after)
	}
}

// The port for Prometheus answers with the token only, and the daemon does not
// start without one.
func TestMetricsPort(t *testing.T) {
	const token = "0123456789abcdef0123456789abcdef"
	h := newHome(t)
	file := filepath.Join(t.TempDir(), "token")
	h.configure(t, fmt.Sprintf("backend: fake\nmetrics: {listen: \"127.0.0.1:0\", token_file: %s}\n", file))
	for mode, code := range map[os.FileMode]agentlab.Code{0: agentlab.CodeInvalid, 0o644: agentlab.CodeDenied} {
		if mode != 0 {
			if err := os.WriteFile(file, []byte(token), mode); err != nil {
				t.Fatal(err)
			}
		}
		d, err := h.open(t)
		if d != nil || agentlab.CodeOf(err) != code || !strings.Contains(err.Error(), "config.yaml") || strings.Contains(err.Error(), token) {
			t.Fatalf("mode %o: %v", mode, err)
		}
		_ = os.Remove(file)
	}
	if err := os.WriteFile(file, []byte(token), 0o600); err != nil {
		t.Fatal(err)
	}
	d, err := h.open(t)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- d.Run(t.Context()) }()
	for auth, want := range map[string]int{"": 401, "Bearer " + token[1:]: 401, "Bearer " + token: 200} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+d.ScrapeAddr().String()+"/metrics", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", auth)
		resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err != nil || resp.StatusCode != want || (len(series(string(text))) > 0) != (want == 200) {
			t.Errorf("%q: %d %v", auth, resp.StatusCode, err)
		}
	}
	d.Stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if log, _ := os.ReadFile(h.paths.DaemonLog()); strings.Contains(string(log), token) {
		t.Error("the token is in the log")
	}
}
