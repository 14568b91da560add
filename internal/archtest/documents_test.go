package archtest

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// declaredTests are the names of all tests.
func declaredTests(t *testing.T) map[string]bool {
	t.Helper()
	there := map[string]bool{}
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark)[A-Za-z0-9_]+)\(`)
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
	return there
}

// docs/limits.md names for each limit the test that attacks it. A test that has
// another name by now, or is gone, proves nothing.
func TestLimitsNameTests(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "docs", "limits.md"))
	if err != nil {
		t.Fatal(err)
	}
	there := declaredTests(t)
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

// test/e2e/acceptance_test.go names the tests and scripts of acceptance criteria: all that
// exist, and none that does not. No criterion of seeds 003 and 004 is missing.
func TestCriteriaHaveTests(t *testing.T) {
	code, err := os.ReadFile(filepath.Join(root, "test", "e2e", "acceptance_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	table, _, _ := strings.Cut(string(code), "\nfunc ")
	there := declaredTests(t)
	for _, name := range regexp.MustCompile(`\b(?:Test|Benchmark)[A-Z][A-Za-z0-9]+`).FindAllString(table, -1) {
		if !there[name] {
			t.Errorf("%s does not exist", name)
		}
	}
	scripts, err := filepath.Glob(filepath.Join(root, "test", "e2e", "testdata", "acceptance", "*.txtar"))
	if err != nil || len(scripts) == 0 {
		t.Fatalf("%d scripts, %v", len(scripts), err)
	}
	for _, path := range scripts {
		if name := strings.TrimSuffix(filepath.Base(path), ".txtar"); !regexp.MustCompile(`\b` + name + `\b`).MatchString(table) {
			t.Errorf("the script %s is of no criterion", name)
		}
	}
	var ids []string
	for prefix, numbers := range map[string]string{
		"US": "1.1 1.2 1.3 2.1 2.2 2.3 3.1 3.2 3.3 4.1 4.2 4.3 5.1 5.2 5.3 6.1 6.2 6.3 7.1 7.2 7.3", "EDGE.": "1 2 3 4 5 6 7", "SC-00": "1 2 3 4 5 6 7 8 9",
		"FR-0": "01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26",
	} {
		for number := range strings.FieldsSeq(numbers) {
			ids = append(ids, prefix+number)
		}
	}
	for _, id := range ids {
		if !regexp.MustCompile(`(?m)^//\t` + regexp.QuoteMeta(id) + ` .*(Test|Benchmark|work-comes-back|open: |see )`).MatchString(table) {
			t.Errorf("criterion %s of seed 004 has no test and no reason", id)
		}
	}
	for prefix, most := range map[string]int{
		"VM.": 3, "NET.": 4, "SZ.": 5, "IMG.": 4, "CFG.": 3, "SEC.": 3, "WF.": 3, "CAN.": 10, "NOT.": 8, "RES.": 3, "PH.": 3,
	} {
		for n := range most {
			id := prefix + strconv.Itoa(n+1)
			if !regexp.MustCompile(`(?m)^//\t` + regexp.QuoteMeta(id) + ` .*(Test|open: |see )`).MatchString(table) {
				t.Errorf("requirement %s of seed 003 has no test and no reason", id)
			}
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

// Each file in changelog/ is one item about one change, short enough for a list.
func TestChangelog(t *testing.T) {
	for text, good := range map[string]bool{
		"- `agentlab x` does y.\n": true, "- **Fixed**: z.\n": true, "": false, "text\n": false, "- a.\n- b.\n": false, "- a\n": false,
		"- a.": false, "- " + strings.Repeat("a", 600) + ".\n": false,
	} {
		if fault := changeFault(text); (fault == "") != good {
			t.Errorf("%q: %q", text, fault)
		}
	}
	files, err := filepath.Glob(filepath.Join(root, "changelog", "*.md"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, path := range files {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if fault := changeFault(string(text)); filepath.Base(path) != "README.md" && fault != "" {
			t.Errorf("changelog/%s: %s", filepath.Base(path), fault)
		}
	}
}

// changeFault returns what is wrong with the text of a file in changelog/, "" if nothing is.
func changeFault(text string) string {
	const most = 500
	switch {
	case !strings.HasPrefix(text, "- ") || !strings.HasSuffix(text, ".\n"):
		return "it is not a list item that ends with a full stop"
	case strings.Count(text, "\n") != 1:
		return "it has more than one line"
	case len(text) > most:
		return "it has more than " + strconv.Itoa(most) + " characters"
	}
	return ""
}
