package archtest_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// readers hold what guests say and write. They start no program, so that no
// git, tar or mount of the host ever meets what a guest made.
var readers = []string{
	"internal/artifact", "internal/audit", "internal/control", "internal/gc", "internal/guestcheck", "internal/guestplane",
	"internal/job", "internal/link", "internal/redact", "internal/sandbox", "internal/server", "internal/store", "internal/stream",
	"internal/egress/gate", "internal/egress/sniff", "internal/egress/vnet",
}

// parsers are packages that parse file systems, archives and repositories.
// Only the image build, with trusted input, may use them; package artifact
// writes archive/tar, and no package reads it.
var parsers = []string{"github.com/diskfs/", "github.com/go-git/", "archive/zip", "debug/elf"}

// starters are the functions that run programs.
var starters = map[string][]string{
	"os/exec": {"Command", "CommandContext"}, "os": {"StartProcess"}, "syscall": {"Exec", "ForkExec", "StartProcess", "Mount"},
	"golang.org/x/sys/unix": {"Exec", "Mount"},
}

// TestGuestBytesAreNotExecuted checks that nothing on the host parses a file
// system, an archive or a repository that a guest wrote.
func TestGuestBytesAreNotExecuted(t *testing.T) {
	for _, dir := range readers {
		eachFile(t, "../../"+dir, func(path string, f *ast.File, names map[string]string) {
			ast.Inspect(f, func(n ast.Node) bool {
				sel, ok := n.(*ast.SelectorExpr)
				if !ok {
					return true
				}
				pkg, ok := sel.X.(*ast.Ident)
				if !ok {
					return true
				}
				for _, fn := range starters[names[pkg.Name]] {
					if sel.Sel.Name == fn {
						t.Errorf("%s calls %s.%s: what holds the words of guests starts no program", path, pkg.Name, fn)
					}
				}
				return true
			})
		})
	}
	eachFile(t, "../../internal", func(path string, f *ast.File, _ map[string]string) {
		if strings.Contains(path, "/internal/image/") || strings.Contains(path, "/internal/cloudinit/") || strings.Contains(path, "/internal/guest/") {
			return
		}
		for _, imp := range f.Imports {
			what, _ := strconv.Unquote(imp.Path.Value)
			for _, p := range parsers {
				if strings.HasPrefix(what, p) {
					t.Errorf("%s imports %s: the host takes nothing apart that a guest wrote", path, what)
				}
			}
		}
	})
}

// eachFile calls visit with every file of a directory tree that is no test,
// and the packages that it imports by the names that it gives them.
func eachFile(t *testing.T, dir string, visit func(path string, f *ast.File, names map[string]string)) {
	t.Helper()
	found := false
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			return err
		}
		names := map[string]string{}
		for _, imp := range f.Imports {
			what, _ := strconv.Unquote(imp.Path.Value)
			name := what[strings.LastIndexByte(what, '/')+1:]
			if imp.Name != nil {
				name = imp.Name.Name
			}
			names[name] = what
		}
		found = true
		visit(path, f, names)
		return nil
	})
	if err != nil || !found {
		t.Fatalf("%s: no source was looked at: %v", dir, err)
	}
}
