package pve_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/test/guard"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// The traps of Proxmox VE that a client falls into, by their number in the
// list of its facts. Each test says what would go wrong without what this
// package does about it.

// bench is a fake node with a template 9000, and a root token's client.
type bench struct {
	*pvenode.Node
	t  *testing.T
	ca []byte

	id, secret string // of root's token

	c *pve.Client
}

var quickPoll = pve.Poll{First: 2 * time.Millisecond, Max: 20 * time.Millisecond}

func newBench(t *testing.T, cfg pvenode.Config) *bench {
	n := pvenode.New(t, cfg)
	ca, err := os.ReadFile(n.CAFile())
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{Node: n, t: t, ca: ca}
	b.id, b.secret = n.RootToken()
	b.c = pve.New(b.rest(b.id, b.secret)).WithPoll(quickPoll)
	n.AddTemplate(t, pvenode.Template{VMID: 9000, Size: 1 << 30})
	return b
}

// both runs a test over REST and over the shell transport.
func both(t *testing.T, cfg pvenode.Config, f func(t *testing.T, b *bench)) {
	t.Run("rest", func(t *testing.T) { f(t, newBench(t, cfg)) })
	t.Run("shell", func(t *testing.T) {
		b := newBench(t, cfg)
		b.c = b.shell()
		f(t, b)
	})
}

// shell is a client on the node.
func (b *bench) shell() *pve.Client {
	return pve.New(pve.NewShell(pve.ShellOptions{Bin: b.Bin()})).WithPoll(quickPoll)
}

// rest is the transport of a token.
func (b *bench) rest(id, secret string) pve.Transport {
	b.t.Helper()
	tr, err := pve.NewREST(pve.RESTOptions{URL: b.URL(), CA: b.ca, TokenID: id, Secret: secret, Retry: []time.Duration{time.Millisecond, time.Millisecond}})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = tr.Close() })
	return tr
}

func (b *bench) ctx() context.Context {
	return guard.Context(b.t)
}

// end waits for a task that must end well.
func (b *bench) end(u pve.UPID) pve.Task {
	b.t.Helper()
	task, err := b.c.Wait(b.ctx(), u)
	if err != nil {
		b.t.Fatal(err)
	}
	return task
}

// clone makes a linked clone of the template.
func (b *bench) clone(vmid int) {
	b.t.Helper()
	b.do(b.c.Clone(b.ctx(), "pve", 9000, pve.CloneOptions{NewID: vmid, Name: fmt.Sprintf("sb-%d", vmid)}))
}

// do waits for the task that a call began.
func (b *bench) do(u pve.UPID, err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
	b.end(u)
}

func (b *bench) code(err error, want agentlab.Code) {
	b.t.Helper()
	if got := agentlab.CodeOf(err); got != want {
		b.t.Errorf("%q, want %q: %v", got, want, err)
	}
}

// Trap 12: a refused token is answered after 3 s, without a body. A retry
// costs the daemon time; a client that expects a body reports "EOF".
func TestTrap12(t *testing.T) {
	b := newBench(t, pvenode.Config{}) // with the real wait
	tr := b.rest("root@pam!t1", "00000000-0000-0000-0000-000000000000")
	begin := time.Now()
	_, err := pve.New(tr).Version(b.ctx())
	b.code(err, agentlab.CodeDenied)
	if !strings.Contains(err.Error(), "Authentication failed!") || !strings.Contains(agentlab.HintOf(err), "token") {
		t.Errorf("%v, hint %q", err, agentlab.HintOf(err))
	}
	if took := time.Since(begin); took < 2900*time.Millisecond || tr.Calls() != 1 {
		t.Errorf("%v, %d calls; one takes 3 s", took, tr.Calls())
	}
}

// Trap 13: a call that takes longer than 30 s is answered 596, and is carried
// out all the same. A client that treats this as a failure allocates a second
// disk, or reports that nothing was done.
func TestTrap13(t *testing.T) {
	w := pvenode.ShortWaits()
	w.Proxy = 5 * time.Second // no other call takes that long
	b := newBench(t, pvenode.Config{Waits: w})
	b.clone(101)
	hold := make(chan struct{})
	b.Fail("alloc", pvenode.Fault{Hold: hold})
	err := b.c.Set(b.ctx(), "pve", 101, pve.Changes{Set: map[string]string{"scsi1": "local-zfs:1"}})
	b.code(err, agentlab.CodeUnknownOutcome)
	close(hold)
	for {
		cfg, err := b.c.Config(b.ctx(), "pve", 101)
		if err != nil {
			t.Fatal(err)
		}
		if cfg["scsi1"] != "" {
			break // it was carried out
		}
	}
	// In a task there is no such wall.
	hold = make(chan struct{})
	b.Fail("alloc", pvenode.Fault{Hold: hold})
	u, err := b.c.SetTask(b.ctx(), "pve", 101, pve.Changes{Set: map[string]string{"scsi2": "local-zfs:1"}})
	if err != nil {
		t.Fatal(err)
	}
	close(hold)
	b.end(u)
}

// Trap 14: "WARNINGS: n" is a success; the exit status of a failure has the
// last line alone, and a log's page 50 lines. A client that expects "OK"
// destroys a removed VM again, and the exit status alone does not explain an
// error.
func TestTrap14(t *testing.T) {
	both(t, pvenode.Config{Version: "9.2", Waits: pvenode.ShortWaits()}, func(t *testing.T, b *bench) {
		b.clone(101)
		b.Fail("free", pvenode.Fault{Error: "zfs error: cannot destroy 'rpool/data/vm-101-disk-0': dataset is busy", Times: -1})
		u, err := b.c.Destroy(b.ctx(), "pve", 101, false)
		if err != nil {
			t.Fatal(err)
		}
		if task := b.end(u); !strings.HasPrefix(string(task.ExitStatus), "WARNINGS: ") || !task.OK() {
			t.Errorf("exit status %q", task.ExitStatus)
		}
		_, err = b.c.Config(b.ctx(), "pve", 101)
		b.code(err, agentlab.CodeNotFound)

		b.Fail("clone.finish", pvenode.Fault{Error: "zfs error: rpool/data/vm-102-disk-0"})
		u, err = b.c.Clone(b.ctx(), "pve", 9000, pve.CloneOptions{NewID: 102, Full: true})
		if err != nil {
			t.Fatal(err)
		}
		_, err = b.c.Wait(b.ctx(), u)
		if err == nil || !strings.Contains(err.Error(), "vm-102-disk-0") || !strings.Contains(err.Error(), "log: ") {
			t.Errorf("%v", err)
		}
		log, err := b.c.TaskLog(b.ctx(), u, 0, 500)
		if err != nil || len(log) <= 50 || !strings.HasPrefix(log[len(log)-1], "TASK ERROR: ") {
			t.Errorf("%d lines, %v: the end of the log was not read", len(log), err)
		}
	})
}

// Trap 41: the node accepts neither chunks nor a body of DELETE. Go's client
// sends both by default. The node also closes idle connections after 5 s. A
// call on a connection that closes must not be sent again unless it only
// reads.
func TestTrap41(t *testing.T) {
	b := newBench(t, pvenode.Config{Waits: pvenode.ShortWaits()})
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(b.ca)
	naive := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}, DisableKeepAlives: true}}
	for method, body := range map[string]io.Reader{
		http.MethodPost:   io.NopCloser(strings.NewReader("newid=101")), // of unknown length
		http.MethodDelete: strings.NewReader("purge=1"),
	} {
		req, err := http.NewRequestWithContext(b.ctx(), method, b.URL()+"/api2/json/nodes/pve/qemu/9000/clone", body)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "PVEAPIToken="+b.id+"="+b.secret)
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		resp, err := naive.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusNotImplemented {
			t.Errorf("%s as Go sends it: %s", method, resp.Status)
		}
	}
	c := b.c
	b.do(c.Clone(b.ctx(), "pve", 9000, pve.CloneOptions{NewID: 101}))
	b.do(c.Destroy(b.ctx(), "pve", 101, true))

	const clone = "POST /nodes/{node}/qemu/{vmid}/clone"
	for _, point := range []string{clone, clone + " done"} {
		b.ResetCalls()
		b.Fail(point, pvenode.Fault{Lost: true})
		_, err := c.Clone(b.ctx(), "pve", 9000, pve.CloneOptions{NewID: 102})
		b.code(err, agentlab.CodeUnknownOutcome)
		if n := b.Calls()[clone]; n > 1 {
			t.Errorf("%s: a lost clone was sent %d times", point, n)
		}
	}
	const config = "GET /nodes/{node}/qemu/{vmid}/config"
	b.Fail(config, pvenode.Fault{Lost: true})
	if _, err := c.Config(b.ctx(), "pve", 9000); err != nil {
		t.Errorf("a lost answer to what only reads is asked for again: %v", err)
	}
}
