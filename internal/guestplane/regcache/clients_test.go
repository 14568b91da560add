package regcache_test

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// files serves files by path.
func files(byPath map[string][]byte) http.HandlerFunc {
	return func(rw http.ResponseWriter, r *http.Request) {
		body, ok := byPath[r.URL.Path]
		if !ok {
			http.NotFound(rw, r)
			return
		}
		if !strings.Contains(filepath.Base(r.URL.Path), ".") {
			rw.Header().Set("Content-Type", "application/json")
		}
		_, _ = rw.Write(body)
	}
}

// run runs a program for a user without settings, and returns its output.
func run(t *testing.T, env []string, dir string, args ...string) string {
	t.Helper()
	if _, err := exec.LookPath(args[0]); err != nil {
		t.Skipf("there is no %s here", args[0])
	}
	cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
	cmd.Dir = dir
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + t.TempDir()}, env...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", args, err, out)
	}
	return string(out)
}

// The go command downloads a module through the cache, also from two machines, once.
func TestGoCommand(t *testing.T) {
	w := newWorld(t)
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for name, text := range map[string]string{"go.mod": "module example.com/Left\n", "left.go": "package left\n"} {
		f, err := z.Create("example.com/Left@v1.0.0/" + name)
		if err == nil {
			_, err = f.Write([]byte(text))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	const at = "/go/example.com/!left/@v/"
	w.upstream("registry.test", files(map[string][]byte{
		at + "list": []byte("v1.0.0\n"), at + "v1.0.0.info": []byte(`{"Version":"v1.0.0","Time":"2023-01-02T15:04:05Z"}`),
		at + "v1.0.0.mod": []byte("module example.com/Left\n"), at + "v1.0.0.zip": b.Bytes(),
	}))
	for _, vmid := range []int{open, second} {
		env := []string{"GOPROXY=" + w.base[vmid] + "/cache/go", "GOSUMDB=off", "GOMODCACHE=" + t.TempDir(), "GOFLAGS=-modcacherw", "GOTOOLCHAIN=local",
			"GOCACHE=" + t.TempDir(), "HOME=/dev/null"} // no home: a process in the background would write to it
		if out := run(t, env, t.TempDir(), "go", "mod", "download", "-json", "example.com/Left@latest"); !strings.Contains(out, `"Version": "v1.0.0"`) || !strings.Contains(out, `"Sum": "h1:`) {
			t.Errorf("%s", out)
		}
	}
	if n := w.times("registry.test " + at + "v1.0.0.zip"); n != 1 {
		t.Errorf("the module was downloaded %d times", n)
	}
}

// npm installs a package through the cache, from two machines, with one download,
// and its lock file has the URL of the public registry.
func TestNPMCommand(t *testing.T) {
	w := newWorld(t)
	var b bytes.Buffer
	gz := gzip.NewWriter(&b)
	tw := tar.NewWriter(gz)
	text := []byte(`{"name":"left","version":"1.0.0"}`)
	err := tw.WriteHeader(&tar.Header{Name: "package/package.json", Mode: 0o644, Size: int64(len(text))})
	if err == nil {
		_, err = tw.Write(text)
	}
	if err != nil || tw.Close() != nil || gz.Close() != nil {
		t.Fatal(err)
	}
	index := strings.Replace(npmIndex(b.String()), `{"name":"left","versions":{"1.0.0":{`, `{"name":"left","dist-tags":{"latest":"1.0.0"},"versions":{"1.0.0":{"name":"left","version":"1.0.0",`, 1)
	w.upstream("registry.test", files(map[string][]byte{"/left": []byte(index), "/left/-/left-1.0.0.tgz": b.Bytes()}))
	for _, vmid := range []int{open, second} {
		dir := t.TempDir()
		env := []string{"npm_config_cache=" + t.TempDir(), "npm_config_registry=" + w.base[vmid] + "/cache/npm/", "npm_config_update_notifier=false"}
		run(t, env, dir, "npm", "install", "--no-fund", "left")
		lock, err := os.ReadFile(filepath.Join(dir, "package-lock.json"))
		if err != nil || !strings.Contains(string(lock), `"https://registry.npmjs.org/left/-/left-1.0.0.tgz"`) || strings.Contains(string(lock), "127.0.0.1") {
			t.Errorf("package-lock.json: %v\n%s", err, lock)
		}
	}
	if n := w.times("registry.test /left/-/left-1.0.0.tgz"); n != 1 {
		t.Errorf("the package was downloaded %d times", n)
	}
}
