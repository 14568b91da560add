package e2e

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/agentlab-vm/agentlab/test/fakenet"
	"github.com/agentlab-vm/agentlab/test/netlab"
)

// registry is a host with packages, which counts its requests by path.
type registry struct {
	files map[string][]byte

	mu    sync.Mutex
	asked map[string]int
}

// ServeHTTP implements http.Handler.
func (g *registry) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	g.mu.Lock()
	g.asked[r.URL.Path]++
	g.mu.Unlock()
	body, ok := g.files[r.URL.Path]
	if !ok {
		http.NotFound(w, r)
		return
	}
	if strings.HasPrefix(r.URL.Path, "/simple/") {
		w.Header().Set("Content-Type", "text/html")
	}
	_, _ = w.Write(body)
}

func (g *registry) times(path string) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.asked[path]
}

// The packages of the registry.
const (
	debPath   = "/pool/main/l/left_1.0_all.deb"
	wheelPath = "/files/left-1.0-py3-none-any.whl"
	goPath    = "/go/example.com/left/@v/v1.0.0.info"
)

func newRegistry(t *testing.T) *registry {
	t.Helper()
	wheel := wheel(t)
	sum := sha256.Sum256(wheel)
	deb := deb(t)
	debSum := sha256.Sum256(deb)
	packages := fmt.Sprintf("Package: left\nVersion: 1.0\nArchitecture: all\nMaintainer: Test <test@example.com>\nFilename: .%s\nSize: %d\nSHA256: %s\nDescription: left\n\n",
		debPath, len(deb), hex.EncodeToString(debSum[:]))
	return &registry{asked: map[string]int{}, files: map[string][]byte{
		debPath: deb, "/Packages": []byte(packages), wheelPath: wheel, goPath: []byte(`{"Version":"v1.0.0"}`),
		"/simple/left/": []byte(`<!DOCTYPE html><a href="..` + "/.." + wheelPath + "#sha256=" + hex.EncodeToString(sum[:]) + `">left-1.0-py3-none-any.whl</a>`),
	}}
}

// deb makes a package of Debian.
func deb(t *testing.T) []byte {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{"DEBIAN/control": "Package: left\nVersion: 1.0\nArchitecture: all\nMaintainer: Test <test@example.com>\nDescription: left\n", "usr/share/left": "left\n"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, "p", name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "p", name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.Command("dpkg-deb", "--root-owner-group", "--build", filepath.Join(dir, "p"), filepath.Join(dir, "left.deb")).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	text, err := os.ReadFile(filepath.Join(dir, "left.deb"))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// wheel makes a package of Python.
func wheel(t *testing.T) []byte {
	t.Helper()
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for name, text := range map[string]string{
		"left.py": "print('left')\n", "left-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: left\nVersion: 1.0\n",
		"left-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n", "left-1.0.dist-info/RECORD": "",
	} {
		w, err := z.Create(name)
		if err == nil {
			_, err = w.Write([]byte(text))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// Two sandboxes install the same packages with apt and pip, and the upstream sees
// one download. A sandbox whose policy does not allow the registry gets nothing, and
// the denial is in its egress log.
func TestRegistryCache(t *testing.T) {
	t.Parallel()
	prepare(t)
	if !netlab.Inside(t) {
		return
	}
	l, peer := newPrivateLab(t)
	reg := newRegistry(t)
	ca, err := fakenet.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := peer.Net.HandleHTTPS("registry.example.com", 443, ca, reg); err != nil {
		t.Fatal(err)
	}
	peer.Net.HandleHTTP("mirror.example.com", 80, reg)
	dir := filepath.Join(l.home, "config")
	l.profile("elsewhere", "name: elsewhere\nnetwork: {mode: allowlist, allow: [other.example.com]}\n")
	if err := os.WriteFile(filepath.Join(dir, "ca.pem"), ca.PEM(), 0o600); err != nil {
		t.Fatal(err)
	}
	config := fmt.Sprintf(`cache:
  enabled: true
  dir: %s
  npm: ""
  docker: ""
  pypi: https://registry.example.com/simple
  pypi_files: []
  go: https://registry.example.com/go
  apt: [http://mirror.example.com]
guest: {ca_certificates: [%s]}
`, filepath.Join(l.home, "registries"), filepath.Join(dir, "ca.pem"))
	if err := os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	const fetch = "curl -sS -m 20 -o /dev/null -w 'go %{http_code}\\n' http://10.77.0.1:8844/cache" + goPath + "\n"
	const install = "set -e\n" + fetch + `cat ~/.config/go/env ~/.config/pip/pip.conf
echo 'deb [trusted=yes] http://mirror.example.com/ ./' | sudo tee /etc/apt/sources.list >/dev/null
sudo rm -rf /etc/apt/sources.list.d
cat /etc/apt/apt.conf.d/*agentlab* || ls /etc/apt/apt.conf.d
sudo apt-get -q update
sudo apt-get -qy install left
cat /usr/share/left
pip download --disable-pip-version-check -q --no-deps -d /tmp/wheels left==1.0
ls /tmp/wheels`
	for range 2 {
		j, r := l.job("--agent", "shell", "--task", install)
		log := l.ok("job", "logs", j.ID)
		if j.Status != "COMPLETED" || !strings.Contains(log, "go 200") || !strings.Contains(log, "left-1.0-py3-none-any.whl") || !strings.Contains(log, "GOPROXY=http://10.77.0.1:8844/cache/go|") {
			t.Fatalf("%+v\n%v\n%s", j, r, log)
		}
		egress := l.ok("egress", "log", "--job", j.ID)
		if !strings.Contains(egress, "registry.example.com") || !strings.Contains(egress, "mirror.example.com") {
			t.Errorf("the egress log:\n%s", egress)
		}
	}
	for _, path := range []string{debPath, wheelPath, goPath} {
		if n := reg.times(path); n != 1 {
			t.Errorf("%s was downloaded %d times", path, n)
		}
	}
	j, r := l.job("--profile", "elsewhere", "--agent", "shell", "--task", fetch+"ls ~/.config/go/env || true")
	log := l.ok("job", "logs", j.ID)
	if j.Status != "COMPLETED" || !strings.Contains(log, "go 403") || strings.Contains(log, "GOPROXY") {
		t.Errorf("another policy: %v\n%s", r, log)
	}
	if denied := l.ok("egress", "log", "--denied", "--job", j.ID); !strings.Contains(denied, "registry.example.com:443") {
		t.Errorf("denials:\n%s", denied)
	}
	t.Logf("%s", l.ok("cache", "status"))
	if r := l.run("", "cache", "clear"); !strings.Contains(r.stderr, "removed") {
		t.Errorf("cache clear: %v", r)
	}
	l.noSandboxes()
}
