package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha512"
	"encoding/base64"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

// tarball is an archive of the registry with files by name.
func tarball(t *testing.T, files ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	w := tar.NewWriter(z)
	for _, h := range files {
		text := h.PAXRecords["text"]
		h.PAXRecords, h.Size, h.Mode = nil, int64(len(text)), 0o644
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	if w.Close() != nil || z.Close() != nil {
		t.Fatal("the archive cannot be written")
	}
	return b.Bytes()
}

func npmFile(name, text string) tar.Header {
	return tar.Header{Name: name, Typeflag: tar.TypeReg, PAXRecords: map[string]string{"text": text}}
}

// A package is installed with its commands, below its own directory, and only if it is the
// one that the registry describes.
func TestFetchNPM(t *testing.T) {
	const manifest = `{"name":"tool","version":"1.0.0","bin":{"tool":"bin/tool.js"}}`
	good := tarball(t, npmFile("package/package.json", manifest), npmFile("package/bin/tool.js", "run"), npmFile("package/lib/a/b.js", "b"))
	for name, c := range map[string]struct {
		pack []byte
		sum  []byte // of which package; nil: of this
		code agentlab.Code
	}{
		"good":       {good, nil, ""},
		"another":    {good, []byte("another"), agentlab.CodeDenied},
		"outside":    {tarball(t, npmFile("package/package.json", manifest), npmFile("package/../../../bin/x", "x"), npmFile("package/bin/tool.js", "run")), nil, agentlab.CodeUnavailable},
		"link":       {tarball(t, npmFile("package/package.json", manifest), tar.Header{Name: "package/bin", Typeflag: tar.TypeSymlink, Linkname: "../../../../.."}), nil, agentlab.CodeInternal},
		"no command": {tarball(t, npmFile("package/package.json", `{"name":"tool","bin":{"tool":"../../../../../x"}}`)), nil, agentlab.CodeInternal},
		"damaged":    {good[:len(good)/2], nil, agentlab.CodeUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			of := c.sum
			if of == nil {
				of = c.pack
			}
			sum := sha512.Sum512(of)
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				switch r.URL.Path {
				case "/tool/1.0.0":
					_, _ = fmt.Fprintf(w, `{"dist":{"tarball":"http://%s/tool.tgz","integrity":"sha512-%s"}}`, r.Host, base64.StdEncoding.EncodeToString(sum[:]))
				case "/tool.tgz":
					_, _ = w.Write(c.pack)
				default:
					http.NotFound(w, r)
				}
			}))
			defer server.Close()
			t.Setenv("npm_config_registry", server.URL+"/")
			top := t.TempDir()
			prefix := filepath.Join(top, "a", "npm")
			err := fetchNPM(t.Context(), NPMPackage{Package: "tool", Version: "1.0.0"}, prefix)
			if err != nil && agentlab.CodeOf(err) != c.code || err == nil && c.code != "" {
				t.Fatalf("the error is %v, code %q, want %q", err, agentlab.CodeOf(err), c.code)
			}
			for _, outside := range []string{filepath.Join(top, "x"), filepath.Join(prefix, "bin", "x"), filepath.Join(prefix, "lib", "bin", "x")} {
				if _, err := os.Lstat(outside); err == nil {
					t.Errorf("%s is outside of the package", outside)
				}
			}
			if c.code != "" {
				return
			}
			text, err := os.ReadFile(filepath.Join(prefix, "bin", "tool"))
			info, serr := os.Stat(filepath.Join(prefix, "bin", "tool"))
			if err != nil || serr != nil || string(text) != "run" || info.Mode().Perm()&0o111 != 0o111 {
				t.Errorf("the command: %q, %v, %v", text, info, err)
			}
			if text, err := os.ReadFile(filepath.Join(prefix, "lib", "node_modules", "tool", "lib", "a", "b.js")); string(text) != "b" {
				t.Errorf("a file of the package: %q, %v", text, err)
			}
		})
	}
}

// Only a recipe that has Node.js and npm needs no npm of this machine.
func TestBringsNPM(t *testing.T) {
	npm := NPMPackage{Package: "npm", Version: "1.0.0"}
	for _, c := range []struct {
		recipe Recipe
		needs  bool
	}{
		{Recipe{Agents: Agents{Node: "24.0.0", Packages: []NPMPackage{npm}}}, false},
		{Recipe{Agents: Agents{Node: "24.0.0"}, NPM: []NPMPackage{npm}}, false},
		{Recipe{Agents: Agents{Node: "24.0.0"}}, true},
		{Recipe{NPM: []NPMPackage{npm}}, true},
		{Recipe{}, false},
	} {
		needs := false
		for _, tool := range c.recipe.tools() {
			needs = needs || strings.HasSuffix(tool.name, "npm")
		}
		if needs != c.needs {
			t.Errorf("%+v needs npm: %v", c.recipe, needs)
		}
	}
	agents, err := Shipped("agents")
	if err != nil || !agents.bringsNPM() {
		t.Errorf("the image agents needs the npm of this machine (%v)", err)
	}
}
