package image

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func writeApt(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		if err := writeFile(filepath.Join(dir, name), text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func lines(s []source) string {
	var b strings.Builder
	for _, x := range s {
		b.WriteString(x.line())
	}
	return b.String()
}

func TestHostSources(t *testing.T) {
	for _, tc := range []struct {
		name, want string
		files      map[string]string
	}{
		{"one-line format", "deb [signed-by=/k.gpg] http://mirror.example/debian bookworm main\ndeb http://mirror.example/security bookworm-security main\n",
			map[string]string{
				"sources.list": "# deb http://old.example/debian bookworm main\n" +
					"deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/debian bookworm main contrib # ours\n" +
					"deb-src http://mirror.example/debian bookworm main\n",
				"sources.list.d/sec.list": "deb http://mirror.example/security bookworm-security main\n",
			}},
		{"deb822", "deb [signed-by=/k.gpg] http://m/debian bookworm main\ndeb [signed-by=/k.gpg] http://m/debian bookworm-updates main\n",
			map[string]string{
				"sources.list.d/debian.sources": "Types: deb deb-src\nURIs: http://m/debian\nSuites: bookworm\n bookworm-updates\nComponents: main\nSigned-By: /k.gpg\n\n" +
					"Types: deb\nEnabled: no\nURIs: http://off/debian\nSuites: bookworm\nComponents: main\n",
			}},
		{"inline key", "deb http://m/debian bookworm main\n", map[string]string{
			"sources.list.d/d.sources": "Types: deb\nURIs: http://m/debian\nSuites: bookworm\nComponents: main\nSigned-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc\n",
		}},
		{"others' packages stay out", "deb http://m/debian bookworm main\n", map[string]string{
			"sources.list": "deb http://m/debian bookworm main\ndeb http://third.example/apt bookworm stable\ndeb http://third.example/apt nodistro main\n",
		}},
		{"another suite", "", map[string]string{"sources.list": "deb http://m/ubuntu noble main\ndeb http://m/debian bookworm-security main\n"}},
		{"nothing", "", nil},
		{"nonsense", "", map[string]string{"sources.list": "deb [x http://m\ndeb\ndeb a b\n", "sources.list.d/x.sources": "no colon\n cont\n:\n"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := lines(hostSources(writeApt(t, tc.files), "bookworm", []string{"main"})); got != tc.want {
				t.Errorf("got\n%swant\n%s", got, tc.want)
			}
		})
	}
}

func TestSources(t *testing.T) {
	host := writeApt(t, map[string]string{"sources.list": "deb http://inhouse.example/debian bookworm main\n"})
	base := mustShipped(t, "base")
	if got := lines(base.sources(host)); !strings.Contains(got, "inhouse.example") {
		t.Errorf("mirror host does not use the host's: %s", got)
	}
	if got := base.sourcesFile(); strings.Contains(got, "inhouse.example") || !strings.Contains(got, "URIs: http://deb.debian.org/debian-security\nSuites: bookworm-security") {
		t.Errorf("the image's own sources are not the public ones:\n%s", got)
	}
	if got := lines(base.sources(t.TempDir())); !strings.Contains(got, "http://deb.debian.org/debian bookworm main") {
		t.Errorf("without sources of the host: %s", got)
	}
	base.Mirror = "http://mine.example/debian"
	if got := lines(base.sources(host)); !strings.Contains(got, "mine.example/debian bookworm-updates main") || strings.Contains(got, "inhouse") {
		t.Errorf("a mirror of the recipe: %s", got)
	}
}

func FuzzHostSources(f *testing.F) {
	f.Add("deb [signed-by=/k.gpg] http://m/debian bookworm main", "Types: deb\nURIs: http://m\nSuites: bookworm\nComponents: main\n")
	f.Fuzz(func(t *testing.T, list, stanzas string) {
		for _, s := range append(parseSourcesList([]byte(list)), parseDeb822Sources([]byte(stanzas))...) {
			if s.uri == "" || s.suite == "" || strings.ContainsAny(s.uri+s.suite, " \n") {
				t.Errorf("a source that apt would not read: %+v", s)
			}
		}
	})
}

// testCache returns the shared test cache: images that tests build are kept
// between runs.
func testCache(t testing.TB) string {
	t.Helper()
	dir := os.Getenv("AGENTLAB_TEST_CACHE")
	if dir == "" {
		dir = "../../.cache/test"
	}
	return filepath.Join(dir, "images")
}
