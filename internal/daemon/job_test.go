package daemon

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"net/http/httptest"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// ended follows the events of a job until it is final.
func (h *home) ended(t *testing.T, id string) api.Job {
	t.Helper()
	ctx := guard.Context(t)
	for _, err := range h.client.FollowEvents(ctx, client.EventQuery{JobID: id}) {
		if err != nil {
			t.Fatal(err)
		}
		j, err := h.client.Job(ctx, id)
		if err != nil {
			t.Fatal(err)
		}
		if agentlab.JobStatus(j.Status).Final() {
			return j
		}
	}
	t.Fatalf("job %s did not end", id)
	return api.Job{}
}

// running waits until the agent of a job is at work.
func (h *home) running(t *testing.T, id string) {
	t.Helper()
	ctx := guard.Context(t)
	for e, err := range h.client.FollowEvents(ctx, client.EventQuery{JobID: id, Kind: agentlab.EventJobPhase}) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Data["phase"] == "agent" {
			return
		}
	}
	t.Fatalf("the agent of %s did not start", id)
}

// nothingRuns waits until no sandbox is left.
func (h *home) nothingRuns(t *testing.T) {
	t.Helper()
	for deadline := time.Now().Add(guard.Patience); ; time.Sleep(10 * time.Millisecond) {
		l, err := h.client.Sandboxes(t.Context(), client.SandboxQuery{})
		if err != nil {
			t.Fatal(err)
		}
		if len(l.Items) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("left: %+v", l.Items)
		}
	}
}

func shell(lines ...string) api.JobCreate {
	return api.JobCreate{Agent: "shell", Task: strings.Join(lines, "\n")}
}

func TestJobThroughTheAPI(t *testing.T) {
	h := newHome(t)
	h.start(t)
	ctx := t.Context()
	j, err := h.client.CreateJob(ctx, shell("echo one", "artifact out/result.txt the result", "sleep 20ms", "echo two"))
	if err != nil || j.Status != "QUEUED" {
		t.Fatalf("%+v, %v", j, err)
	}
	log, err := h.client.JobLog(ctx, j.ID, true, 0)
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(log)
	_ = log.Close()
	if err != nil || string(text) != "one\ntwo\n" {
		t.Errorf("followed log: %q, %v", text, err)
	}
	j = h.ended(t, j.ID)
	if j.Status != "COMPLETED" || j.ExitCode == nil || *j.ExitCode != 0 || len(j.Events) < 5 || j.StartedAt == nil || j.FinishedAt == nil {
		t.Errorf("%+v", j)
	}
	paths := map[string]bool{}
	for _, a := range j.Artifacts {
		paths[a.Path] = true
	}
	if !paths["out/result.txt"] {
		t.Errorf("artifacts %+v", j.Artifacts)
	}
	body, err := h.client.Artifact(ctx, j.ID, "out/result.txt")
	if err != nil {
		t.Fatal(err)
	}
	if text, err := io.ReadAll(body); err != nil || strings.TrimSpace(string(text)) != "the result" {
		t.Errorf("%q, %v", text, err)
	}
	_ = body.Close()
	if names := h.bundled(t, j.ID); !strings.Contains(names, j.ID+"/out/result.txt") || !strings.Contains(names, j.ID+"/agent.log") {
		t.Errorf("bundle holds %s", names)
	}
	tail, err := h.client.JobLog(ctx, j.ID, false, 4)
	if err != nil {
		t.Fatal(err)
	}
	if text, _ := io.ReadAll(tail); string(text) != "two\n" {
		t.Errorf("from byte 4: %q", text)
	}
	_ = tail.Close()
	h.nothingRuns(t)
	list, err := h.client.Jobs(ctx, client.JobQuery{Status: "COMPLETED"})
	if err != nil || len(list.Items) != 1 {
		t.Errorf("%+v, %v", list, err)
	}
	if _, err := h.client.CancelJob(ctx, j.ID); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("cancel after the end: %v", err)
	}
}

func (h *home) bundled(t *testing.T, id string) string {
	t.Helper()
	body, err := h.client.JobBundle(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = body.Close() }()
	zr, err := gzip.NewReader(body)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for tr := tar.NewReader(zr); ; {
		hd, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return strings.Join(names, " ")
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, hd.Name)
	}
}

func TestJobFailsAndIsCancelled(t *testing.T) {
	h := newHome(t)
	h.start(t)
	failing, err := h.client.CreateJob(t.Context(), shell("exit 3"))
	if err != nil {
		t.Fatal(err)
	}
	if j := h.ended(t, failing.ID); j.Status != "FAILED" || j.ExitCode == nil || *j.ExitCode != 3 || j.Reason == "" {
		t.Errorf("%+v", j)
	}
	hanging, err := h.client.CreateJob(t.Context(), shell("hang"))
	if err != nil {
		t.Fatal(err)
	}
	h.running(t, hanging.ID)
	if _, err := h.client.CancelJob(t.Context(), hanging.ID); err != nil {
		t.Fatal(err)
	}
	if j := h.ended(t, hanging.ID); j.Status != "CANCELLED" {
		t.Errorf("%+v", j)
	}
	h.nothingRuns(t)
}

func TestJobRefused(t *testing.T) {
	h := newHome(t)
	h.start(t)
	for name, c := range map[string]struct {
		change func(*api.JobCreate)
		code   agentlab.Code
		field  string
	}{
		"empty task":      {func(j *api.JobCreate) { j.Task = " " }, agentlab.CodeInvalid, "task"},
		"unknown agent":   {func(j *api.JobCreate) { j.Agent = "bob" }, agentlab.CodeInvalid, "agent"},
		"unknown profile": {func(j *api.JobCreate) { j.Profile = "nope" }, agentlab.CodeNotFound, "profile"},
		"unknown image":   {func(j *api.JobCreate) { j.Image = "nope" }, agentlab.CodeNotFound, "image"},
		"workspaces":      {func(j *api.JobCreate) { j.Profile = "yolo-workspace" }, agentlab.CodeInvalid, "workspace"},
		"absurd TTL":      {func(j *api.JobCreate) { j.TTLMinutes = 1 << 40 }, agentlab.CodeInvalid, "ttl"},
		"negative TTL":    {func(j *api.JobCreate) { j.TTLMinutes = -5 }, agentlab.CodeInvalid, "ttl"},
		"unknown bundle":  {func(j *api.JobCreate) { j.BundleID = "bundle-x" }, agentlab.CodeNotFound, "bundle_id"},
		"option as ref":   {func(j *api.JobCreate) { j.Ref = "--upload-pack=x" }, agentlab.CodeInvalid, "ref"},
		"path as URL":     {func(j *api.JobCreate) { j.RepoURL = "/etc" }, agentlab.CodeInvalid, "repo_url"},
	} {
		req := shell("true")
		c.change(&req)
		_, err := h.client.CreateJob(t.Context(), req)
		var e *agentlab.Error
		if !errors.As(err, &e) || e.Code != c.code || e.Field != c.field {
			t.Errorf("%s: %v", name, err)
		}
	}
	list, err := h.client.Jobs(t.Context(), client.JobQuery{})
	if err != nil || len(list.Items) != 0 {
		t.Errorf("%+v, %v", list, err)
	}
}

func TestJobFromBundle(t *testing.T) {
	h := newHome(t)
	h.start(t)
	file := filepath.Join(t.TempDir(), "b")
	for _, args := range [][]string{{"init", "-q", "-b", "main", "."}, {"-c", "user.name=x", "-c", "user.email=x@x", "commit", "-q", "--allow-empty", "-m", "x"}, {"bundle", "create", "-q", file, "HEAD", "main"}} {
		cmd := exec.CommandContext(t.Context(), "git", args...)
		cmd.Dir = filepath.Dir(file)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v", out, err)
		}
	}
	text := readFile(t, file)
	b, err := h.client.UploadBundle(t.Context(), bytes.NewReader(text))
	if err != nil || b.Size != int64(len(text)) {
		t.Fatalf("%+v, %v", b, err)
	}
	req := shell("repo")
	req.BundleID = b.ID
	j, err := h.client.CreateJob(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	if j = h.ended(t, j.ID); j.Status != "COMPLETED" || !j.Bundled {
		t.Errorf("%+v", j)
	}
	if _, err := h.client.UploadBundle(t.Context(), strings.NewReader("no bundle")); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("%v", err)
	}
}

// TestSandboxWithJob is the form of seed 000 §11.1: a sandbox with a job in
// it.
func TestSandboxWithJob(t *testing.T) {
	h := newHome(t)
	h.start(t)
	keep := true
	j := shell("echo in my own sandbox")
	sb, err := h.client.CreateSandbox(t.Context(), api.SandboxCreate{Name: "mine", Keepalive: &keep, Cores: 1, Job: &j})
	if err != nil || sb.Name != "mine" || sb.Cores != 1 || sb.JobID == "" {
		t.Fatalf("%+v, %v", sb, err)
	}
	done := h.ended(t, sb.JobID)
	if done.Status != "COMPLETED" || done.SandboxVMID != sb.VMID || !done.Keepalive {
		t.Errorf("%+v", done)
	}
	h.await(t, "mine", agentlab.SandboxCompleted)
	if out, _ := h.exec(t, "mine", "echo", "kept"); out != "kept\n" {
		t.Errorf("%q", out)
	}
	j.Profile = "interactive-dev"
	if _, err := h.client.CreateSandbox(t.Context(), api.SandboxCreate{Profile: "yolo-ephemeral", Job: &j}); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("two profiles: %v", err)
	}
}

// TestKillDuringJob kills the daemon while an agent is at work: the next
// daemon takes the job to its end, and its log is whole.
func TestKillDuringJob(t *testing.T) {
	h := newHome(t)
	first := h.spawn(t)
	j, err := h.client.CreateJob(t.Context(), shell("echo before", "sleep 300ms", "echo after"))
	if err != nil {
		t.Fatal(err)
	}
	queued, err := h.client.CreateJob(t.Context(), shell("echo queued"))
	if err != nil {
		t.Fatal(err)
	}
	h.running(t, j.ID)
	_ = first.Process.Kill()
	_ = first.Wait()
	h.spawn(t)
	if done := h.ended(t, j.ID); done.Status != "COMPLETED" {
		t.Errorf("%+v", done)
	}
	if done := h.ended(t, queued.ID); done.Status != "COMPLETED" {
		t.Errorf("%+v", done)
	}
	log, err := h.client.JobLog(t.Context(), j.ID, false, 0)
	if err != nil {
		t.Fatal(err)
	}
	if text, _ := io.ReadAll(log); string(text) != "before\nafter\n" {
		t.Errorf("%q", text)
	}
	_ = log.Close()
	h.nothingRuns(t)
}

// TestMany makes many sandboxes at once and lists them.
func TestMany(t *testing.T) {
	h := newHome(t)
	h.configure(t, "backend: fake\nlimits:\n  max_sandboxes: 60\n")
	h.start(t)
	const n = 60
	errs := make(chan error, n)
	for range n {
		go func() {
			_, err := h.client.CreateSandbox(t.Context(), api.SandboxCreate{})
			errs <- err
		}()
	}
	for range n {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if _, err := h.client.CreateSandbox(t.Context(), api.SandboxCreate{}); agentlab.CodeOf(err) != agentlab.CodeLimit {
		t.Errorf("one more: %v", err)
	}
	for deadline := time.Now().Add(guard.Patience); ; time.Sleep(20 * time.Millisecond) {
		s, err := h.client.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if s.Sandboxes["READY"] == n {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%v", s.Sandboxes)
		}
	}
	list, err := h.client.Sandboxes(t.Context(), client.SandboxQuery{State: "READY"})
	if err != nil || len(list.Items) != n {
		t.Errorf("%d, %v", len(list.Items), err)
	}
}

// TestFinalJobIsClosed: what a job left stays as it is, though its sandbox is
// kept and its programs hold the tokens.
func TestFinalJobIsClosed(t *testing.T) {
	h := newHome(t)
	d, err := h.open(t)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	defer func() {
		cancel()
		<-done
		_ = d.Close()
	}()
	req, keep := shell("echo one"), true
	req.Keepalive = &keep
	j, err := h.client.CreateJob(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	j = h.ended(t, j.ID)
	files, _ := filepath.Glob(filepath.Join(h.paths.State, "fake", "*.json"))
	if len(files) != 1 {
		t.Fatalf("files %q", files)
	}
	tokens := regexp.MustCompile(`"token":\s*"([^"]+)"`).FindAllStringSubmatch(string(readFile(t, files[0])), -1)
	if len(tokens) < 3 {
		t.Fatalf("%d tokens", len(tokens))
	}
	for _, m := range tokens {
		for path, method := range map[string]string{"/upload/x": "PUT", "/v1/runner/log?offset=4&final=1": "POST", "/v1/runner/repo": "GET"} {
			r := httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader("evil"))
			r.Header.Set("Authorization", "Bearer "+m[1])
			w := httptest.NewRecorder()
			d.services.guests.Handler(j.SandboxVMID).ServeHTTP(w, r)
			if w.Code != 401 {
				t.Errorf("%s: %d", path, w.Code)
			}
		}
	}
}
