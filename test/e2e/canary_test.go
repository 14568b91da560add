package e2e

import (
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf16"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/test/fakenet"
)

// canary is one secret. Each of its cores is a run of random letters and
// digits, which no escape changes, so that whatever form the secret takes,
// the core is there as it is, or in base64, in hexadecimal or in UTF-16.
type canary struct {
	key   string // in the bundle
	value string
	cores []string
}

const coreAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"

func core() string {
	p := make([]byte, 24)
	_, _ = rand.Read(p) // never fails
	for i := range p {
		p[i] = coreAlphabet[int(p[i])%len(coreAlphabet)]
	}
	return string(p)
}

// canaries are secrets of awkward content for every key of a bundle. The %
// signs in a shape become cores.
func canaries(t *testing.T) []canary {
	t.Helper()
	var out []canary
	for key, shape := range map[string]string{
		"env.CANARY_PLAIN":     "%",
		"env.CANARY_AWKWARD":   "p@ss/&\"'`$HOME\\ \u00e9%" + "!*;<>|%%20+=#{}[]~",
		"env.CANARY_LINES":     "-----BEGIN PRIVATE KEY-----\n%\n\n%\n-----END PRIVATE KEY-----\n",
		"env.CANARY_JSON":      `{"token": "%", "n": [1, "%"]}`,
		"env.CANARY_NAME":      "name-%",
		"env.CANARY_LONG":      strings.Repeat("%", 90),
		"git.token":            "ghp_%/&$+'",
		"claude_settings_json": `{"env": {"ANTHROPIC_AUTH_TOKEN": "%"}}`,
		"env.CANARY_FILE":      "from a file: %",
		"ssh_keys.example.net": "-----BEGIN OPENSSH PRIVATE KEY-----\n%\n-----END OPENSSH PRIVATE KEY-----\n",
		"git.ssh_private_key":  "-----BEGIN OPENSSH PRIVATE KEY-----\n%\n%\n-----END OPENSSH PRIVATE KEY-----\n",
	} {
		c := canary{key: key}
		parts := strings.Split(shape, "%")
		for i, part := range parts {
			c.value += part
			if i < len(parts)-1 {
				c.cores = append(c.cores, core())
				c.value += c.cores[i]
			}
		}
		out = append(out, c)
	}
	return out
}

// needles are all that is looked for, with the key that each comes from: the
// two halves of every core, so that a part that survived is found as well.
func needles(cs []canary) *needleSet {
	out := map[string]string{}
	for _, c := range cs {
		for _, whole := range c.cores {
			for _, half := range []string{whole[:len(whole)/2], whole[len(whole)/2:]} {
				for form, text := range forms(half) {
					out[text] = c.key + " (" + form + ")"
				}
			}
		}
	}
	return newNeedleSet(out)
}

func forms(s string) map[string]string {
	out := map[string]string{
		"plain": s, "hex": hex.EncodeToString([]byte(s)), "HEX": strings.ToUpper(hex.EncodeToString([]byte(s))),
	}
	for before := range 3 {
		text := base64.StdEncoding.EncodeToString([]byte(strings.Repeat("\x00", before) + s))
		out[fmt.Sprintf("base64 at %d", before)] = text[(before*8+5)/6 : (before+len(s))*8/6]
	}
	var wide []byte
	for _, u := range utf16.Encode([]rune(s)) {
		wide = append(wide, byte(u), byte(u>>8))
	}
	out["UTF-16"] = string(wide)
	return out
}

// needleSet finds many needles in one pass: what the first four bytes of a
// needle could be is looked up at every byte, the rest only then.
type needleSet struct {
	names map[string]string // of each needle, as needles made them
	heads [1 << 16]bool
	texts map[[4]byte][]string
}

func newNeedleSet(names map[string]string) *needleSet {
	s := &needleSet{names: names, texts: map[[4]byte][]string{}}
	for text := range names {
		head := [4]byte([]byte(text[:4]))
		s.heads[headHash(head[:])] = true
		s.texts[head] = append(s.texts[head], text)
	}
	return s
}

func headHash(p []byte) uint16 { return uint16((binary.LittleEndian.Uint32(p) * 2654435761) >> 16) }

// scan tells which needles stand in r.
func (s *needleSet) scan(r io.Reader) (found []string, err error) {
	const overlap = 256 // more than the longest needle
	buf := make([]byte, 0, 1<<20)
	for {
		n, err := io.ReadFull(r, buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		found = s.find(buf, found)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return found, nil
		}
		if err != nil {
			return found, err
		}
		buf = append(buf[:0], buf[len(buf)-overlap:]...)
	}
}

func (s *needleSet) find(buf []byte, found []string) []string {
	for i := 0; i+4 <= len(buf); i++ {
		if !s.heads[headHash(buf[i:])] {
			continue
		}
		for _, text := range s.texts[[4]byte(buf[i:])] {
			if bytes.HasPrefix(buf[i:], []byte(text)) && !slices.Contains(found, s.names[text]) {
				found = append(found, s.names[text])
			}
		}
	}
	return found
}

// agentMade reports whether the agent itself made a file: its work may contain
// the values that it received.
func agentMade(path string) bool {
	for _, own := range []string{"/outputs/", "/changes.diff", "/result.bundle"} {
		if strings.Contains(path, "/artifacts/") && strings.Contains(path, own) {
			return true
		}
	}
	return false
}

// scanHome is scan for the lab's home, disks and memories of sandboxes included.
func (l *lab) scanHome(find *needleSet) (found []string, size int64) {
	l.Helper()
	return l.scan(find, l.home)
}

// scanTemplates is scan for the shared templates that were used or made since
// began.
func (l *lab) scanTemplates(find *needleSet, began time.Time) (found []string, size int64) {
	l.Helper()
	templates := prepare(l)
	for _, name := range templatesIn(l, templates) {
		dir := filepath.Join(templates, name)
		if st, err := os.Stat(dir); err != nil || st.ModTime().Before(began) {
			continue
		}
		f, n := l.scan(find, dir)
		found, size = append(found, f...), size+n
	}
	return found, size
}

// scan looks at the name and the content of everything below dir. It returns
// what it found and how many bytes it read.
func (l *lab) scan(find *needleSet, dir string) (found []string, size int64) {
	l.Helper()
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, n := range find.find([]byte(path), nil) {
			found = append(found, fmt.Sprintf("%s in the name %s", n, path))
		}
		if !e.Type().IsRegular() || agentMade(path) {
			return nil
		}
		f, err := os.Open(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		defer func() { _ = f.Close() }()
		in := &data{f: f}
		hits, err := find.scan(in)
		size += in.n
		for _, n := range hits {
			found = append(found, fmt.Sprintf("%s in %s", n, strings.TrimPrefix(path, l.home)))
		}
		return err
	})
	if err != nil {
		l.Fatal(err)
	}
	return found, size
}

// data reads a file without its holes, which a guest's memory mostly consists
// of, and counts the bytes.
type data struct {
	f   *os.File
	pos int64 // of the next byte
	end int64 // of the data at pos
	n   int64
}

func (d *data) Read(p []byte) (int, error) {
	if d.pos >= d.end {
		var err error
		if d.pos, err = d.f.Seek(d.pos, unix.SEEK_DATA); errors.Is(err, unix.ENXIO) {
			return 0, io.EOF
		}
		if err == nil {
			d.end, err = d.f.Seek(d.pos, unix.SEEK_HOLE)
		}
		if err != nil {
			return 0, err
		}
	}
	n, err := d.f.ReadAt(p[:min(int64(len(p)), d.end-d.pos)], d.pos)
	d.pos, d.n = d.pos+int64(n), d.n+int64(n)
	if n > 0 {
		err = nil // the file may end here
	}
	return n, err
}

// procWatch looks at the arguments and the environment of every process of
// this machine, again and again.
type procWatch struct {
	find *needleSet
	stop chan struct{}
	wg   sync.WaitGroup

	mu    sync.Mutex
	found map[string]bool
	seen  int
}

func watchProcesses(find *needleSet) *procWatch {
	w := &procWatch{find: find, stop: make(chan struct{}), found: map[string]bool{}}
	w.wg.Go(func() {
		tick := time.NewTicker(200 * time.Millisecond)
		defer tick.Stop()
		for {
			w.look()
			select {
			case <-tick.C:
			case <-w.stop:
				return
			}
		}
	})
	return w
}

func (w *procWatch) look() {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err != nil {
			continue
		}
		for _, name := range []string{"cmdline", "environ"} {
			p, _ := os.ReadFile(filepath.Join("/proc", e.Name(), name)) // it may have ended
			if bytes.Contains(p, []byte("GATEWAY_INTERFACE=CGI")) {
				continue // the fake git host on the internet gets its password
			}
			hits := w.find.find(p, nil)
			w.mu.Lock()
			w.seen++
			for _, h := range hits {
				w.found[h+" in "+name+" of a process"] = true
			}
			w.mu.Unlock()
		}
	}
}

func (w *procWatch) end() (found []string, seen int) {
	close(w.stop)
	w.wg.Wait()
	for f := range w.found {
		found = append(found, f)
	}
	return found, w.seen
}

// canaryTask is an agent that shows its secrets in every way that programs do.
const canaryTask = `
echo begun
for k in PLAIN AWKWARD LINES JSON LONG FILE; do
  eval "v=\$CANARY_$k"
  echo "$k: $v"
  printf 'user:%s' "$v" | base64
  printf 'x%s' "$v" | base64 -w0; echo
  printf %s "$v" | od -An -v -tx1
  printf %s "$v" | od -An -v -tx1 | tr -d ' \n'; echo
  printf %s "$v" | fold -w 20; echo
  bash -c 'printf "%q\n" "$0"; declare -p CANARY_'$k "$v"
done
env | sort
bash -xc ': "$CANARY_AWKWARD" "$CANARY_LINES"'
git log --format=%an || true
`

// TestCanary runs jobs to each of their ends with secrets of awkward content,
// and finds none of them, in no encoding, anywhere but in the encrypted bundle
// and in what the agent itself made.
func TestCanary(t *testing.T) {
	t.Parallel()
	l, n := newNetLab(t)
	cs := canaries(t)
	find := needles(cs)
	marker := core() // no secret: it shows that the scan sees the disks
	checkScan(t, l, find, cs)
	watch := watchProcesses(find)
	began := time.Now()
	l.ok("daemon", "start")
	for _, c := range cs {
		if c.key != "env.CANARY_FILE" {
			l.secret(c.key, c.value)
			continue
		}
		file := filepath.Join(t.TempDir(), "secret")
		if err := os.WriteFile(file, []byte(c.value), 0o600); err != nil {
			t.Fatal(err)
		}
		l.ok("secrets", "set", c.key, "--ref", "file:"+file)
	}
	nothing := func(t *testing.T, when string) {
		t.Helper()
		found, size := l.scanHome(find)
		slices.Sort(found)
		for _, f := range found {
			t.Errorf("%s: %s", when, f)
		}
		t.Logf("%s: %d bytes scanned for %d needles", when, size, len(find.names))
	}
	onDisk := func(t *testing.T) {
		t.Helper()
		if found, _ := l.scanHome(newNeedleSet(map[string]string{marker: "marker"})); len(found) == 0 {
			t.Error("the scan does not see what the guest wrote to its disk")
		}
	}
	repo := sampleRepo(t)
	t.Run("pushed", func(t *testing.T) {
		url := l.canaryHost(t, n, cs)
		j, r := l.job("--repo", url, "--ref", "main", "--agent", "shell", "--task", canaryTask+"echo more >> README; git commit -qam More")
		if j.Status != "COMPLETED" || !j.Result.Pushed {
			t.Fatalf("%+v\n%v\n%s", j, r, l.ok("job", "logs", j.ID))
		}
		nothing(t, "after a push")
	})
	t.Run("completed", func(t *testing.T) {
		j, r := l.job("--repo", repo, "--agent", "shell", "--keepalive", "--task", canaryTask+"echo "+marker+" > $HOME/marker; sync\n")
		if j.Status != "COMPLETED" {
			t.Fatalf("%s: %s\n%v", j.Status, j.Reason, r)
		}
		checkLog(t, l.ok("job", "logs", j.ID), find)
		vm := strconv.Itoa(j.SandboxVMID)
		l.ok("exec", "--user", "root", vm, "--", "sync")
		l.canarySnapshots(t, vm, nothing)
		l.ok("sandbox", "stop", vm)
		onDisk(t)
		nothing(t, "after a full job, its sandbox kept")
		l.ok("sandbox", "destroy", "--force", vm)
	})
	t.Run("failed", func(t *testing.T) {
		j, _ := l.job("--repo", repo, "--agent", "shell", "--task",
			canaryTask+`mkdir out; echo x > "out/$CANARY_NAME.txt"; git checkout -qb "$CANARY_NAME"; git commit -q --allow-empty -m "$CANARY_PLAIN"; exit 3`)
		if j.Status != "FAILED" {
			t.Fatalf("%s: %s", j.Status, j.Reason)
		}
		checkOutput(t, l.ok("--json", "job", "show", j.ID), find)
		nothing(t, "after a failure")
	})
	t.Run("timeout", func(t *testing.T) {
		j, _ := l.job("--repo", repo, "--agent", "shell", "--ttl", "1m", "--task", canaryTask+"sleep 600")
		if j.Status != "TIMEOUT" {
			t.Fatalf("%s: %s", j.Status, j.Reason)
		}
		nothing(t, "after a time-out")
	})
	t.Run("crash", func(t *testing.T) { l.canaryCrash(t, repo, marker, nothing, onDisk) })
	checkOutput(t, l.ok("--json", "events"), find)
	l.noSandboxes()
	found, size := l.scanTemplates(find, began)
	if size == 0 {
		t.Error("no template was used")
	}
	running, seen := watch.end()
	for _, f := range append(found, running...) {
		t.Error(f)
	}
	t.Logf("looked %d times at arguments and environments of processes", seen)
}

// canaryHost makes a git host that wants the git credential of the bundle.
func (l *lab) canaryHost(t *testing.T, n *fakenet.Net, cs []canary) (url string) {
	t.Helper()
	i := slices.IndexFunc(cs, func(c canary) bool { return c.key == "git.token" })
	host, err := fakenet.NewGitHost(t.TempDir(), fakenet.GitConfig{User: "x-access-token", Password: cs[i].value})
	if err == nil {
		_, err = host.Create(t.Context(), "org/repo.git", map[string]string{"README": "hello\n"})
	}
	if err == nil {
		_, err = n.Git("git.example.com", host)
	}
	if err != nil {
		t.Fatal(err)
	}
	l.secret("git.url", "http://git.example.com")
	return "http://git.example.com/org/repo.git"
}

// canaryCrash kills all that runs on the host in the middle of a job.
func (l *lab) canaryCrash(t *testing.T, repo, marker string, nothing func(*testing.T, string), onDisk func(*testing.T)) {
	t.Helper()
	id := l.submit("--repo", repo, "--agent", "shell", "--task", canaryTask+"echo "+marker+" > $HOME/marker; sync; echo synced; sleep 600")
	if !eventually(commandLimit, func() bool { return strings.Contains(l.run("", "job", "logs", id).stdout, "synced") }) {
		t.Fatal("the agent did not start")
	}
	for _, words := range [][]string{{"agentlabd", "run"}, {"agentlabd", "vmm"}} {
		if err := l.kill9(words...); err != nil {
			t.Fatal(err)
		}
	}
	if !eventually(settleLimit, func() bool { return len(l.processes("qemu-system")) == 0 }) {
		t.Fatal("QEMU outlives its supervisor")
	}
	onDisk(t)
	nothing(t, "after a crash")
	if j := l.finish(id); j.Status != string(agentlab.JobFailed) {
		t.Errorf("%s: %s", j.Status, j.Reason)
	}
	l.noSandboxes()
	nothing(t, "after the recovery")
}

// checkScan makes sure that what is looked for is found.
func checkScan(t *testing.T, l *lab, find *needleSet, cs []canary) {
	t.Helper()
	for i, form := range []func(string) string{
		func(s string) string { return "x" + s },
		func(s string) string { return base64.StdEncoding.EncodeToString([]byte("x" + s)) },
		func(s string) string { return hex.EncodeToString([]byte(s)) },
		strconv.QuoteToASCII,
	} {
		planted := filepath.Join(l.home, "planted")
		if err := os.WriteFile(planted, []byte(strings.Repeat(" ", 4<<20-30)+form(cs[i].value)), 0o600); err != nil {
			t.Fatal(err)
		}
		if found, _ := l.scanHome(find); len(found) == 0 {
			t.Fatalf("%s is not found in form %d", cs[i].key, i)
		}
		if err := os.Remove(planted); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("sleep", "60")
	cmd.Env = []string{"LEAK=" + cs[0].value}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w := watchProcesses(find)
	seen := eventually(settleLimit, func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return len(w.found) > 0
	})
	w.end()
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if !seen {
		t.Fatal("a secret in an environment is not seen")
	}
}

// checkLog makes sure that the agent did show its secrets, and none is left.
func checkLog(t *testing.T, log string, find *needleSet) {
	t.Helper()
	if !strings.Contains(log, "begun") || strings.Count(log, "[redacted]")+strings.Count(log, "******") < 20 {
		t.Errorf("the log shows no redacted secrets: %q", tail(log, 60))
	}
	checkOutput(t, log, find)
	if t.Failed() {
		t.Logf("the log:\n%s", log)
	}
}

func checkOutput(t *testing.T, text string, find *needleSet) {
	t.Helper()
	if json.Valid([]byte(text)) {
		var v any
		_ = json.Unmarshal([]byte(text), &v) // it is valid
		text += fmt.Sprint(v)
	}
	for _, f := range find.find([]byte(text), nil) {
		t.Errorf("%s is shown", f)
	}
}

// canarySnapshots saves sandboxes. One that has received secrets, whose VM is
// given, is refused. What is saved of one that has received none has no secret.
func (l *lab) canarySnapshots(t *testing.T, secret string, nothing func(*testing.T, string)) {
	t.Helper()
	const refused = "has received secrets"
	if r := l.run("", "sandbox", "snapshot", "save", secret, "--name", "secrets"); r.code == 0 || !strings.Contains(r.stderr, refused) {
		t.Errorf("a sandbox that has received secrets is saved: %v", r)
	}
	l.profile("bare", "name: bare\nresources: {cores: 1, memory_mb: 512}\n")
	l.ok("sandbox", "new", "--name", "bare", "--profile", "bare")
	marker := core()
	l.ok("exec", "bare", "--", "sh", "-c", "echo "+marker+" >/dev/shm/marker; echo "+marker+" >~/marker; sync")
	l.ok("sandbox", "snapshot", "save", "bare", "--name", "one", "--keep")
	l.ok("sandbox", "suspend", "--to-disk", "bare")
	dir := filepath.Join(l.home, "state", "snapshots")
	found, _ := l.scan(newNeedleSet(map[string]string{marker: "marker"}), dir)
	for _, name := range []string{"/memory", ".qcow2"} {
		if !slices.ContainsFunc(found, func(f string) bool { return strings.HasSuffix(f, name) }) {
			t.Errorf("the scan does not see what the guest has in its %s: %q", name, found)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("snapshots on disk: %v, %v", left, err)
	}
	nothing(t, "with a snapshot, and a memory on disk")
	l.ok("sandbox", "destroy", "--force", "bare")
	nothing(t, "with the snapshot of a destroyed sandbox")
	l.ok("sandbox", "snapshot", "delete", "bare", "--name", "one", "--yes")
}
