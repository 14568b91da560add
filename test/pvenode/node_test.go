package pvenode

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/test/guard"
)

// rest is a plain client of the REST face.
type rest struct {
	t      *testing.T
	n      *Node
	client *http.Client
	token  string
}

func newRest(t *testing.T, n *Node) *rest {
	t.Helper()
	pool := x509.NewCertPool()
	pem, err := os.ReadFile(n.CAFile())
	if err != nil || !pool.AppendCertsFromPEM(pem) {
		t.Fatalf("CA file: %v", err)
	}
	id, secret := n.RootToken()
	return &rest{t: t, n: n, token: id + "=" + secret, client: &http.Client{
		Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}},
	}}
}

// call returns status line and body.
func (r *rest) call(method, path string, params ...string) (string, map[string]any) {
	r.t.Helper()
	form := url.Values{}
	for i := 0; i+1 < len(params); i += 2 {
		form.Add(params[i], params[i+1])
	}
	target := r.n.URL() + "/api2/json" + path
	var body io.Reader
	if method == "GET" || method == "DELETE" {
		if len(form) > 0 {
			target += "?" + form.Encode()
		}
	} else {
		body = bytes.NewReader([]byte(form.Encode()))
	}
	req, err := http.NewRequestWithContext(context.Background(), method, target, body)
	if err != nil {
		r.t.Fatal(err)
	}
	req.Header.Set("Authorization", "PVEAPIToken="+r.token)
	if body != nil {
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	resp, err := r.client.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	var out map[string]any
	_ = json.Unmarshal(b, &out)
	return resp.Status, out
}

// task makes a call that begins a task and waits for its end.
func (r *rest) task(method, path string, params ...string) string {
	r.t.Helper()
	status, out := r.call(method, path, params...)
	upid, _ := out["data"].(string)
	if !strings.HasPrefix(upid, "UPID:") {
		r.t.Fatalf("%s %s: %s %v", method, path, status, out)
	}
	return r.wait(upid)
}

func (r *rest) wait(upid string) string {
	r.t.Helper()
	r.n.mu.Lock()
	task := r.n.tasks.byID[upid]
	r.n.mu.Unlock()
	select {
	case <-task.done:
	case <-time.After(guard.Patience):
		r.t.Fatalf("%s does not end", upid)
	}
	_, out := r.call("GET", "/nodes/pve/tasks/"+url.PathEscape(upid)+"/status")
	data, _ := out["data"].(map[string]any)
	s, _ := data["exitstatus"].(string)
	return s
}

func TestLifeOfAVM(t *testing.T) {
	for _, version := range []string{"8.4", "9.2"} {
		for _, kind := range []StorageType{ZFSPool, Dir, LVMThin} {
			t.Run(version+" "+string(kind), func(t *testing.T) {
				n := New(t, Config{Version: version, Storages: []Storage{{ID: "st", Type: kind}, {ID: "local", Type: Dir}}})
				n.AddTemplate(t, Template{Storage: "st"})
				lifeOfAVM(t, n)
			})
		}
	}
}

func lifeOfAVM(t *testing.T, n *Node) {
	r := newRest(t, n)
	vm := "/nodes/pve/qemu/101"
	for _, step := range []struct {
		method, path string
		params       []string
	}{
		{"POST", "/nodes/pve/qemu/9000/clone", []string{"newid", "101", "name", "sb", "description", "a\nb"}},
		{"POST", vm + "/config", []string{"cores", "2", "tags", "b;A", "net0", "virtio=BC:24:11:00:00:02,bridge=vmbr1"}},
		{"POST", vm + "/status/start", nil}, {"POST", vm + "/status/shutdown", nil}, {"POST", vm + "/status/start", nil},
		{"POST", vm + "/status/stop", nil}, {"DELETE", vm, []string{"purge", "1"}},
	} {
		if got := r.task(step.method, step.path, step.params...); got != "OK" {
			t.Fatalf("%s %s: %q", step.method, step.path, got)
		}
		if step.path == vm+"/config" {
			_, out := r.call("GET", vm+"/config")
			data, _ := out["data"].(map[string]any)
			if data["cores"] != 2.0 || data["tags"] != "a;b" || data["description"] != "a\nb" || data["net0"] != "virtio=BC:24:11:00:00:02,bridge=vmbr1" {
				t.Fatalf("config: %v", data)
			}
		}
	}
	if got := n.Volumes(101); len(got) != 0 {
		t.Fatalf("left: %v", got)
	}
	if len(n.VMs()) != 1 || len(n.Volumes(9000)) != 2 {
		t.Fatalf("template: %v %v", n.VMs(), n.Volumes(9000))
	}
}
