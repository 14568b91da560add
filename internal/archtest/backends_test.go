package archtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// backendWords are words of single backends: their names, their tools, and the
// settings that only they have.
var backendWords = regexp.MustCompile(`(?i)qemu|\bkvm\b|\btcg\b|\bqmp\b|lima\b|limactl|proxmox|\bpve\b|\bpvesh\b|\bqm\b|` +
	`cpu_?list|\bballoon|firewall_?group|nic_?model|template_?vmid|\bnetwork\.(bridge|model)\b`)

// backendWordsIn are the files and folders (with a final slash) that may use
// them, with the reason.
var backendWordsIn = map[string]string{
	"api/api.go":                          "docs of fields say which values a backend has",
	"internal/archtest/words.go":          "a list of files",
	"internal/backends/":                  "the list of backends",
	"internal/cli/hostcmd/hostnetwork.go": "the help names a backend whose sandboxes are on a bridge",
	"internal/cli/hostcmd/init.go":        "it sets up a host for each backend",
	"internal/hostvirt/":                  "the modules of the kernel, for all drivers that use it",
	"internal/guest/slice/watch.go":       "the device of the guest's own kernel, on every backend",
	"internal/guest/guestd/nested.go":     "the device of the guest's own kernel, on every backend",
	"internal/image/stage.go":             "the name of a package of the distribution",
	"internal/archtest/archtest.go":       "the layers of the packages",
	"internal/qemuvm/":                    "what two drivers know about the same program",
}

// TestBackendWords checks that identifiers and strings name no single backend
// outside the folders of the drivers.
func TestBackendWords(t *testing.T) {
	used := map[string]bool{}
	for _, s := range sources(t) {
		if s.test || strings.HasPrefix(s.path, "test/") || strings.HasPrefix(s.path, "internal/backend/") && s.pkg != "internal/backend" {
			continue
		}
		allowed := false
		for where := range backendWordsIn {
			if s.path == where || strings.HasSuffix(where, "/") && strings.HasPrefix(s.path, where) {
				allowed = true
				used[where] = true
			}
		}
		if allowed {
			continue
		}
		for _, found := range wordsIn(t, filepath.Join(root, s.path)) {
			t.Errorf("%s: %q is a word of one backend: it belongs to the folder of its driver", s.path, found)
		}
	}
	for where := range backendWordsIn {
		if !used[where] {
			t.Errorf("%s is listed in vain", where)
		}
	}
}

// wordsIn returns the identifiers and strings with a word of a backend, except
// the paths of imports.
func wordsIn(t *testing.T, path string) []string {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	ast.Inspect(f, func(n ast.Node) bool {
		text := ""
		switch n := n.(type) {
		case *ast.ImportSpec:
			return false
		case *ast.Ident:
			text = n.Name
		case *ast.BasicLit:
			text = n.Value
		}
		if backendWords.MatchString(text) {
			out = append(out, text)
		}
		return true
	})
	return out
}
