package image

import (
	"archive/zip"
	"bytes"
	"crypto/rand"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/mod/module"
	"golang.org/x/mod/sumdb"
	"golang.org/x/mod/sumdb/dirhash"
	"golang.org/x/mod/sumdb/note"

	"github.com/agentlab-vm/agentlab"
)

// toolchain is the module of a Go without programs of its own.
func toolchain(t *testing.T, m module.Version, text string) []byte {
	t.Helper()
	var buf bytes.Buffer
	z := zip.NewWriter(&buf)
	for _, name := range []string{"bin/go", "pkg/tool/linux_amd64/compile", "src/_go.mod", "VERSION"} {
		w, err := z.Create(m.Path + "@" + m.Version + "/" + name)
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
	return buf.Bytes()
}

// moduleProxy serves one module, and a checksum database that knows another content of
// it. It returns its URL and the key of the database.
func moduleProxy(t *testing.T, m module.Version, served, known []byte) (url, key string) {
	t.Helper()
	signer, key, err := note.GenerateKey(rand.Reader, "sums.example")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "known.zip")
	if err := os.WriteFile(file, known, 0o600); err != nil {
		t.Fatal(err)
	}
	sum, err := dirhash.HashZip(file, dirhash.Hash1)
	if err != nil {
		t.Fatal(err)
	}
	database := sumdb.NewServer(sumdb.NewTestServer(signer, func(path, version string) ([]byte, error) {
		if path != m.Path || version != m.Version {
			return nil, fs.ErrNotExist
		}
		return []byte(path + " " + version + " " + sum + "\n" + path + " " + version + "/go.mod " + sum + "\n"), nil
	}))
	mux := http.NewServeMux()
	mux.HandleFunc("GET /"+m.Path+"/@v/"+m.Version+".zip", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(served) })
	mux.Handle("/sumdb/sums.example/", http.StripPrefix("/sumdb/sums.example", database))
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	return srv.URL, key
}

// Only a module whose sum is in the checksum database is accepted, whatever the proxy
// sends.
func TestModulesAreVerified(t *testing.T) {
	m := mustShipped(t, "dev").goModule()
	good, bad := toolchain(t, m, "good"), toolchain(t, m, "bad")
	url, key := moduleProxy(t, m, good, good)
	changed, changedKey := moduleProxy(t, m, bad, good)
	damaged, damagedKey := moduleProxy(t, m, good[:len(good)/2], good)
	_, otherKey := moduleProxy(t, m, good, good)
	away := httptest.NewServer(http.NotFoundHandler())
	defer away.Close()
	for name, tc := range map[string]struct {
		proxies []string
		key     string
		want    agentlab.Code
	}{
		"genuine":            {[]string{url}, key, ""},
		"the second proxy":   {[]string{away.URL, url}, key, ""},
		"other content":      {[]string{changed}, changedKey, agentlab.CodeDenied},
		"half of it":         {[]string{damaged}, damagedKey, agentlab.CodeDenied},
		"another signature":  {[]string{url}, otherKey, agentlab.CodeUnavailable},
		"no proxy has it":    {[]string{away.URL}, key, agentlab.CodeInvalid},
		"the proxy is away":  {[]string{"http://127.0.0.1:1"}, key, agentlab.CodeUnavailable},
		"the key is missing": {[]string{url}, "", agentlab.CodeUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "go.zip")
			sum, err := downloadModule(t.Context(), tc.proxies, tc.key, m, path)
			if tc.want == "" && (err != nil || !strings.HasPrefix(sum, "h1:")) || tc.want != "" && (agentlab.CodeOf(err) != tc.want || agentlab.HintOf(err) == "") {
				t.Fatalf("%q, %v, want %q", sum, err, tc.want)
			}
			if tc.want != "" {
				return
			}
			dir := filepath.Join(t.TempDir(), "go")
			if err := unpackGo(m, path, dir); err != nil {
				t.Fatal(err)
			}
			if got, want := listing(t, dir), "-rw-r--r-- VERSION\n-rwxr-xr-x bin/go\n-rwxr-xr-x pkg/tool/linux_amd64/compile\n-rw-r--r-- src/go.mod\n"; got != want {
				t.Errorf("%s, want %s", got, want)
			}
		})
	}
}

// A downloaded Go is used again if it is complete.
func TestGoIsDownloadedOnce(t *testing.T) {
	r := mustShipped(t, "dev")
	downloads := t.TempDir()
	t.Setenv("GOPROXY", "http://127.0.0.1:1") // nothing answers
	data := toolchain(t, r.goModule(), "once")
	tmp := filepath.Join(downloads, "tmp")
	if err := os.WriteFile(tmp, data, 0o600); err != nil {
		t.Fatal(err)
	}
	sum, err := dirhash.HashZip(tmp, dirhash.Hash1)
	if err != nil {
		t.Fatal(err)
	}
	cached := filepath.Join(downloads, "go"+r.Go.Toolchain+".linux-"+r.Arch+"-"+hexSum(sum)+".zip")
	if err := os.Rename(tmp, cached); err != nil {
		t.Fatal(err)
	}
	if err := r.fetchGo(t.Context(), filepath.Join(t.TempDir(), "go"), downloads); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(cached, toolchain(t, r.goModule(), "other"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := r.fetchGo(t.Context(), filepath.Join(t.TempDir(), "go"), downloads); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("a changed file is used: %v", err)
	}
}

func TestGoProxies(t *testing.T) {
	for text, want := range map[string]string{
		"":                                    "https://proxy.golang.org",
		"https://a.example/|http://b.example": "https://a.example http://b.example",
		"off":                                 "", "direct": "", "file:///srv/go": "", "https://me:secret@a.example": "",
		"https://a.example,direct": "https://a.example",
	} {
		t.Setenv("GOPROXY", text)
		got, err := goProxies()
		if strings.Join(got, " ") != want || (want == "") != (agentlab.CodeOf(err) == agentlab.CodeUnsupported) {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
}
