package pvenode

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/test/guard"
)

// raw sends bytes over TLS and returns the status line and the rest.
func raw(t *testing.T, n *Node, request string) (status, rest string) {
	t.Helper()
	conn, err := tls.Dial("tcp", n.Addr(), &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(guard.Patience))
	if _, err := io.WriteString(conn, request); err != nil {
		t.Fatal(err)
	}
	br := bufio.NewReader(conn)
	status, err = br.ReadString('\n')
	if err != nil {
		return "", ""
	}
	var body strings.Builder
	for {
		line, err := br.ReadString('\n')
		body.WriteString(line)
		if err != nil {
			break
		}
	}
	return strings.TrimSpace(strings.TrimPrefix(status, "HTTP/1.1 ")), body.String()
}

func TestShapeOfRequests(t *testing.T) {
	n := New(t, Config{Waits: Waits{Unauthorized: time.Millisecond}})
	n.AddTemplate(t, Template{})
	id, secret := n.RootToken()
	auth := "Authorization: PVEAPIToken=" + id + "=" + secret + "\r\n"
	form := "Content-Type: application/x-www-form-urlencoded\r\n"
	const config = "/api2/json/nodes/pve/qemu/9000/config"
	for _, c := range []struct{ name, request, want, body string }{
		{"no header", "GET /api2/json/version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", "401 No ticket", ""},
		{"bearer", "GET /api2/json/version HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer x\r\n\r\n", "401 No ticket", ""},
		{"wrong secret", "GET /api2/json/version HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: PVEAPIToken=" + id + "=no\r\n\r\n", "401 Authentication failed!", ""},
		{"no formatter", "GET /api2/version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + auth + "\r\n", "501 no formatter for uri /, version", ""},
		{"unknown path", "GET /api2/json/nosuch HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + auth + "\r\n", "501 Method 'GET /nosuch' not implemented", `"message":"Method 'GET /nosuch' not implemented"`},
		{"delete with a body", "DELETE /api2/json/nodes/pve/qemu/1 HTTP/1.1\r\nHost: x\r\n" + auth + form + "Content-Length: 7\r\n\r\npurge=1", "501 Unexpected content for method 'DELETE'", ""},
		{"chunked", "PUT " + config + " HTTP/1.1\r\nHost: x\r\n" + auth + form + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "501 chunked transfer encoding not supported", ""},
		{"other type", "PUT " + config + " HTTP/1.1\r\nHost: x\r\n" + auth + "Content-Type: text/plain\r\nContent-Length: 1\r\n\r\nx", "506 upload 'Content-Type 'text/plain' not implemented", ""},
		{"json", "PUT " + config + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + auth + "Content-Type: application/json\r\nContent-Length: 15\r\n\r\n{\"onboot\":true}", "200 OK", `{"data":null}`},
		{"blank for =", "GET /api2/json/version HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: PVEAPIToken " + id + "=" + secret + "\r\n\r\n", "200 OK", `"release":"8.4"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			status, body := raw(t, n, c.request)
			if status != c.want || !strings.Contains(body, c.body) {
				t.Fatalf("got %q %s", status, body)
			}
			if strings.HasPrefix(status, "401") && strings.Contains(body, "{") {
				t.Fatalf("a body: %s", body)
			}
			if !strings.HasPrefix(status, "200") && !strings.Contains(body, "Connection: close") {
				t.Fatalf("the connection is kept: %s", body)
			}
		})
	}
}

func TestBooleansOfForms(t *testing.T) {
	n := New(t, Config{})
	n.AddTemplate(t, Template{})
	r := newRest(t, n)
	for value, want := range map[string]string{"1": "200", "0": "200", "yes": "400", "no": "400", "true": "400", "on": "400", "True": "400"} {
		if status, _ := r.call("PUT", "/nodes/pve/qemu/9000/config", "onboot", value); !strings.HasPrefix(status, want) {
			t.Errorf("onboot=%s: %s", value, status)
		}
	}
}

// A real node answers 401 after three seconds.
func TestUnauthorizedIsDelayed(t *testing.T) {
	n := New(t, Config{})
	began := time.Now()
	if status, _ := raw(t, n, "GET /api2/json/version HTTP/1.1\r\nHost: x\r\n\r\n"); status != "401 No ticket" {
		t.Fatal(status)
	}
	if d := time.Since(began); d < 3*time.Second {
		t.Fatalf("after %v", d)
	}
}

func TestProxyTimeoutWhileTaskContinues(t *testing.T) {
	n := New(t, Config{Waits: Waits{Proxy: 100 * time.Millisecond}})
	n.AddTemplate(t, Template{})
	r := newRest(t, n)
	release := make(chan struct{})
	n.Fail("alloc", Fault{Hold: release})
	status, _ := r.call("PUT", "/nodes/pve/qemu/9000/config", "scsi6", "local-zfs:1")
	if status != "596 Connection timed out" {
		t.Fatal(status)
	}
	close(release)
	r.until("the disk is there", func() bool { return n.Config(9000)["scsi6"] == "local-zfs:vm-9000-disk-1,size=1G" })
}

// until waits for a condition of the model.
func (r *rest) until(what string, ok func() bool) {
	r.t.Helper()
	deadline := time.NewTimer(guard.Patience)
	defer deadline.Stop()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline.C:
			r.t.Fatalf("never: %s", what)
		}
	}
}

func TestLostAnswers(t *testing.T) {
	n := New(t, Config{})
	n.AddTemplate(t, Template{})
	r := newRest(t, n)
	const set = "PUT /nodes/{node}/qemu/{vmid}/config"
	for _, c := range []struct {
		point string
		want  string
	}{{set, ""}, {set + " done", "2"}} {
		n.Edit(9000, map[string]string{"cores": ""})
		n.Fail(c.point, Fault{Lost: true, VMID: 9000})
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, n.URL()+"/api2/json/nodes/pve/qemu/9000/config", strings.NewReader("cores=2"))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "PVEAPIToken="+r.token)
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		if resp, err := r.client.Do(req); err == nil {
			_ = resp.Body.Close()
			t.Fatalf("%s: an answer: %s", c.point, resp.Status)
		}
		if got := n.Config(9000)["cores"]; got != c.want {
			t.Fatalf("%s: cores %q", c.point, got)
		}
	}
}

func TestUnknownIsRefused(t *testing.T) {
	n := New(t, Config{Waits: Waits{Unauthorized: time.Millisecond}})
	n.AddTemplate(t, Template{})
	r := newRest(t, n)
	for _, c := range []struct{ method, path, param, value, status, fault string }{
		{"POST", "/nodes/pve/qemu/9000/clone", "bogus", "1", "400", "property is not defined in schema"},
		{"POST", "/nodes/pve/qemu/9000/clone", "", "", "400", "property is missing and it is not optional"},
		{"PUT", "/nodes/pve/qemu/9000/config", "net99", "virtio", "400", "property is not defined"},
		{"PUT", "/nodes/pve/qemu/9000/config", "net0", "virtio,bridge=vmbr1,colour=red", "400", "invalid key in comma-separated list property: colour"},
		{"PUT", "/nodes/pve/qemu/9000/config", "scsi1", "local-zfs:1,colour=red", "400", "invalid key in comma-separated list property: colour"},
		{"GET", "/nodes/pve/qemu/abc/config", "", "", "400", "type check ('integer') failed - got 'abc'"},
		{"POST", "/nodes/pve/qemu", "name", "x", "400", "vmid:property is missing and it is not optional"},
		{"PUT", "/nodes/pve/qemu/9000/config", "boot", "order=scsi0;nosuch", "400", "invalid boot device 'nosuch'"},
		{"PUT", "/nodes/pve/qemu/9000/config", "parent", "s1", "400", "property is not defined"},
		{"GET", "/nodes/pve/tasks/garbage/status", "", "", "400", "unable to parse worker upid"},
		{"POST", "/version", "", "", "501", "Method 'POST /version' not implemented"},
		{"GET", "/nodes/other/qemu", "", "", "500", "hostname lookup 'other' failed"},
		{"POST", "/nodes/pve/qemu/9000/status/unlock", "", "", "501", "not implemented"},
		{"POST", "/nodes/pve/qemu/9000/agent/reboot", "", "", "501", "not implemented"},
	} {
		var params []string
		if c.param != "" {
			params = []string{c.param, c.value}
		}
		status, out := r.call(c.method, c.path, params...)
		if !strings.HasPrefix(status, c.status) || !strings.Contains(fmt.Sprint(out), c.fault) {
			t.Errorf("%s %s %s: %s %v", c.method, c.path, c.param, status, out)
		}
	}
}
