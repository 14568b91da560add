package archtest

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"testing"
)

// docs/limits.md names for each limit the test that attacks it. A test that has
// another name by now, or is gone, proves nothing.
func TestLimitsNameTests(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "docs", "limits.md"))
	if err != nil {
		t.Fatal(err)
	}
	there := map[string]bool{}
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)[A-Za-z0-9_]+)\(`)
	for _, s := range sources(t) {
		if !s.test {
			continue
		}
		code, err := os.ReadFile(filepath.Join(root, s.path))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range declared.FindAllSubmatch(code, -1) {
			there[string(m[1])] = true
		}
	}
	named := regexp.MustCompile("`((?:Test|Fuzz)[A-Za-z0-9_]+)`").FindAllSubmatch(text, -1)
	if len(named) < 50 {
		t.Fatalf("only %d tests are named; this test reads the page wrongly", len(named))
	}
	for _, m := range named {
		if name := string(m[1]); !there[name] {
			t.Errorf("docs/limits.md names %s, and there is no such test", name)
		}
	}
}

// docs/architecture.md follows `job run` file by file. The section must name
// files that exist, and few enough that a newcomer can read them.
func TestJobRunPath(t *testing.T) {
	const most = 60
	text, err := os.ReadFile(filepath.Join(root, "docs", "architecture.md"))
	if err != nil {
		t.Fatal(err)
	}
	section := regexp.MustCompile("(?s)\n## Follow `job run`, file by file\n(.*?)\n## ").FindSubmatch(text)
	if section == nil {
		t.Fatal("docs/architecture.md has no section \"Follow `job run`, file by file\"")
	}
	var files []string
	for _, m := range regexp.MustCompile("(?m)^([0-9]+)\\. `([a-z][A-Za-z0-9_/.-]*\\.go)`").FindAllSubmatch(section[1], -1) {
		files = append(files, string(m[2]))
		if number := string(m[1]); number != strconv.Itoa(len(files)) {
			t.Errorf("%s has the number %s, want %d", m[2], number, len(files))
		}
	}
	if len(files) < 30 || len(files) > most {
		t.Errorf("the section lists %d files, want 30 to %d", len(files), most)
	}
	if sorted := slices.Sorted(slices.Values(files)); len(slices.Compact(sorted)) != len(files) {
		t.Error("the section lists a file twice")
	}
	for _, name := range files {
		if _, err := os.Stat(filepath.Join(root, name)); err != nil {
			t.Errorf("the section names %s: %v", name, err)
		}
	}
}
