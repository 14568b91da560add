package archtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"
)

// TestServicesHaveNoCallbacks: a service gets what it needs of others through
// interfaces that it declares. A function in its Config hides who is called.
func TestServicesHaveNoCallbacks(t *testing.T) {
	configs := 0
	for _, pkg := range append([]string{"internal/doctor", "internal/guestplane"}, serviceNames...) {
		files, err := filepath.Glob(filepath.Join(root, pkg, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range files {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			fset := token.NewFileSet()
			p, err := parser.ParseFile(fset, name, nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(p, func(n ast.Node) bool {
				spec, ok := n.(*ast.TypeSpec)
				if !ok || spec.Name.Name != "Config" {
					return true
				}
				configs++
				for _, f := range spec.Type.(*ast.StructType).Fields.List {
					if _, ok := f.Type.(*ast.FuncType); ok && f.Names[0].Name != "Clock" {
						t.Errorf("%s: Config.%s is a function: declare an interface", fset.Position(f.Pos()), f.Names[0].Name)
					}
				}
				return true
			})
		}
	}
	if configs < 8 {
		t.Errorf("only %d services have a Config: this test finds nothing", configs)
	}
}
