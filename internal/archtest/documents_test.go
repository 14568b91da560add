package archtest

import (
	"os"
	"path/filepath"
	"regexp"
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
