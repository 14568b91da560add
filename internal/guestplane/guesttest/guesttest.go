// Package guesttest is a controller for tests of programs in guests: the real
// guest plane and the real artifact service over TCP on this host, with the
// job service and the store in memory. It can be stopped and started again at
// the same address, like a controller that restarts.
package guesttest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
	"github.com/agentlab-vm/agentlab/internal/guestcheck"
	"github.com/agentlab-vm/agentlab/internal/guestplane"
	"github.com/agentlab-vm/agentlab/internal/redact"
)

// Controller is one controller with one sandbox and at most one job.
type Controller struct {
	tb      testing.TB
	VMID    int
	JobID   string
	Token   string // the bootstrap token
	Secrets []string
	// NoRedactor, if not nil, is the error of Redactor.
	NoRedactor error
	// MaxPosts, if not 0, is the number of messages after which Post refuses more.
	MaxPosts int
	// OnReport, if not nil, is called with each report before it is accepted.
	OnReport func(guestapi.Report)
	Limits   guestplane.PlaneLimits
	Service  *artifact.Service
	Dir      string // directory of Service
	addr     string

	mu         sync.Mutex
	response   guestapi.BootstrapResponse
	used       bool
	ended      bool  // the job is final
	down       error // error of every job call
	grants     map[string]agentlab.Grant
	reports    []guestapi.Report
	stop       string
	reason     string // of the stop
	deadline   time.Time
	changed    chan struct{}
	rows       map[string]agentlab.Artifact
	events     []agentlab.Event
	disconnect context.CancelFunc // of the current server
	served     sync.WaitGroup
	messages   []agentlab.Message
	leaseEnds  time.Time
	fetches    int
	denials    int
	narrowed   []guestapi.NetworkNarrow
	narrowErr  error
}

// New starts a controller that answers resp to a bootstrap. Runner and
// artifact tokens and the endpoint are filled in; a job without an ID gets
// one.
func New(tb testing.TB, resp guestapi.BootstrapResponse, limits artifact.Limits) *Controller {
	tb.Helper()
	c := &Controller{
		tb: tb, VMID: 42, JobID: agentlab.NewJobID(), Token: agentlab.NewToken(),
		grants: map[string]agentlab.Grant{}, changed: make(chan struct{}), rows: map[string]agentlab.Artifact{},
	}
	c.Dir = tb.TempDir()
	svc, err := artifact.New(artifact.Config{Dir: c.Dir, Store: c, Limits: limits})
	if err != nil {
		tb.Fatal(err)
	}
	c.Service = svc
	if resp.Job != nil {
		job := *resp.Job
		job.ID = c.JobID
		resp.Job = &job
	}
	c.Start()
	resp.Runner.Token = c.grant(agentlab.GrantRunner)
	resp.Messages.Token = c.grant(agentlab.GrantMessages)
	if resp.Job == nil || resp.Job.Upload {
		resp.Artifact = &guestapi.ArtifactTarget{Endpoint: c.URL() + "/upload", Token: c.grant(agentlab.GrantUpload), MaxBytes: 1 << 30}
	}
	c.response = resp
	for _, v := range resp.Env {
		c.Secrets = append(c.Secrets, v)
	}
	tb.Cleanup(func() {
		c.Stop()
		_ = svc.Close()
	})
	return c
}

func (c *Controller) grant(kind string) string {
	token := agentlab.NewToken()
	c.grants[kind+hash(token)] = agentlab.Grant{VMID: c.VMID, JobID: c.JobID, ExpiresAt: time.Now().Add(time.Hour)}
	return token
}

// End makes the job final.
func (c *Controller) End() { c.setEnded(true) }

// Reopen reverts End.
func (c *Controller) Reopen() { c.setEnded(false) }

func (c *Controller) setEnded(ended bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = ended
}

func hash(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:])
}

// Start serves again after Stop, at the same address.
func (c *Controller) Start() {
	c.tb.Helper()
	addr := c.addr
	if addr == "" {
		addr = "127.0.0.1:0"
	}
	l, err := (&net.ListenConfig{}).Listen(c.tb.Context(), "tcp", addr)
	if err != nil {
		c.tb.Fatal(err)
	}
	c.addr = l.Addr().String()
	s := c.Plane(guestplane.Config{Limits: c.Limits})
	var ctx context.Context
	ctx, c.disconnect = context.WithCancel(context.WithoutCancel(c.tb.Context()))
	c.served.Go(func() { _ = s.Serve(ctx, c.VMID, l) })
}

// Stop closes every connection and refuses new ones.
func (c *Controller) Stop() {
	c.disconnect()
	c.served.Wait()
}

// URL returns the URL of the controller.
func (c *Controller) URL() string { return "http://" + c.addr }

// Response returns the answer to a bootstrap.
func (c *Controller) Response() guestapi.BootstrapResponse { return c.response }

// Fail makes every call about the job fail with err; nil ends that.
func (c *Controller) Fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.down = err
}

// Revoke invalidates all grants.
func (c *Controller) Revoke() {
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.grants)
}

func (c *Controller) wake() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// NarrowNetwork implements report.Jobs.
func (c *Controller) NarrowNetwork(_ context.Context, vmid int, n guestapi.NetworkNarrow) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if vmid != c.VMID {
		c.tb.Errorf("sandbox %d narrows its network", vmid)
	}
	if c.narrowErr != nil {
		return c.narrowErr
	}
	c.narrowed = append(c.narrowed, n)
	return nil
}

// Narrowed returns the runner's NarrowNetwork requests so far.
func (c *Controller) Narrowed() []guestapi.NetworkNarrow {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.narrowed)
}

// FailNarrow makes NarrowNetwork fail with err; nil ends that.
func (c *Controller) FailNarrow(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.narrowErr = err
}

// patience is guard.Patience, which this layer does not import.
const patience = 10 * time.Minute

// Wait waits until cond returns true. It calls cond at every report and log
// append.
func (c *Controller) Wait(what string, cond func() bool) {
	c.tb.Helper()
	deadline := time.After(patience)
	for {
		c.mu.Lock()
		changed := c.changed
		c.mu.Unlock()
		if cond() {
			return
		}
		select {
		case <-changed:
		case <-time.After(20 * time.Millisecond): // appends do not wake
		case <-deadline:
			c.tb.Fatalf("no %s in time; reports %+v, log %q", what, c.Reports(), c.Log())
		}
	}
}

// Final waits for the final report.
func (c *Controller) Final() guestapi.Report {
	c.tb.Helper()
	c.Wait("final report", func() bool { return c.final() != nil })
	return *c.final()
}

func (c *Controller) final() *guestapi.Report {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, r := range c.reports {
		if agentlab.JobStatus(r.Status).Final() {
			return &c.reports[i]
		}
	}
	return nil
}

// Events returns all events that were written with rows.
func (c *Controller) Events() []agentlab.Event {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.events)
}

// Reports returns all reports so far.
func (c *Controller) Reports() []guestapi.Report {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.reports)
}

// LastReport returns the newest report.
func (c *Controller) LastReport() guestapi.Report {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.reports) == 0 {
		return guestapi.Report{}
	}
	return c.reports[len(c.reports)-1]
}

// Fetches returns how often a bootstrap succeeded.
func (c *Controller) Fetches() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.fetches
}

// Denials returns how often a bootstrap was denied.
func (c *Controller) Denials() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.denials
}

// Log returns the agent log that the controller has stored.
func (c *Controller) Log() string {
	r, err := c.Service.Log(context.Background(), c.JobID, 0, false)
	if err != nil {
		return err.Error()
	}
	defer func() { _ = r.Close() }()
	p, err := io.ReadAll(r)
	if err != nil {
		return err.Error()
	}
	return string(p)
}

// File returns the content of an artifact, "" if there is none.
func (c *Controller) File(path string) string {
	c.tb.Helper()
	_, r, err := c.Service.Open(context.Background(), c.JobID, path)
	if err != nil {
		return ""
	}
	defer func() { _ = r.Close() }()
	p, err := io.ReadAll(r)
	if err != nil {
		c.tb.Fatal(err)
	}
	return string(p)
}

// Paths lists the artifacts.
func (c *Controller) Paths() []string {
	var out []string
	list, _ := c.Artifacts(context.Background(), c.JobID)
	for _, a := range list {
		out = append(out, a.Path)
	}
	slices.Sort(out)
	return out
}

// GiveBundle sets the content of r as the repository bundle of the job.
func (c *Controller) GiveBundle(r io.Reader) {
	c.tb.Helper()
	b, err := c.Service.PutBundle(context.Background(), r)
	if err == nil {
		err = c.Service.ClaimBundle(context.Background(), b.ID, c.JobID)
	}
	if err != nil {
		c.tb.Fatal(err)
	}
}

// Started implements bootstrap.Jobs.
func (c *Controller) Started(context.Context, int) {}

// Exchange implements bootstrap.Exchanger.
func (c *Controller) Exchange(_ context.Context, vmid int, tokenHash string) (guestapi.BootstrapResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.down != nil {
		return guestapi.BootstrapResponse{}, c.down
	}
	if c.used || vmid != c.VMID || tokenHash != hash(c.Token) {
		c.denials++
		return guestapi.BootstrapResponse{}, agentlab.Errorf(agentlab.CodeDenied, "no")
	}
	c.used = true
	c.fetches++
	if c.response.Job != nil && c.response.Job.Seconds > 0 {
		c.deadline = time.Now().Add(time.Duration(c.response.Job.Seconds) * time.Second)
	}
	return c.response, nil
}

// Report implements report.Jobs.
func (c *Controller) Report(_ context.Context, _ int, r guestapi.Report) (guestapi.Directive, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.down != nil {
		return guestapi.Directive{}, c.down
	}
	if err := guestcheck.Report(&r); err != nil {
		return guestapi.Directive{}, err
	}
	if c.OnReport != nil {
		c.OnReport(r)
	}
	c.reports = append(c.reports, r)
	c.wake()
	return c.now(), nil
}

// GrantByHash implements guestplane.Store.
func (c *Controller) GrantByHash(_ context.Context, h, kind string) (agentlab.Grant, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	g, ok := c.grants[kind+h]
	if !ok {
		return g, agentlab.Errorf(agentlab.CodeNotFound, "no grant")
	}
	return g, nil
}

// Redactor implements guestplane.Redactors.
func (c *Controller) Redactor(context.Context, string) (*redact.Redactor, error) {
	if c.NoRedactor != nil {
		return nil, c.NoRedactor
	}
	return redact.New(c.Secrets...), nil
}

// Job implements artifact.Store. The job is final once it has reported its
// end.
func (c *Controller) Job(_ context.Context, id string) (agentlab.Job, error) {
	if c.final() != nil {
		return agentlab.Job{ID: id, Status: agentlab.JobCompleted}, nil
	}
	return agentlab.Job{ID: id, Status: agentlab.JobRunning}, nil
}

// Subscribe implements artifact.Store. No log here has an end that a reader must notice.
func (c *Controller) Subscribe(func(agentlab.Commit)) {}

// PutArtifact implements artifact.Store.
func (c *Controller) PutArtifact(_ context.Context, a agentlab.Artifact, evs ...agentlab.Event) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.events = append(c.events, evs...)
	c.rows[a.JobID+"\x00"+a.Path] = a
	return nil
}

// Artifacts implements artifact.Store.
func (c *Controller) Artifacts(_ context.Context, jobID string) ([]agentlab.Artifact, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []agentlab.Artifact
	for _, a := range c.rows {
		if a.JobID == jobID {
			out = append(out, a)
		}
	}
	return out, nil
}

// Artifact implements artifact.Store.
func (c *Controller) Artifact(_ context.Context, jobID, p string) (agentlab.Artifact, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	a, ok := c.rows[jobID+"\x00"+p]
	if !ok {
		return a, agentlab.Errorf(agentlab.CodeNotFound, "no artifact")
	}
	return a, nil
}

// DeleteArtifacts implements artifact.Store.
func (c *Controller) DeleteArtifacts(_ context.Context, jobID string, paths ...string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k, a := range c.rows {
		if strings.HasPrefix(k, jobID+"\x00") && (len(paths) == 0 || slices.Contains(paths, a.Path)) {
			delete(c.rows, k)
		}
	}
	return nil
}
