package image

import (
	"crypto/sha512"
	"encoding/base64"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// A dependency in a git repository would make npm run git with the rights of
// the daemon's user, with an address and options that the package chooses.
func TestNPMRunsNoGit(t *testing.T) {
	if lookPath("npm") == "" {
		t.Skip("no npm here")
	}
	bin := t.TempDir()
	marker := filepath.Join(bin, "ran")
	if err := os.WriteFile(filepath.Join(bin, "git"), []byte("#!/bin/sh\n: >"+marker+"\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/needy" {
			http.NotFound(w, r)
			return
		}
		sum, url := sha512.Sum512(nil), "http://"+r.Host
		_, _ = fmt.Fprintf(w, `{"name":"needy","dist-tags":{"latest":"1.0.0"},"versions":{"1.0.0":{"name":"needy","version":"1.0.0",
			"dependencies":{"other":"git+%s/other.git"},"dist":{"tarball":"%s/needy.tgz","integrity":"sha512-%s"}}}}`,
			url, url, base64.StdEncoding.EncodeToString(sum[:]))
	}))
	defer server.Close()
	t.Setenv("npm_config_registry", server.URL)
	t.Setenv("HOME", t.TempDir())
	t.Setenv("AGENTLAB_OTHER", "secret")
	out, log, _ := testOutput()
	b := &builder{recipe: &Recipe{Arch: "amd64", NPM: []NPMPackage{{Package: "needy", Version: "1.0.0"}}}, work: t.TempDir(), out: out}
	if err := b.npmInstall(t.Context()); err == nil {
		t.Error("npm installed a package without its dependency")
	}
	if _, err := os.Stat(marker); err == nil {
		t.Errorf("npm ran git:\n%s", log)
	}
	if env := npmEnv("/tmp"); slices.Contains(env, "AGENTLAB_OTHER=secret") || !slices.Contains(env, "npm_config_registry="+server.URL) {
		t.Errorf("npm gets %q", env)
	}
}
