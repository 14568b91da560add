package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
)

// listing returns the files below dir with their modes, and without those that
// the embedded trees bring.
func listing(t *testing.T, dir string) string {
	t.Helper()
	var out strings.Builder
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		rel, _ := filepath.Rel(dir, path)
		out.WriteString(info.Mode().String() + " " + rel + "\n")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out.String()
}

const scripts = `-rwxr-xr-x apt.sh
-rwxr-xr-x cloud.sh
-rwxr-xr-x enter.sh
-rwxr-xr-x fetch.sh
-rwxr-xr-x finish.sh
-rwxr-xr-x go.sh
-rwxr-xr-x packages.sh
-rwxr-xr-x seal.sh
-rwxr-xr-x setup.sh
`

const ofRecipe = `-rw-r--r-- apt.conf
-rw-r--r-- commands
-rw-r--r-- extra.list
-rw-r--r-- extra/01
-rw-r--r-- extra/02
-rw-r--r-- extra/03
-rw-r--r-- files/etc/apt/keyrings/fixture.asc
-rw-r--r-- files/etc/apt/sources.list.d/fixture.sources
-r--r----- files/etc/sudoers.d/agentlab
-rw-r--r-- files/etc/direnv/direnv.toml
-rwxr-xr-x files/etc/profile.d/agentlab-direnv.sh
-rw-r--r-- files/etc/ssh/sshd_config.d/10-agentlab.conf
-rw-r--r-- files/etc/systemd/journald.conf.d/agentlab.conf
-rw-r--r-- files/etc/tmpfiles.d/tmp.conf
-rw-r--r-- go.list
-rw-r--r-- kind
-rw-r--r-- npm.packages
-rw-r--r-- packages
-rw-r--r-- pip.specs
-rw-r--r-- run/01
-rw-r--r-- run/02
-rw-r--r-- shell
`

// What is staged depends on the kind and the recipe, and not on the umask.
func TestStage(t *testing.T) {
	defer unix.Umask(unix.Umask(0o077))
	url := registry(t)
	r, err := ParseRecipe([]byte("name: x\n" + everythingRecipe(t, url)))
	if err != nil {
		t.Fatal(err)
	}
	runner := filepath.Join(t.TempDir(), "runner")
	if err := writeFile(runner, "the runner", 0o600); err != nil {
		t.Fatal(err)
	}
	for kind, own := range map[Kind]string{
		Direct: `-rw-r--r-- files/etc/apt/apt.conf.d/90agentlab
-rw-r--r-- files/etc/apt/sources.list.d/debian.sources
-rw-r--r-- files/etc/default/locale
-rw-r--r-- files/etc/dpkg/dpkg.cfg.d/agentlab-slim
-rw-r--r-- files/etc/fstab
-rw-r--r-- files/etc/hostname
-rw-r--r-- files/etc/hosts
-rw-r--r-- files/etc/resolv.conf
-rw-r--r-- files/etc/systemd/system/agent-runner.service
-rw-r--r-- files/etc/systemd/system/agent-secrets-cleanup.service
`,
		Cloud: `-rw-r--r-- agent-runner
-rw-r--r-- files/etc/cloud/cloud.cfg.d/99_agentlab.cfg
-rw-r--r-- files/etc/sysctl.d/90-agentlab.conf
-rw-r--r-- files/etc/systemd/system/agentlab-guest.path
-rw-r--r-- files/etc/systemd/system/agentlab-guest.service
-rw-r--r-- npm.specs
-rw-r--r-- withheld
`,
	} {
		dir := t.TempDir()
		if err := r.Stage(t.Context(), StageOptions{Kind: kind, Suite: "noble", Runner: runner}, dir); err != nil {
			t.Fatal(err)
		}
		got := listing(t, dir)
		for _, line := range strings.SplitAfter(scripts+ofRecipe+own, "\n") {
			if !strings.Contains(got, line) {
				t.Errorf("%s: no %s", kind, line)
			}
			got = strings.Replace(got, line, "", 1)
		}
		if got != "" {
			t.Errorf("%s: also\n%s", kind, got)
		}
		if info, err := os.Stat(filepath.Join(dir, "files", "etc", "apt")); err != nil || info.Mode().Perm() != 0o755 {
			t.Errorf("%s: the mode of a directory: %v, %v", kind, info, err)
		}
		for name, want := range map[string]string{
			"kind": string(kind) + "\n", "extra/03": "a file\n", "pip.specs": "fixture-pip==1.0\n", "commands": "fixture-npm\nfixture-pip\n",
			"extra.list": "01 0644 root /etc/profile.d/fixture.sh\n02 0600 agent /home/agent/.config/fixture\n03 0644 root /usr/local/src/file\n",
			"files/etc/apt/sources.list.d/fixture.sources": "Types: deb\nURIs: " + url + "/apt\nSuites: ./\nSigned-By: /etc/apt/keyrings/fixture.asc\n",
		} {
			if got := readTrimmed(filepath.Join(dir, name)); got != strings.TrimSpace(want) {
				t.Errorf("%s: %s is\n%s\nwant\n%s", kind, name, got, want)
			}
		}
	}
	if r.StageKey(Cloud) == r.StageKey(Direct) {
		t.Error("both kinds have the same key")
	}
}

// The names of the system take the places of {suite} and {distribution}.
func TestRepositoryOfTheSystem(t *testing.T) {
	a := Repository{URL: "https://download.docker.com/linux/{distribution}", Suite: "{suite}"}
	for system, want := range map[string]string{"bookworm": "https://download.docker.com/linux/debian bookworm", "noble": "https://download.docker.com/linux/ubuntu noble"} {
		if src := a.source(system); src.uri+" "+src.suite != want {
			t.Errorf("%s: %s %s, want %s", system, src.uri, src.suite, want)
		}
	}
}

// A download is used only with the right sum, and is downloaded once.
func TestDownload(t *testing.T) {
	var asked atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		switch r.URL.Path {
		case "/good":
			_, _ = w.Write([]byte("good"))
		case "/archive": // some servers take an archive for its contents
			if r.Header.Get("Accept-Encoding") == "gzip" {
				w.Header().Set("Content-Encoding", "gzip")
			}
			_, _ = w.Write([]byte("packed"))
		case "/short":
			w.Header().Set("Content-Length", "100")
			_, _ = w.Write([]byte("good"))
		case "/redirect":
			http.Redirect(w, r, "file:///etc/passwd", http.StatusFound)
		default:
			http.NotFound(w, r)
		}
	}))
	defer server.Close()
	sum := func(text string) string {
		h := sha256.Sum256([]byte(text))
		return hex.EncodeToString(h[:])
	}
	root := t.TempDir()
	cache, to := filepath.Join(root, downloadsDir), filepath.Join(t.TempDir(), "to")
	for _, tc := range []struct {
		path, sum string
		code      agentlab.Code
	}{
		{"/good", sum("bad"), agentlab.CodeDenied},
		{"/short", sum("good"), agentlab.CodeUnavailable},
		{"/redirect", sum("good"), agentlab.CodeUnavailable},
		{"/missing", sum("good"), agentlab.CodeInvalid},
	} {
		err := File{URL: server.URL + tc.path, SHA256: tc.sum}.fetch(t.Context(), to, cache)
		if agentlab.CodeOf(err) != tc.code || agentlab.HintOf(err) == "" {
			t.Errorf("%s: %v (%s), want %s", tc.path, err, agentlab.CodeOf(err), tc.code)
		}
		if left, _ := os.ReadDir(cache); len(left) > 0 {
			t.Errorf("%s: the cache has %v", tc.path, left)
		}
	}
	good := File{URL: server.URL + "/good", SHA256: sum("good")}
	fetch := func(times int32) {
		t.Helper()
		asked.Store(0)
		if err := good.fetch(t.Context(), to, cache); err != nil || readTrimmed(to) != "good" || asked.Load() != times {
			t.Errorf("%v, %q, asked %d times, want %d", err, readTrimmed(to), asked.Load(), times)
		}
		_ = os.Remove(to)
	}
	fetch(1)
	fetch(0)
	if err := os.WriteFile(filepath.Join(cache, good.SHA256), []byte("damaged"), 0o600); err != nil {
		t.Fatal(err)
	}
	fetch(1)
	fetch(0)
	good.URL, good.SHA256 = server.URL+"/archive", sum("packed")
	if err := good.fetch(t.Context(), to, ""); err != nil {
		t.Errorf("a file that the server would compress: %v", err)
	}
	good.SHA256 = sum("good")
	// It is removed when no build has used it for a month.
	for _, days := range []int{29, 31} {
		NewStore(root, Options{Now: func() time.Time { return time.Now().AddDate(0, 0, days) }}).Sweep(context.Background())
		if _, err := os.Stat(filepath.Join(cache, good.SHA256)); (err == nil) != (days < 30) {
			t.Errorf("after %d days: %v", days, err)
		}
	}
}
