package job_test

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// A sandbox that a job only prepared is READY, kept, and has every secret for
// its user, also after a restart.
func TestPreparedSandbox(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		secrets := map[string]string{
			"env.K": "value-of-k", "git.token": "value-of-token", "claude_settings_json": `{"a":1}`, "ssh_keys.example.com": "-PRIVATE KEY-----",
			"artifact.endpoint": "http://store.example.com", "artifact.token": "value-of-store",
		}
		for key, v := range secrets {
			if err := w.vault.Set(ctx, "team", key, strings.NewReader(v), false); err != nil {
				t.Fatal(err)
			}
		}
		given := make(chan guestapi.BootstrapResponse, 1)
		w.seize.Store(new(func(r guestapi.BootstrapResponse) { given <- r }))
		j := w.run(agentlab.JobRequest{Profile: "secrets", Agent: agentlab.AgentNone, Keepalive: new(false), Sandbox: &agentlab.SandboxRequest{Name: "box"}})
		j = w.final(j.ID)
		if j.Status != agentlab.JobCompleted {
			t.Fatalf("%s: %s", j.Status, j.Reason)
		}
		full := func(r guestapi.BootstrapResponse) bool {
			return r.Env["K"] == "value-of-k" && len(r.SSHKeys) == 1 && r.Git != nil && r.Git.Token == "value-of-token" && r.ClaudeSettingsJSON != ""
		}
		if r := <-given; !full(r) || r.Job == nil || r.Job.Agent != agentlab.AgentNone || !r.Job.Keepalive {
			t.Errorf("%+v", r)
		}
		w.eventually("released", func() bool { return w.sandbox(j.ID).State != agentlab.SandboxRunning })
		time.Sleep(20 * time.Minute)
		sb := w.sandbox(j.ID)
		if sb.State != agentlab.SandboxReady || sb.Name != "box" || !sb.Keepalive || sb.Image != "base@fake" {
			t.Errorf("%+v", sb)
		}
		got := w.fetch(sb.VMID, w.token(sb.VMID, time.Minute), sb.VMID)
		var r guestapi.BootstrapResponse
		if err := json.Unmarshal([]byte(got.body), &r); err != nil || got.status != http.StatusOK {
			t.Fatalf("%+v, %v", got, err)
		}
		if !full(r) || r.Job != nil || r.Runner.Token != "" || r.Artifact != nil || r.ArtifactStore != nil {
			t.Errorf("%+v", r)
		}
	})
}
