package agentlab

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

func TestEventKindsIsComplete(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	var kinds []string
	for _, file := range files {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, func(n ast.Node) bool {
			v, ok := n.(*ast.ValueSpec)
			if !ok || !strings.HasPrefix(v.Names[0].Name, "Event") || len(v.Values) == 0 {
				return true
			}
			if lit, ok := v.Values[0].(*ast.BasicLit); ok {
				kind, err := strconv.Unquote(lit.Value)
				if err != nil {
					t.Error(err)
				}
				kinds = append(kinds, kind)
			}
			return true
		})
	}
	listed := slices.Clone(EventKinds)
	slices.Sort(kinds)
	slices.Sort(listed)
	if !slices.Equal(kinds, listed) {
		t.Errorf("EventKinds are %q, want %q", listed, kinds)
	}
}
