package archtest

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// testOnly are packages and modules of others that only tests use.
var testOnly = []string{
	"testing", "net/http/httptest", "github.com/rogpeppe/go-internal", "go.uber.org/goleak", "pgregory.net/rapid", "github.com/diskfs/go-diskfs",
	"github.com/chromedp", "github.com/charmbracelet/x/vt",
}

// switches are how the names of environment variables begin that only tests
// may read.
var switches = []string{"AGENTLAB_TEST_", "AGENTLAB_ALLOW_", "AGENTLAB_MUTATION"}

// linked is a package of a program, as go list prints it.
type linked struct {
	ImportPath, Dir              string
	GoFiles, EmbedFiles, Imports []string
}

// TestShippedProgramsHaveNoTestCode checks what the programs of a release
// link: no package of tests, and no file that reads a switch of tests.
func TestShippedProgramsHaveNoTestCode(t *testing.T) {
	programs, err := filepath.Glob(root + "/cmd/*")
	if err != nil || len(programs) < 3 {
		t.Fatalf("%v, %v", programs, err)
	}
	for _, arch := range []string{"amd64", "arm64"} {
		for _, dir := range programs {
			main := Module + "/cmd/" + filepath.Base(dir)
			packages := dependencies(t, main, arch)
			for path, p := range packages {
				if forbidden(path) {
					t.Errorf("%s links a package of tests: %s", arch, strings.Join(chain(packages, main, path), " -> "))
				}
				if strings.HasPrefix(path, Module) && arch == "amd64" {
					checkSwitches(t, p)
				}
			}
		}
	}
}

// forbidden reports whether a program may not link the package.
func forbidden(path string) bool {
	own, ok := strings.CutPrefix(path, Module+"/")
	if !ok {
		return slices.ContainsFunc(testOnly, func(p string) bool { return path == p || strings.HasPrefix(path, p+"/") })
	}
	return strings.HasPrefix(own, "test/") || slices.Contains(doubles, own) || own == "internal/archtest"
}

// dependencies returns what a program links, by import path.
func dependencies(t *testing.T, main, arch string) map[string]linked {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-deps", "-json=ImportPath,Dir,GoFiles,EmbedFiles,Imports", main)
	cmd.Env = append(os.Environ(), "GOOS=linux", "GOARCH="+arch, "CGO_ENABLED=0")
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	packages := map[string]linked{}
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p linked
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		packages[p.ImportPath] = p
	}
	if len(packages) < 100 {
		t.Fatalf("%s links only %d packages", main, len(packages))
	}
	return packages
}

// chain returns a shortest way of imports between two packages.
func chain(packages map[string]linked, from, to string) []string {
	before := map[string]string{from: ""}
	for queue := []string{from}; len(queue) > 0; queue = queue[1:] {
		for _, next := range packages[queue[0]].Imports {
			if _, seen := before[next]; !seen {
				before[next] = queue[0]
				queue = append(queue, next)
			}
		}
	}
	var out []string
	for p := to; p != ""; p = before[p] {
		out = append([]string{strings.TrimPrefix(p, Module+"/")}, out...)
	}
	return out
}

// checkSwitches fails the test if a file of the package names a switch.
func checkSwitches(t *testing.T, p linked) {
	t.Helper()
	for _, name := range p.GoFiles {
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, name), nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
				checkText(t, p.ImportPath+"/"+name, lit.Value)
			}
			return true
		})
	}
	for _, name := range p.EmbedFiles {
		text, err := os.ReadFile(filepath.Join(p.Dir, name))
		if err != nil {
			t.Fatal(err)
		}
		checkText(t, p.ImportPath+"/"+name, string(text))
	}
}

func checkText(t *testing.T, where, text string) {
	t.Helper()
	for _, s := range switches {
		if strings.Contains(text, s) {
			t.Errorf("%s names %s…: a shipped program has no switch for tests", where, s)
		}
	}
}
