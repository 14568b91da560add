package e2e

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/rand"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// Packages of the index of BenchmarkWorkspaceCache, and the bytes in each: without KVM, a
// build takes several seconds.
const (
	cacheSamples   = 3
	packageCount   = 3
	packageContent = 1 << 20
)

func packageName(i int) string { return fmt.Sprintf("package-%d", i) }

// sourcePackage returns a Python package that the guest builds: a tar.gz.
func sourcePackage(b *testing.B, name string) []byte {
	b.Helper()
	content := make([]byte, packageContent)
	_, _ = rand.Read(content)
	module := strings.ReplaceAll(name, "-", "_")
	var out bytes.Buffer
	gz := gzip.NewWriter(&out)
	w := tar.NewWriter(gz)
	for _, f := range []struct {
		name string
		data []byte
	}{
		{"PKG-INFO", fmt.Appendf(nil, "Metadata-Version: 2.1\nName: %s\nVersion: 1.0\n", name)},
		{"setup.py", fmt.Appendf(nil, "from setuptools import setup\nsetup(name=%q, version='1.0', packages=[%q], package_data={%[2]q: ['data']})\n", name, module)},
		{module + "/__init__.py", nil},
		{module + "/data", content},
	} {
		if err := w.WriteHeader(&tar.Header{Name: name + "-1.0/" + f.name, Mode: 0o644, Size: int64(len(f.data))}); err != nil {
			b.Fatal(err)
		}
		if _, err := w.Write(f.data); err != nil {
			b.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		b.Fatal(err)
	}
	if err := gz.Close(); err != nil {
		b.Fatal(err)
	}
	return out.Bytes()
}

// packageIndex serves packages as pip expects it, and counts their downloads.
func packageIndex(b *testing.B) (h http.Handler, downloads *atomic.Int64) {
	b.Helper()
	mux, downloads := http.NewServeMux(), new(atomic.Int64)
	for i := range packageCount {
		name := packageName(i)
		file, data := "/files/"+name+"-1.0.tar.gz", sourcePackage(b, name)
		mux.HandleFunc("GET /simple/"+name+"/", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/html")
			_, _ = fmt.Fprintf(w, `<a href="%s">%[1]s</a>`, file)
		})
		mux.HandleFunc("GET "+file, func(w http.ResponseWriter, r *http.Request) {
			downloads.Add(1)
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(data))
		})
	}
	return mux, downloads
}

// installPackages is the command that downloads and builds the packages.
func installPackages(to string) string {
	var names []string
	for i := range packageCount {
		names = append(names, packageName(i))
	}
	return "python3 -m pip install --quiet --no-build-isolation --target " + to + " --index-url http://pypi.example.com/simple --trusted-host pypi.example.com " + strings.Join(names, " ")
}

// BenchmarkWorkspaceCache compares a whole job on a workspace that finds its dependencies
// in the cache there with one that downloads and builds them. Both have a new VM each.
func BenchmarkWorkspaceCache(b *testing.B) {
	l, n := newNetLab(b)
	index, downloads := packageIndex(b)
	n.HandleHTTP("pypi.example.com", 80, index)
	install := installPackages("/tmp/packages")
	run := func(task string, want int64) time.Duration {
		downloads.Store(0)
		took := timed(func() {
			j, r := l.job("--agent", "shell", "--image", "base", "--workspace", "data", "--workspace-create", "--task", task)
			if j.Status != "COMPLETED" {
				b.Fatalf("%v\n%s", r, l.ok("job", "logs", j.ID))
			}
			l.noSandboxes()
		})
		if got := downloads.Load(); got != want {
			b.Fatalf("%d downloads, want %d", got, want)
		}
		return took
	}
	run("true", 0) // it makes the file system
	var first, second []time.Duration
	for b.Loop() {
		for range cacheSamples {
			first = append(first, run(`rm -rf "$PIP_CACHE_DIR" && `+install, packageCount))
			second = append(second, run(install, 0))
		}
	}
	cold := report(b, "job that downloads and builds its dependencies", first)
	b.ReportMetric(float64(report(b, "the next job on the workspace", second))/float64(cold), "second/first")
}
