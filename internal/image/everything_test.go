package image

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

// registry serves an apt repository, an npm registry, a Python package index
// and a file, each with what one recipe needs. A program that asks for /ran has
// a network that it must not have.
func registry(t *testing.T) (url string) {
	t.Helper()
	mux := http.NewServeMux()
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	serve := func(path string, body []byte) {
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(body) })
	}
	mux.Handle("/apt/", http.StripPrefix("/apt/", http.FileServer(http.Dir("testdata/apt"))))
	serve("/file", []byte("a file\n"))

	mux.HandleFunc("/ran", func(_ http.ResponseWriter, r *http.Request) {
		t.Errorf("the program %s of a package ran with the network", r.URL.RawQuery)
	})

	pack := npmPackage(t, server.URL)
	sum := sha512.Sum512(pack)
	text, err := json.Marshal(map[string]any{"name": "fixture", "dist-tags": map[string]string{"latest": "1.0.0"}, "versions": map[string]any{"1.0.0": map[string]any{
		"name": "fixture", "version": "1.0.0", "bin": json.RawMessage(npmCommands),
		"dist": map[string]string{"tarball": server.URL + "/fixture.tgz", "integrity": "sha512-" + base64.StdEncoding.EncodeToString(sum[:])},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	serve("/fixture", text)
	serve("/fixture.tgz", pack)

	const wheel = "fixture_pip-1.0-py3-none-any.whl"
	serve("/simple/fixture-pip/", []byte(`<a href="/`+wheel+`">`+wheel+`</a>`))
	serve("/"+wheel, pythonWheel(t))
	return server.URL
}

// npmCommands are those of the npm package. Two have the names of programs that
// the build uses.
const npmCommands = `{"fixture-npm":"run.sh","python3":"steal.sh","git":"steal.sh","node":"steal.sh"}`

// npmPackage is the package of npmCommands, with an install script that must
// not run.
func npmPackage(t *testing.T, url string) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	w := tar.NewWriter(z)
	for name, text := range map[string]string{
		"package/package.json": `{"name":"fixture","version":"1.0.0","bin":` + npmCommands + `,"scripts":{"install":"touch /work/npm-script-ran"}}`,
		"package/run.sh":       "#!/bin/sh\necho fixture-npm 1.0.0\n",
		"package/steal.sh":     "#!/bin/sh\n/usr/bin/python3 -c 'import urllib.request as r; r.urlopen(\"" + url + "/ran?'${0##*/}'\", timeout=5)' 2>/dev/null\nexec /usr/bin/${0##*/} \"$@\"\n",
	} {
		err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(text)), Typeflag: tar.TypeReg})
		if err == nil {
			_, err = w.Write([]byte(text))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if w.Close() != nil || z.Close() != nil {
		t.Fatal("the package cannot be written")
	}
	return b.Bytes()
}

// pythonWheel is the wheel of a command.
func pythonWheel(t *testing.T) []byte {
	t.Helper()
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	record := ""
	const info = "fixture_pip-1.0.dist-info/"
	for _, f := range [][2]string{
		{"fixture_pip.py", "def main():\n    print('fixture-pip 1.0')\n"},
		{info + "METADATA", "Metadata-Version: 2.1\nName: fixture-pip\nVersion: 1.0\n"},
		{info + "WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"},
		{info + "entry_points.txt", "[console_scripts]\nfixture-pip = fixture_pip:main\n"},
		{info + "RECORD", ""},
	} {
		sum := sha256.Sum256([]byte(f[1]))
		record += fmt.Sprintf("%s,sha256=%s,%d\n", f[0], base64.RawURLEncoding.EncodeToString(sum[:]), len(f[1]))
		w, err := z.Create(f[0])
		if err == nil && f[1] == "" {
			f[1] = record
		}
		if err == nil {
			_, err = w.Write([]byte(f[1]))
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

// everything is a recipe with every key that fetches or runs something.
const everything = `
suite: bookworm
packages: [agentlab-fixture]
apt:
  - {name: fixture, url: URL/apt, suite: ./, key: KEY}
npm:
  - {package: fixture, version: 1.0.0, command: fixture-npm}
pip:
  - {package: fixture-pip, version: "1.0", command: fixture-pip}
files:
  - {path: /etc/profile.d/fixture.sh, content: "export FIXTURE=1\n"}
  - {path: /home/agent/.config/fixture, content: "mine\n", mode: "0600", owner: agent}
  - {path: /usr/local/src/file, url: URL/file, sha256: SUM}
run:
  - |
    test "$(id -un)" = agent && test "$PWD" = "$HOME" && cat /usr/local/src/file >/usr/local/share/copied
    cp /bin/true /usr/local/bin/other; chmod 6755 /usr/local/bin/other
  - agentlab-fixture >/work/said; fixture-npm >>/work/said; fixture-pip >>/work/said
`

func everythingRecipe(t *testing.T, url string) string {
	t.Helper()
	key, err := os.ReadFile("testdata/apt/key.asc")
	if err != nil {
		t.Fatal(err)
	}
	quoted, _ := json.Marshal(string(key)) // a string of JSON is one of YAML
	sum := sha256.Sum256([]byte("a file\n"))
	return strings.NewReplacer("URL", url, "KEY", string(quoted), "SUM", hex.EncodeToString(sum[:])).Replace(everything)
}

// One build with packages from everywhere, files and commands.
func TestBuildEverything(t *testing.T) {
	realBuilds(t, "agents")
	url := registry(t)
	t.Setenv("npm_config_registry", url)
	t.Setenv("PIP_INDEX_URL", url+"/simple")
	img, err := NewStore(t.TempDir(), Options{}).Build(t.Context(), BuildRequest{Name: "everything", Recipe: everythingRecipe(t, url)}, func(s string) { t.Log(s) })
	if err != nil {
		t.Fatalf("%v; %s", err, agentlab.HintOf(err))
	}
	for file, want := range map[string]string{
		"/work/said":                                "agentlab-fixture 1.0\nfixture-npm 1.0.0\nfixture-pip 1.0\n",
		"/usr/local/share/copied":                   "a file\n",
		"/etc/profile.d/fixture.sh":                 "export FIXTURE=1\n",
		"/etc/apt/sources.list.d/fixture.sources":   "Signed-By: /etc/apt/keyrings/fixture.asc\n",
		"/etc/apt/sources.list.d/debian.sources":    "URIs: http://deb.debian.org/debian\n",
		"/etc/apt/keyrings/fixture.asc":             "BEGIN PGP PUBLIC KEY BLOCK",
		"/usr/local/lib/agentlab-python/pyvenv.cfg": "include-system-site-packages = false",
	} {
		if got := debugfs(t, img, "cat "+file); !strings.Contains(got, want) {
			t.Errorf("%s does not say %q:\n%s", file, want, got)
		}
	}
	for path, want := range map[string]string{
		"/home/agent/.config":          "User:  1000   Group:  1000",
		"/home/agent/.config/fixture":  "Mode:  0600",
		"/usr/local/src/file":          "User:     0   Group:     0",
		"/usr/local/bin/other":         "Mode:  0755", // not setuid any longer
		"/usr/local/share/copied":      "User:     0   Group:     0",
		"/usr/local/bin/fixture-pip":   `Fast link dest: "/usr/local/lib/agentlab-python/bin/fixture-pip"`,
		"/usr/local/bin/agent-runner":  `Fast link dest: "/run/agentlab/bin/agent-runner"`,
		"/usr/local/lib/node_modules/": "User:     0   Group:     0",
	} {
		if got := debugfs(t, img, "stat "+path); !strings.Contains(got, want) {
			t.Errorf("%s is not %q:\n%s", path, want, got)
		}
	}
	if out := debugfs(t, img, "stat /work/npm-script-ran"); strings.Contains(out, "Inode:") {
		t.Error("the install script of a package that is no agent ran")
	}
	if img.Versions["fixture-npm"] != "fixture-npm 1.0.0" || img.Versions["fixture-pip"] != "fixture-pip 1.0" ||
		!strings.Contains(strings.Join(img.Pip, " "), "fixture-pip==1.0") || strings.Join(img.NPM, " ") != "fixture@1.0.0" || img.Packages["agentlab-fixture"] != "1.0" {
		t.Errorf("the stamp has versions %v, pip %v, npm %v", img.Versions, img.Pip, img.NPM)
	}
}
