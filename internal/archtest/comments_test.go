package archtest

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestDocCommentsBeginWithTheName checks that a doc comment begins with the name
// that it describes, with an article before it or without. A comment that still
// has the name of before a rename describes nothing.
func TestDocCommentsBeginWithTheName(t *testing.T) {
	for _, s := range sources(t) {
		if s.generated {
			continue
		}
		files := token.NewFileSet()
		f, err := parser.ParseFile(files, filepath.Join(root, s.path), nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range misnamed(f, s.test) {
			t.Errorf("%s:%d: %s", s.path, files.Position(m.pos).Line, m.text)
		}
	}
}

type misnamedDoc struct {
	pos  token.Pos
	text string
}

// misnamed returns the doc comments of functions, types, and single variables and
// constants that do not begin with the name. The comment of a test function says
// what must hold.
func misnamed(f *ast.File, test bool) (out []misnamedDoc) {
	check := func(name string, doc *ast.CommentGroup) {
		first := regexp.MustCompile(`^(?:(?:A|An|The) )?(\w*)`).FindStringSubmatch(doc.Text())[1]
		if doc.Text() != "" && name != "_" && first != name { // a directive alone has no text
			out = append(out, misnamedDoc{doc.Pos(), fmt.Sprintf("the comment of %s begins with %q", name, first)})
		}
	}
	testFunction := regexp.MustCompile(`^(Test|Fuzz|Benchmark|init$)`)
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if !test || !testFunction.MatchString(d.Name.Name) {
				check(d.Name.Name, d.Doc)
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				switch s := spec.(type) {
				case *ast.TypeSpec:
					doc := d.Doc
					if d.Lparen.IsValid() {
						doc = s.Doc
					}
					check(s.Name.Name, doc)
				case *ast.ValueSpec:
					if !d.Lparen.IsValid() && len(s.Names) == 1 {
						check(s.Names[0].Name, d.Doc)
					}
				}
			}
		}
	}
	return out
}

func TestMisnamed(t *testing.T) {
	const source = `package p

// Old returns a name.
func New() string { return "" }

// New2 returns a name.
func New2() string { return "" }

// A Thing has a name.
type Thing struct{}

type (
	// Item is a thing.
	Other struct{}
)

// Limits of a thing.
const (
	// Any thing.
	a = 1
)

// size is the limit.
var limit = 1
`
	f, err := parser.ParseFile(token.NewFileSet(), "p.go", source, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, m := range misnamed(f, false) {
		got = append(got, m.text)
	}
	want := []string{`the comment of New begins with "Old"`, `the comment of Other begins with "Item"`, `the comment of limit begins with "size"`}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// identifierInText matches an identifier in backticks that no ordinary word, key,
// command or state looks like: it has lower-case and upper-case letters, or is the
// name of a Go file.
var identifierInText = regexp.MustCompile("`[*&]?(\\w+(?:\\.\\w+)*)(?:\\([^`]*)?`")

// TestDocumentsNameExistingIdentifiers checks that the identifiers and Go files in
// backticks of the documents for contributors exist.
func TestDocumentsNameExistingIdentifiers(t *testing.T) {
	known, paths := map[string]bool{}, map[string]bool{}
	for _, s := range sources(t) {
		paths[filepath.Base(s.path)] = true
		known[filepath.Base(s.pkg)] = true
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, s.path), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if id, ok := n.(*ast.Ident); ok {
				known[id.Name] = true
			}
			return true
		})
	}
	for _, name := range []string{"CONTRIBUTING.md", "docs/architecture.md"} {
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		found := 0
		for _, m := range identifierInText.FindAllSubmatch(text, -1) {
			word := string(m[1])
			if strings.HasSuffix(word, ".go") {
				found++
				if !paths[word] {
					t.Errorf("%s names the file %s, which does not exist", name, word)
				}
				continue
			}
			if strings.HasSuffix(word, ".md") || strings.HasSuffix(word, ".sql") || strings.ToUpper(word) == word || strings.ToLower(word) == word {
				continue
			}
			found++
			for part := range strings.SplitSeq(word, ".") {
				if !known[part] {
					t.Errorf("%s names %s, and no Go code has %s", name, word, part)
				}
			}
		}
		if found < 15 {
			t.Errorf("%s: only %d names found; this test reads the document wrongly", name, found)
		}
	}
}
