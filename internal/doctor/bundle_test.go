package doctor

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/internal/fleet"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/redact"
)

const canary = "canary-5123-value"

// bundleRows is a database with one sandbox and its job.
type bundleRows struct {
	Rows
	artifacts int
}

var testJob = agentlab.Job{ID: "job-aaaaaaaaaaaaa", SandboxVMID: 1000, Task: "use " + canary}

func (bundleRows) Sandbox(_ context.Context, vmid int) (agentlab.Sandbox, error) {
	if vmid != 1000 {
		return agentlab.Sandbox{}, agentlab.Errorf(agentlab.CodeNotFound, "there is no sandbox %d", vmid)
	}
	return agentlab.Sandbox{VMID: vmid, UID: "uid", Backend: "fake", JobID: testJob.ID, State: agentlab.SandboxReady}, nil
}
func (bundleRows) Job(context.Context, string) (agentlab.Job, error) { return testJob, nil }
func (bundleRows) Events(context.Context, agentlab.EventFilter) ([]agentlab.Event, error) {
	return []agentlab.Event{{ID: 1, Kind: "job.status", Data: `{"reason":"` + canary + `"}`}, {ID: 2, Data: "not JSON"}}, nil
}
func (bundleRows) Snapshots(context.Context, agentlab.SnapshotFilter) ([]agentlab.Snapshot, error) {
	return nil, errors.New("the table of " + canary + " is damaged")
}
func (r bundleRows) Artifacts(context.Context, string) ([]agentlab.Artifact, error) {
	list := []agentlab.Artifact{{Path: "../../evil\x1b[2J\u202e.txt"}, {Path: agentlab.ArtifactCheckpoint, Size: 7}}
	for i := range r.artifacts {
		list = append(list, agentlab.Artifact{Path: fmt.Sprintf("%06d", i)})
	}
	return list, nil
}

type noEgress struct{}

func (noEgress) List(context.Context, agentlab.EgressFilter) ([]agentlab.EgressEntry, error) {
	return nil, nil
}

// agentLogs has one log.
type agentLogs string

func (l agentLogs) LogSize(context.Context, string) (int64, error) { return int64(len(l)), nil }
func (l agentLogs) Log(_ context.Context, _ string, offset int64, _ bool) (io.ReadCloser, error) {
	return io.NopCloser(strings.NewReader(string(l[offset:]))), nil
}

type secrets struct{ err error }

func (s secrets) Secrets(context.Context) ([]string, error) { return []string{canary}, s.err }

// deaf is a backend that does not answer, and whose console is hostile.
type deaf struct {
	backend.Driver
	backend.Console
}

func (deaf) Inspect(context.Context, backend.Ref) (backend.Instance, error) {
	return backend.Instance{}, agentlab.Errorf(agentlab.CodeUnavailable, "node %s does not answer", canary)
}
func (deaf) ConsoleLog(context.Context, backend.Ref, bool) (io.ReadCloser, error) {
	return io.NopCloser(strings.NewReader("boot\r\n\x1b]0;title\a\xff\U000e0041 canary-5123-value\r\n")), nil
}

func testBundles(t *testing.T) BundleConfig {
	t.Helper()
	d, err := fake.Open(fake.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return BundleConfig{Rows: bundleRows{}, Egress: noEgress{}, Logs: agentLogs("done\n"), Secrets: secrets{}, Fleet: fleet.Single(deaf{d, d}, nil), Made: func(int, time.Duration, error) {}}
}

// unpack returns the manifest and the files of a bundle, which must be in order
// and without times and owners.
func unpack(t *testing.T, data []byte) (m api.DoctorManifest, files map[string]string) {
	t.Helper()
	zr, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	files = map[string]string{}
	last := ""
	for tr := tar.NewReader(zr); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(tr)
		if err != nil {
			t.Fatal(err)
		}
		if h.ModTime.Unix() != 0 || h.Mode != 0o600 || h.Uid != 0 || h.Uname != "" || h.Typeflag != tar.TypeReg || !filepath.IsLocal(h.Name) {
			t.Errorf("the header is %+v", h)
		}
		if len(files) > 1 && h.Name <= last {
			t.Errorf("%s is after %s", h.Name, last)
		}
		files[h.Name], last = string(text), h.Name
	}
	if err := json.Unmarshal([]byte(files[api.DoctorManifestName]), &m); err != nil {
		t.Fatal(err)
	}
	return m, files
}

func TestBundleIsRedactedAndPrintable(t *testing.T) {
	cfg := testBundles(t)
	size := 0
	cfg.Made = func(n int, took time.Duration, err error) {
		if size = n; took <= 0 || err != nil {
			t.Errorf("took %s, %v", took, err)
		}
	}
	data, err := NewBundles(cfg).Make(t.Context(), api.DoctorSandbox, "1000")
	if err != nil {
		t.Fatal(err)
	}
	if size != len(data) {
		t.Errorf("a bundle of %d bytes is reported as %d", len(data), size)
	}
	m, files := unpack(t, data)
	for name, text := range files {
		if strings.Contains(text, "canary") {
			t.Errorf("%s contains the secret: %s", name, text)
		}
		if i := strings.IndexFunc(text, func(r rune) bool { return r != '\n' && r != '\t' && (r < ' ' || r > '~') }); i >= 0 {
			t.Errorf("%s contains %q", name, text[i:])
		}
	}
	if got, want := files["sandbox/console.log"], "boot\n\\u001b]0;title\\u0007\\ufffd\\udb40\\udc41 [redacted]\n"; got != want {
		t.Errorf("the console is %q, not %q", got, want)
	}
	for name, want := range map[string]string{
		"job/artifacts.jsonl":  `evil\u001b[2J\u202e.txt`,
		"job/checkpoint.jsonl": `"Size":7`,
		"job/events.jsonl":     `"Data":{"reason":"[redacted]"}`,
		"job/agent.log":        "done",
	} {
		if !strings.Contains(files[name], want) {
			t.Errorf("%s lacks %s: %s", name, want, files[name])
		}
	}
	want := []api.DoctorError{
		{Name: "sandbox/snapshots.jsonl", Code: "internal", Message: "the table of [redacted] is damaged"},
		{Name: "sandbox/instance.json", Code: "unavailable", Message: "node [redacted] does not answer"},
	}
	if fmt.Sprint(m.Errors) != fmt.Sprint(want) {
		t.Errorf("the errors are %v", m.Errors)
	}
	again, err := NewBundles(cfg).Make(t.Context(), api.DoctorSandbox, "1000")
	if err != nil || !bytes.Equal(data, again) {
		t.Errorf("the second bundle differs: %v", err)
	}
}

func TestBundleNeedsTheSecrets(t *testing.T) {
	for name, change := range map[string]func(*BundleConfig){
		"the bundles cannot be read": func(c *BundleConfig) { c.Secrets = secrets{err: errors.New("damaged")} },
		"a file cannot be read":      func(c *BundleConfig) { c.SecretFiles = []string{t.TempDir()} },
	} {
		cfg := testBundles(t)
		change(&cfg)
		if data, err := NewBundles(cfg).Make(t.Context(), api.DoctorJob, testJob.ID); agentlab.CodeOf(err) != agentlab.CodeUnavailable || data != nil {
			t.Errorf("%s: %d bytes, %v", name, len(data), err)
		}
	}
	cfg := testBundles(t)
	var reported error
	cfg.Made = func(_ int, _ time.Duration, err error) { reported = err }
	if _, err := NewBundles(cfg).Make(t.Context(), api.DoctorSandbox, "1001"); agentlab.CodeOf(err) != agentlab.CodeNotFound || !errors.Is(reported, err) {
		t.Errorf("a sandbox that does not exist: %v, reported as %v", err, reported)
	}
}

func TestBundleRedactsTheFilesOfTheDaemon(t *testing.T) {
	cfg := testBundles(t)
	file := filepath.Join(t.TempDir(), "proxy")
	if err := os.WriteFile(file, []byte("somebody:pass-of-the-proxy\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("agent@pve!lab=0b5c4f7e-secret-of-the-token\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg.SecretFiles = []string{file, token, filepath.Join(t.TempDir(), "missing")}
	key := "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg\n-----END PRIVATE KEY-----"
	cfg.Logs = agentLogs("a pass-of-the-proxy b agentlab_" + strings.Repeat("a2", 26) + " c AGE-SECRET-KEY-1QQQ d\n" + key + "\ne Authorization: Bearer abcdefghijk f\ng 0b5c4f7e-secret-of-the-token h\n")
	data, err := NewBundles(cfg).Make(t.Context(), api.DoctorJob, testJob.ID)
	if err != nil {
		t.Fatal(err)
	}
	_, files := unpack(t, data)
	if got, want := files["job/agent.log"], "a [redacted] b [redacted] c [redacted] d\n[redacted]\ne Authorization: [redacted] f\ng [redacted] h\n"; got != want {
		t.Errorf("the log is %q, not %q", got, want)
	}
}

func TestBundleIsBounded(t *testing.T) {
	cfg := testBundles(t)
	cfg.Rows = bundleRows{artifacts: maxRows}
	line := strings.Repeat("x", 99) + "\n"
	cfg.Logs = agentLogs(canary + strings.Repeat(line, 2*(maxTail+tailMargin)/len(line)) + "last\n")
	data, err := NewBundles(cfg).Make(t.Context(), api.DoctorJob, testJob.ID)
	if err != nil {
		t.Fatal(err)
	}
	m, files := unpack(t, data)
	notes := map[string]string{}
	for _, f := range m.Files {
		notes[f.Name] = f.Truncated
		if f.Size != int64(len(files[f.Name])) {
			t.Errorf("%s has %d bytes, not %d", f.Name, len(files[f.Name]), f.Size)
		}
	}
	log := files["job/agent.log"]
	if len(log) > maxTail || len(log) < maxTail-len(line) || !strings.HasPrefix(log, "x") || !strings.HasSuffix(log, "\nlast\n") {
		t.Errorf("the log has %d bytes: %.20q", len(log), log)
	}
	if want := fmt.Sprintf("only the end of %d bytes", len(cfg.Logs.(agentLogs))); notes["job/agent.log"] != want {
		t.Errorf("the note of the log is %q, not %q", notes["job/agent.log"], want)
	}
	if n := strings.Count(files["job/artifacts.jsonl"], "\n"); n != maxRows || notes["job/artifacts.jsonl"] != fmt.Sprintf("only the first %d", maxRows) {
		t.Errorf("%d artifacts, note %q", n, notes["job/artifacts.jsonl"])
	}
}

// A secret whose first half is before the part of a log that is kept is not cut
// into a half that is not found.
func TestTailCutsNoSecret(t *testing.T) {
	const secret = "line one of\n" + canary // a line that is cut is left out
	for shift := range len(secret) {
		a := newArchive(api.DoctorJob, "", redact.New(secret))
		text := strings.Repeat(secret+"\n", (maxTail+tailMargin)/len(secret)+2)
		if err := a.tail("log", 1, strings.NewReader(text[shift:])); err != nil {
			t.Fatal(err)
		}
		if got := string(a.data["log"]); strings.ReplaceAll(got, redact.Replacement+"\n", "") != "" || got == "" {
			t.Fatalf("shift %d: %.60q", shift, got)
		}
	}
}

// The patterns of credentials do not match a part of one, so a word that a limit cuts is
// left out.
func TestTailCutsNoWord(t *testing.T) {
	const token = "agentlab_abcdefghijkmnpqrstuvwxyz"
	const text = "first\nuse " + token + " or not"
	for limit := range len(text) + 2 {
		a := newArchive(api.DoctorJob, "", nil)
		if err := a.tail("log", 0, io.LimitReader(strings.NewReader(text), int64(limit))); err != nil {
			t.Fatal(err)
		}
		got := string(a.data["log"])
		if !strings.HasPrefix("first\nuse "+redact.Replacement+" or not", got) || limit >= len(text) && !strings.HasSuffix(got, "not") {
			t.Errorf("%d bytes: %q", limit, got)
		}
	}
	a := newArchive(api.DoctorJob, "", nil)
	if err := a.tail("log", 0, strings.NewReader(token+strings.Repeat(" x", (maxTail-20)/2)+"\rlast")); err != nil {
		t.Fatal(err)
	}
	if got := string(a.data["log"]); got != "last" {
		t.Errorf("the log begins with %.60q", got)
	}
}

// A private key is redacted also without its beginning or its end, and the text of
// one row cannot hide other rows.
func TestPrivateKeysWithoutAPart(t *testing.T) {
	const begin, end, body = "-----BEGIN OPENSSH PRIVATE KEY-----", "-----END OPENSSH PRIVATE KEY-----", "b3BlbnNzaC1rZXktdjE+/="
	a := newArchive(api.DoctorJob, "", nil)
	for text, want := range map[string]string{
		"a\n" + begin + "\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00\n" + body + "\n" + end + "\nb": "a\n[redacted]\nb",
		"a " + begin + "\n" + body:                                   "a [redacted]",
		body + "\n" + body + "\n" + end + "\nb":                      "[redacted]\nb",
		"a\nno key\n" + end:                                          "a\nno key\n" + end,
		`{"Task":"` + begin + `"}` + "\n" + `{"Task":"next"}` + "\n": `{"Task":"[redacted]"}` + "\n" + `{"Task":"next"}` + "\n",
		`{"Task":"` + begin + `\n` + body + `\n` + end + `\nx"}`:     `{"Task":"[redacted]\nx"}`,
		`{"Task":"` + begin + `"}{"Task":"` + end + `"}`:             `{"Task":"[redacted]"}{"Task":"` + end + `"}`,
	} {
		if got := a.clean(text); got != want {
			t.Errorf("%q becomes %q, not %q", text, got, want)
		}
	}
	// The beginning of the key is before the part of the log that is kept.
	log := begin + "\n" + strings.Repeat(strings.Repeat("k", 63)+"\n", maxTail/64+10) + end + "\nafter\n"
	if err := a.tail("log", 0, strings.NewReader(log)); err != nil {
		t.Fatal(err)
	}
	if got := string(a.data["log"]); got != "[redacted]\nafter\n" {
		t.Errorf("the log is %.60q", got)
	}
}

// endless is a log that grows faster than it is read.
type endless struct{ read *int64 }

func (e endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = "x\n"[i%2]
	}
	*e.read += int64(len(p))
	return len(p), nil
}

// growing is the log of an agent, and a console, that have no end.
type growing struct {
	backend.Driver
	backend.Console
	read *int64
}

func (growing) LogSize(context.Context, string) (int64, error) { return 1000, nil }
func (g growing) Log(context.Context, string, int64, bool) (io.ReadCloser, error) {
	return io.NopCloser(endless{g.read}), nil
}
func (g growing) ConsoleLog(context.Context, backend.Ref, bool) (io.ReadCloser, error) {
	return io.NopCloser(endless{g.read}), nil
}

// A guest that writes without an end does not keep a bundle from ending.
func TestLogsThatGrow(t *testing.T) {
	cfg := testBundles(t)
	d := cfg.Fleet.Default()
	g := growing{d.Driver, d.Console, new(int64)}
	cfg.Logs, cfg.Fleet = g, fleet.Single(g, nil)
	data, err := NewBundles(cfg).Make(t.Context(), api.DoctorSandbox, "1000")
	if err != nil {
		t.Fatal(err)
	}
	_, files := unpack(t, data)
	if n := len(files["job/agent.log"]); n != 1000 {
		t.Errorf("%d bytes of the agent's log", n)
	}
	if n := len(files["sandbox/console.log"]); n == 0 || n > maxTail || *g.read > maxConsole+(1<<20) {
		t.Errorf("%d bytes of the console, %d read", n, *g.read)
	}
}

// A file with a credential that is too long to be redacted as a whole is an error.
func TestSecretFileIsNotCut(t *testing.T) {
	cfg := testBundles(t)
	file := filepath.Join(t.TempDir(), "long")
	if err := os.WriteFile(file, bytes.Repeat([]byte("s"), maxSecretFile+1), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg.SecretFiles = []string{file}
	if _, err := NewBundles(cfg).Make(t.Context(), api.DoctorSandbox, "1000"); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Error(err)
	}
}

func TestArchiveHasALimit(t *testing.T) {
	a := newArchive(api.DoctorJob, "", nil)
	for i := range maxBundle/maxFile + 1 {
		a.put(fmt.Sprint(i), strings.Repeat("x\n", maxFile/2+10), "")
	}
	if len(a.manifest.Files) != maxBundle/maxFile || len(a.manifest.Errors) != 1 || a.manifest.Errors[0].Code != string(agentlab.CodeLimit) {
		t.Errorf("%d files, errors %v", len(a.manifest.Files), a.manifest.Errors)
	}
	if f := a.manifest.Files[0]; f.Size > maxFile || f.Truncated == "" {
		t.Errorf("the first file is %+v", f)
	}
	a.doc("large", strings.Repeat("x", maxFile))
	if n := len(a.manifest.Errors); n != 2 {
		t.Errorf("%d errors", n)
	}
}
