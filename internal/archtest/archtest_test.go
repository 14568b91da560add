package archtest

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

const root = "../.."

// source is one Go file of the module.
type source struct {
	path      string // relative to the module
	pkg       string // likewise; "." for the root
	test      bool
	generated bool
	lines     int
	imports   []string // of this module, relative to it
}

func sources(t *testing.T) []source {
	t.Helper()
	var out []source
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name := d.Name(); p != root && (strings.HasPrefix(name, ".") || name == "testdata" || name == "zz" || name == "bin" || name == "dist") {
				return filepath.SkipDir
			}
			return nil
		}
		if strings.HasSuffix(p, ".go") {
			out = append(out, parse(t, p))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(out) < 50 {
		t.Fatalf("only %d Go files found; the test looks at the wrong place", len(out))
	}
	return out
}

func parse(t *testing.T, p string) source {
	t.Helper()
	data, err := os.ReadFile(p)
	if err != nil {
		t.Fatal(err)
	}
	f, err := parser.ParseFile(token.NewFileSet(), p, data, parser.ImportsOnly|parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	rel, _ := filepath.Rel(root, p)
	s := source{
		path: rel, pkg: filepath.ToSlash(filepath.Dir(rel)), test: strings.HasSuffix(p, "_test.go"),
		generated: ast.IsGenerated(f), lines: bytes.Count(data, []byte("\n")),
	}
	for _, imp := range f.Imports {
		name, _ := strconv.Unquote(imp.Path.Value)
		if name == Module {
			s.imports = append(s.imports, ".")
		} else if r, ok := strings.CutPrefix(name, Module+"/"); ok {
			s.imports = append(s.imports, r)
		}
	}
	return s
}

// Arrows point one way.
func TestImports(t *testing.T) {
	for _, s := range sources(t) {
		if s.test {
			continue
		}
		if _, ok := LayerOf(s.pkg); !ok {
			t.Error(Check(s.pkg, "."))
			continue
		}
		for _, imp := range s.imports {
			if why := Check(s.pkg, imp); why != "" {
				t.Errorf("%s: %s", s.path, why)
			}
		}
	}
}

// A test may build what it tests, but drivers stay apart in tests too. Only
// the guests of the fake, which speak guest control without a machine, may run
// in another driver's VMs.
func TestDriversAreIndependent(t *testing.T) {
	driver := func(pkg string) string {
		rest, ok := strings.CutPrefix(pkg, "internal/backend/")
		name, _, _ := strings.Cut(rest, "/")
		if !ok || name == "backendtest" || name == "registry" {
			return ""
		}
		return name
	}
	for _, s := range sources(t) {
		for _, imp := range s.imports {
			if a, b := driver(s.pkg), driver(imp); a != "" && b != "" && a != b && (!s.test || b != "fake") {
				t.Errorf("%s: driver %s imports driver %s; what both need belongs to the contract", s.path, a, b)
			}
		}
	}
}

func TestFileSize(t *testing.T) {
	for _, s := range sources(t) {
		limit := MaxFileLines
		switch {
		case s.generated:
			continue
		case s.test:
			limit = MaxTestLines
		case strings.HasPrefix(s.pkg, "cmd/"):
			limit = MaxMainLines
		}
		if s.lines > limit {
			t.Errorf("%s has %d lines; the budget is %d, so that a file can be read in one go: split it by what it is about", s.path, s.lines, limit)
		}
	}
}

// A package has the commands of one subject, and App only what commands share.
func TestCommandLineSize(t *testing.T) {
	files, methods := map[string]int{}, 0
	for _, s := range sources(t) {
		if s.test || s.pkg != "internal/cli" && !strings.HasPrefix(s.pkg, "internal/cli/") {
			continue
		}
		files[s.pkg]++
		text, err := os.ReadFile(filepath.Join(root, s.path))
		if err != nil {
			t.Fatal(err)
		}
		methods += bytes.Count(text, []byte("\nfunc (a *App) "))
	}
	for pkg, n := range files {
		if n > MaxCommandFiles {
			t.Errorf("%s has %d files; the budget is %d: split the package by subject", pkg, n, MaxCommandFiles)
		}
	}
	if methods > MaxAppMethods || methods < MaxAppMethods/2 {
		t.Errorf("cli.App has %d methods; the budget is %d: what one subject needs is a function of its package", methods, MaxAppMethods)
	}
}

func TestDaemonSize(t *testing.T) {
	lines := 0
	for _, s := range sources(t) {
		if s.pkg == "internal/daemon" && !s.test {
			lines += s.lines
		}
	}
	if lines > MaxDaemonLines || lines < MaxDaemonLines/2 {
		t.Errorf("package daemon has %d lines; the budget is %d: it connects other packages, and what it decides belongs to one of them", lines, MaxDaemonLines)
	}
}

// The rules bite: what the design forbids is refused with its reason.
func TestCheck(t *testing.T) {
	for _, tc := range []struct{ pkg, imp, want string }{
		{"internal/cli", "client", ""},
		{"internal/cli", "internal/store", "bypass"},
		{"internal/cli", "internal/server", "bypass"},
		{"internal/tui", "internal/job", "bypass"},
		{"internal/job", "internal/backend", ""},
		{"internal/job", "internal/backend/qemu", "no driver"},
		{"internal/job", "internal/store", "no store"},
		{"internal/sandbox", "internal/server", "no server"},
		{"internal/backend/qemu", "internal/backend", ""},
		{"internal/backend/qemu", "internal/egress/vnet", ""},
		{"internal/backend/qemu", "internal/backend/proxmox", "no other driver"},
		{"internal/backend/proxmox/pve", "internal/backend/qemu", "no other driver"},
		{"internal/backend/proxmox", "internal/backend/proxmox/pve", ""},
		{"internal/backend/proxmox/pve", "internal/backend/proxmox", ""},
		{"internal/backend", "internal/backend/qemu", "imports no driver"},
		{"internal/guest/runner", "guestapi", ""},
		{"internal/guest/runner", "internal/guest/agentcmd", ""},
		{"internal/guest/runner", "api", "only guestapi"},
		{"internal/guest/runner", "internal/backend", "only guestapi"},
		{".", "api", "only the standard library"},
		{"api", ".", "no other package"},
		{"internal/redact", "internal/store", "small package"},
		{"internal/server", "internal/store", "neither the store"},
		{"internal/guestplane", "api", "shares no code"},
		{"cmd/agentlab", "internal/cli/commands", ""},
		{"cmd/agentlab", "internal/cli", "a main"},
		{"cmd/agentlab", "internal/store", "a main"},
		{"internal/newthing", ".", "no layer"},
		{"test/e2e", "internal/store", ""},
		{"test/fakebackend", "internal/backend/fake", ""},
		{"internal/backends", "internal/backend/fake", "only tests"},
		{"internal/daemon", "internal/backend/fake", "only tests"},
		{"internal/egress/gate", "internal/egress/probe/probetest", "only tests"},
		{"internal/cli", "internal/stream/streamtest", "only tests"},
	} {
		got := Check(tc.pkg, tc.imp)
		if tc.want == "" && got != "" || !strings.Contains(got, tc.want) {
			t.Errorf("Check(%s, %s) = %q, want it to say %q", tc.pkg, tc.imp, got, tc.want)
		}
	}
}
