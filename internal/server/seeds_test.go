package server

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/sockpath"
)

// The calls that the specifications of the product name, with their bodies, reach their
// services.
func TestSpecifiedCalls(t *testing.T) {
	l := startAccess(t)
	root := Peer{}
	l.peer.Store(&root)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return sockpath.Dial(ctx, l.socket)
	}}}
	for _, c := range strings.Split(strings.TrimSpace(`
POST /v1/sandboxes {"name":"box","profile":"yolo-ephemeral","keepalive":false,"workspace":null}
POST /v1/sandboxes {"profile":"yolo-ephemeral","job":{"repo_url":"https://example.com/r.git","task":"t"}}
GET /v1/sandboxes
GET /v1/sandboxes/1
POST /v1/sandboxes/1/start
POST /v1/sandboxes/1/stop
POST /v1/sandboxes/1/destroy
POST /v1/sandboxes/1/lease/renew {"ttl_minutes":240}
POST /v1/workspaces {"name":"foo","size_gb":80,"storage":"local-zfs"}
POST /v1/workspaces/ws-aaaaaaaaaaaaa/attach {"vmid":1}
POST /v1/workspaces/ws-aaaaaaaaaaaaa/detach
POST /v1/workspaces/ws-aaaaaaaaaaaaa/rebind {"profile":"yolo-workspace"}
GET /v1/profiles
PUT /v1/profiles/mine name: mine
POST /v1/jobs {"repo_url":"https://example.com/r.git","ref":"main","profile":"yolo-ephemeral","task":"t","mode":"dangerous","ttl_minutes":120}
POST /v1/jobs {"repo_url":"https://example.com/r.git","ref":"main","profile":"yolo-workspace","task":"t","mode":"dangerous","ttl_minutes":120,"keepalive":false,"workspace":"workspace-alpha","workspace_create":{"name":"workspace-alpha","size_gb":80,"storage":"local-zfs"},"workspace_wait_seconds":600}
GET /v1/jobs/job-aaaaaaaaaaaaa
POST /v1/messages?job=job-aaaaaaaaaaaaa {"kind":"note","text":"hello"}
GET /v1/messages?scope_type=job&scope_id=job-aaaaaaaaaaaaa&after_id=1&limit=5
GET /v1/jobs/job-aaaaaaaaaaaaa/messages?after_id=1
GET /v1/workspaces/ws-aaaaaaaaaaaaa/messages
GET /v1/sessions/se-aaaaaaaaaaaaa/messages`), "\n") {
		method, rest, _ := strings.Cut(c, " ")
		path, body, _ := strings.Cut(rest, " ")
		if body == "" && method != http.MethodGet {
			body = "{}"
		}
		req, err := http.NewRequestWithContext(t.Context(), method, "http://localhost"+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		if req.Header.Set("Content-Type", "application/json"); method == http.MethodPut {
			req.Header.Set("Content-Type", "application/yaml")
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err != nil || resp.StatusCode >= 300 && !strings.Contains(string(text), "reached") {
			t.Errorf("%s: %d %s, %v", c, resp.StatusCode, text, err)
		}
	}
}
