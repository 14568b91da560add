package pvenode_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/test/guard"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// TestTranscripts replays every recorded command and call against a fake node
// that was set up as the recorded one was, and compares what it answers. What
// deviates is listed in deviations, each with its reason; a listed deviation
// that does not happen is a failure too.
func TestTranscripts(t *testing.T) {
	for _, version := range []string{"8.4", "9.2"} {
		files, err := filepath.Glob(filepath.Join("testdata", "transcripts", version, "t*.txt"))
		if err != nil || len(files) == 0 {
			t.Fatalf("no recordings of %s: %v", version, err)
		}
		for _, f := range files {
			name := filepath.Base(f)
			t.Run(version+"/"+strings.TrimSuffix(name, ".txt"), func(t *testing.T) {
				t.Parallel()
				replayFile(t, version, name)
			})
		}
	}
}

// replay is one recording on its way.
type replay struct {
	t       *testing.T
	version string
	file    string // "t3"
	n       *pvenode.Node
	token   string // of the next call: "root@pam!t1=…"; "" for no header
	http    *http.Client

	keep, made string            // tokens that steps put aside
	release    func()            // of a lock that a step holds
	pids       map[string]string // recorded processes of the guest, and ours
	guestsMu   sync.Mutex
	guests     map[int]*guest

	commands, calls, raws, deviated int
	used                            map[int]bool // which deviations happened
}

// slowProxy is the limit of a call in replays in which one exceeds it.
const slowProxy = 5 * time.Second

func replayFile(t *testing.T, version, name string) {
	waits := pvenode.ShortWaits()
	if strings.HasPrefix(name, "t9") { // a worker holds a lock for longer than all that follows takes
		waits.ZvolWorker = guard.Patience
		waits.Proxy = slowProxy
	}
	r := newReplayOn(t, version, strings.SplitN(strings.TrimSuffix(name, ".txt"), "-", 2)[0],
		pvenode.Config{Waits: waits, NoStatus: true})
	if strings.HasSuffix(name, "t6-power.txt") {
		r.file = "t6-power"
	}
	own := scripts[r.file]
	entries := readTranscript(t, version, name)
	own.setup(r)
	seen := map[string]int{}
	rawSeen := map[string]int{}
	for i := range entries {
		e := &entries[i]
		r.before(own, e, seen)
		switch e.kind {
		case command:
			r.commands++
			r.compareCommand(e)
		case apiCall:
			r.calls++
			r.compareCall(e)
		case rawText:
			r.raws += len(e.raw)
			r.compareRaw(own, e, rawSeen)
		}
	}
	r.unusedDeviations()
	t.Logf("%s %s: %d commands, %d calls, %d other lines replayed; %d deviate", version, name, r.commands, r.calls, r.raws, r.deviated)
}

func newReplay(t *testing.T, version, file string) *replay {
	return newReplayOn(t, version, file, pvenode.Config{Waits: pvenode.ShortWaits()})
}

// newReplayOn is newReplay on a node that is configured otherwise.
func newReplayOn(t *testing.T, version, file string, cfg pvenode.Config) *replay {
	r := &replay{t: t, version: version, file: file, used: map[int]bool{}, pids: map[string]string{}, guests: map[int]*guest{}}
	cfg.Version, cfg.Boot = version, r.boot
	r.n = pvenode.New(t, cfg)
	r.http = &http.Client{Transport: &http.Transport{
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true},
		DisableKeepAlives: true,
	}}
	r.token = "root@pam!t1=" + r.newToken("root@pam", "t1", "0")
	return r
}

func (r *replay) newToken(user, name, privsep string) string {
	r.t.Helper()
	out := r.sh("pveum", "user", "token", "add", user, name, "--privsep", privsep, "--output-format", "json")
	var tok struct{ Value string }
	if err := json.Unmarshal([]byte(out), &tok); err != nil {
		r.t.Fatalf("token: %v in %q", err, out)
	}
	return tok.Value
}

// before does the steps that the recording does not show.
func (r *replay) before(script script, e *entry, seen map[string]int) {
	keys := []string{e.text}
	if seen["== "+e.section] == 0 {
		keys = append([]string{"== " + e.section}, keys...)
	}
	for _, k := range keys {
		seen[k]++
		for _, s := range script.steps {
			if nth := max(s.nth, 1); s.before == k && nth == seen[k] {
				s.do(r)
			}
		}
	}
}

// sh runs a command of the node that the recording does not show, which must
// succeed, and returns its output.
func (r *replay) sh(args ...string) string {
	r.t.Helper()
	if len(args) == 1 {
		args = strings.Split(args[0], " ")
	}
	out, errs, rc := r.run(args)
	if rc != 0 {
		r.t.Fatalf("%s: exit %d: %s%s", strings.Join(args, " "), rc, out, errs)
	}
	return out
}

// run runs a program of the node.
func (r *replay) run(args []string) (stdout, stderr string, rc int) {
	r.t.Helper()
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(r.t.Context(), filepath.Join(r.n.Bin(), args[0]), args[1:]...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		r.t.Fatalf("%v: %v", args, err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

func lines(s string) []string {
	if s == "" {
		return nil
	}
	return strings.Split(strings.TrimSuffix(s, "\n"), "\n")
}

func (r *replay) compareCommand(e *entry) {
	out, errs, rc := r.run(argv(e.text))
	if strings.HasPrefix(e.text, "pveum user token add ") {
		var tok struct{ Value string }
		if err := json.Unmarshal([]byte(out), &tok); err == nil {
			r.made = tok.Value
		}
	}
	diff := difference("stdout", normalizeLines(e.out), normalizeLines(lines(out))) +
		difference("stderr", normalizeLines(e.err), normalizeLines(lines(errs))) +
		difference("exit code", []string{fmt.Sprint(e.rc)}, []string{fmt.Sprint(rc)})
	r.verdict(e, diff)
}

// verdict reports a difference, unless it is listed.
func (r *replay) verdict(e *entry, diff string) {
	r.t.Helper()
	for i, d := range deviations {
		if (d.version != "" && d.version != r.version) || d.file != r.file || d.text != e.text {
			continue
		}
		if diff != "" {
			r.used[i] = true
			r.deviated++
			return
		}
	}
	if diff != "" {
		r.t.Errorf("line %d, %s %s\n%s", e.line, e.kind, e.text, diff)
	}
}

func (r *replay) unusedDeviations() {
	for i, d := range deviations {
		if d.file == r.file && (d.version == "" || d.version == r.version) && !r.used[i] {
			r.t.Errorf("the deviation of %q does not occur: remove it from the list", d.text)
		}
	}
}

// answer is what the API answered.
type answer struct {
	status string
	body   string
	header http.Header
	closed bool // the server closes the connection
}

// do sends a request; a header of "" is not sent.
func (r *replay) do(method, path, contentType, body string, header map[string]string) answer {
	r.t.Helper()
	var reader io.Reader
	if body != "" {
		reader = strings.NewReader(body)
	}
	ctx, cancel := context.WithTimeout(r.t.Context(), guard.Patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, r.n.URL()+path, reader)
	if err != nil {
		r.t.Fatal(err)
	}
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	if r.token != "" {
		req.Header.Set("Authorization", "PVEAPIToken="+r.token)
	}
	for k, v := range header {
		if k == "Transfer-Encoding" {
			req.ContentLength = -1
			continue
		}
		req.Header.Set(k, v)
	}
	resp, err := r.http.Do(req)
	if err != nil {
		r.t.Fatalf("%s %s: %v", method, path, err)
	}
	defer func() { _ = resp.Body.Close() }()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatalf("%s %s: %v", method, path, err)
	}
	return answer{status: resp.Status, body: strings.TrimSuffix(string(data), "\n"), header: resp.Header, closed: resp.Close}
}

// call makes a call of the API as the recordings did: parameters in the query
// of GET and DELETE, else as a form.
func (r *replay) call(method, path string, params [][2]string) answer {
	v := url.Values{}
	for _, p := range params {
		v.Add(p[0], p[1])
	}
	// The path is sent as it is: a UPID keeps its colons.
	path = "/api2/json" + path
	switch method {
	case http.MethodGet, http.MethodDelete:
		if len(v) > 0 {
			path += "?" + v.Encode()
		}
		return r.do(method, path, "", "", nil)
	default:
		return r.do(method, path, "application/x-www-form-urlencoded", v.Encode(), nil)
	}
}

func (r *replay) compareCall(e *entry) {
	method, path, params := parameters(r.t, e.text)
	for i := range params {
		if pid, ok := r.pids[params[i][1]]; ok && params[i][0] == "pid" {
			params[i][1] = pid
		}
	}
	got := r.call(method, path, params)
	diff := difference("status", []string{normalize(e.status)}, []string{normalize(got.status)}) +
		difference("body", jsonLines(e.body), jsonLines(got.body))
	if upid := upidOf(got.body); e.task != "" && upid != "" {
		diff += r.compareTask(e, upid)
	}
	r.verdict(e, diff)
}

func jsonLines(s string) []string {
	if s == "" {
		return nil
	}
	out, err := normalizeJSON(s)
	if err != nil {
		return []string{s}
	}
	return []string{out}
}

var upidForm = regexp.MustCompile(`^UPID:[a-z]+:[0-9A-F]{8}:[0-9A-F]{8,9}:[0-9A-F]{8}:[a-z]+:[^:]*:[^:]+:$`)

func upidOf(body string) string {
	var a struct{ Data any }
	if json.Unmarshal([]byte(body), &a) != nil {
		return ""
	}
	if s, ok := a.Data.(string); ok && upidForm.MatchString(s) {
		return s
	}
	return ""
}

// compareTask waits for the end of a task and compares its status and log.
func (r *replay) compareTask(e *entry, upid string) string {
	status := r.waitTask(upid)
	diff := difference("task", jsonLines(e.task), jsonLines(status))
	if len(e.log) > 0 {
		diff += difference("log", normalizeLines(e.log), normalizeLines(r.taskLog(upid)))
	}
	return diff
}

// waitTask polls, as the recordings did, until a task has stopped, and returns
// the body of its status.
func (r *replay) waitTask(upid string) string {
	r.t.Helper()
	if upid == "" {
		r.t.Fatal("no task was started")
	}
	path := "/nodes/pve/tasks/" + url.PathEscape(upid) + "/status"
	limit := time.After(guard.Patience)
	for {
		a := r.call(http.MethodGet, path, nil)
		var s struct{ Data struct{ Status string } }
		if err := json.Unmarshal([]byte(a.body), &s); err != nil {
			r.t.Fatalf("%s: %s: %v", path, a.status, err)
		}
		if s.Data.Status == "stopped" {
			return a.body
		}
		select {
		case <-limit:
			r.t.Fatalf("%s does not end: %s", upid, a.body)
		case <-time.After(10 * time.Millisecond): // the API can only be polled
		}
	}
}

func (r *replay) taskLog(upid string) []string {
	a := r.call(http.MethodGet, "/nodes/pve/tasks/"+url.PathEscape(upid)+"/log", nil)
	var l struct{ Data []struct{ T string } }
	if err := json.Unmarshal([]byte(a.body), &l); err != nil {
		r.t.Fatalf("log: %s: %v", a.status, err)
	}
	var out []string
	for _, e := range l.Data {
		out = append(out, e.T)
	}
	return out
}

func (r *replay) compareRaw(script script, e *entry, seen map[string]int) {
	makers := script.raw[e.section]
	i := seen[e.section]
	seen[e.section]++
	if i >= len(makers) {
		r.t.Errorf("line %d: no call of the test prints these lines of %q:\n%s", e.line, e.section, strings.Join(e.raw, "\n"))
		return
	}
	want, got := rawLines(e), rawLines(&entry{section: e.section, raw: makers[i](r)})
	r.verdict(e, difference("lines", want, got))
}

// rawLines normalizes lines of no entry. Those of eight processes come in any
// order, and how many of them wait is chance.
func rawLines(e *entry) []string {
	var out []string
	for _, l := range e.raw {
		if l = normalize(normalizeJSONLine(strings.TrimSpace(l))); l != "trying to acquire lock..." {
			out = append(out, l)
		}
	}
	if strings.HasPrefix(e.section, "eight clones") {
		slices.Sort(out)
	}
	if len(out) > 0 && out[0] == "fw| [OPTIONS]" { // of a hash
		end := slices.Index(out, "fw| [IPSET ipfilter-net0]")
		slices.Sort(out[1:max(end, 1)])
	}
	return out
}

// writeFile writes a file of the node.
func (r *replay) writeFile(path string, mode os.FileMode, content string) {
	r.t.Helper()
	at := r.n.HostPath(path)
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		r.t.Fatal(err)
	}
	if err := os.WriteFile(at, []byte(content), mode); err != nil {
		r.t.Fatal(err)
	}
	if err := os.Chmod(at, mode); err != nil {
		r.t.Fatal(err)
	}
}
