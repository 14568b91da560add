package archtest

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// wordHit is a phrase of the list, found in a text.
type wordHit struct {
	file   string // relative to the module
	line   int
	phrase Phrase
}

func (h wordHit) String() string {
	return fmt.Sprintf("%s:%d: %q: write instead: %s", h.file, h.line, h.phrase.Text, h.phrase.Instead)
}

// phrasePattern matches every phrase of the list, the longest first.
var phrasePattern = func() *regexp.Regexp {
	var all []string
	for _, p := range Phrases {
		all = append(all, strings.ReplaceAll(regexp.QuoteMeta(p.Text), " ", `\s+`))
	}
	slices.SortFunc(all, func(a, b string) int { return cmp.Compare(len(b), len(a)) })
	return regexp.MustCompile(`(?i)\b(?:` + strings.Join(all, "|") + `)\b`)
}()

// findPhrases returns the phrases in a text whose first line is the given line
// of file.
func findPhrases(file string, line int, text string) []wordHit {
	var out []wordHit
	for _, m := range phrasePattern.FindAllStringIndex(text, -1) {
		found := strings.ToLower(strings.Join(strings.Fields(text[m[0]:m[1]]), " "))
		i := slices.IndexFunc(Phrases, func(p Phrase) bool { return p.Text == found })
		out = append(out, wordHit{file, line + strings.Count(text[:m[0]], "\n"), Phrases[i]})
	}
	return out
}

// textFiles are the documents, scripts and data files that the word list applies
// to.
var textFiles = []string{
	"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "changelog/*.md", "docs/*.md", "skills/*/*.md",
	"Makefile", ".ci/run", ".golangci.yml", "scripts/*.sh", "scripts/*/*.sh", "scripts/*/*.nft", "scripts/systemd/*.service",
	"presets/*.txt", "profiles/*.yaml", "images/*.yaml", "images/build/*", "images/cloud/etc/systemd/system/*", "images/files/etc/systemd/system/*",
	"internal/store/migrations/*.sql", "test/*/*.sh",
}

// keptTexts are files with a phrase that stays: a migration that databases have
// applied is never edited, and two scripts name the system's user "nobody".
var keptTexts = []string{
	"images/build/fetch.sh", "images/build/go.sh",
	"internal/store/migrations/00001_init.sql", "internal/store/migrations/00002_audit.sql", "internal/store/migrations/00007_address_leases.sql",
}

// commentMark is the beginning of a comment line in scripts and SQL.
var commentMark = regexp.MustCompile(`(?m)^[ \t]*(?:#+|--+) ?`)

// findInText returns the phrases in a text file. A phrase may span the lines of
// a comment.
func findInText(file, text string) []wordHit {
	if !strings.HasSuffix(file, ".md") {
		text = commentMark.ReplaceAllString(text, " ")
	}
	return findPhrases(file, 1, text)
}

// textHits returns the phrases in textFiles. A file of keptTexts must have one,
// so that the list has no entry without a reason.
func textHits(t *testing.T) []wordHit {
	t.Helper()
	var out []wordHit
	for _, glob := range textFiles {
		files, err := filepath.Glob(filepath.Join(root, glob))
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: no such document: %v", glob, err)
		}
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			rel, _ := filepath.Rel(root, f)
			found := findInText(filepath.ToSlash(rel), string(text))
			if !slices.Contains(keptTexts, rel) {
				out = append(out, found...)
			} else if len(found) == 0 {
				t.Errorf("%s has no phrase of the list: remove it from keptTexts", rel)
			}
		}
	}
	return out
}

// internalText are the files whose string literals no user reads: test doubles,
// test support and the list itself.
var internalText = []string{"internal/archtest/words.go", "internal/backend/backendtest/", "internal/backend/fake/", "test/"}

// programHits returns the phrases in the string literals of the programs: help
// texts, errors, hints, log messages, and the doc tags of the API.
func programHits(t *testing.T) []wordHit {
	t.Helper()
	var out []wordHit
	for _, s := range sources(t) {
		if s.test || slices.ContainsFunc(internalText, func(dir string) bool { return strings.HasPrefix(s.path, dir) }) {
			continue
		}
		files := token.NewFileSet()
		f, err := parser.ParseFile(files, filepath.Join(root, s.path), nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if _, ok := n.(*ast.ImportSpec); ok {
				return false
			}
			e, ok := n.(ast.Expr)
			if !ok {
				return true
			}
			text, ok := literalText(e)
			if ok {
				out = append(out, findPhrases(s.path, files.Position(e.Pos()).Line, text)...)
			}
			return !ok
		})
	}
	return out
}

// literalText returns the text of a string literal or of a concatenation with
// one; other operands become "%v".
func literalText(e ast.Expr) (text string, ok bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		if e.Kind != token.STRING {
			return "", false
		}
		text, err := strconv.Unquote(e.Value)
		return text, err == nil
	case *ast.BinaryExpr:
		x, okX := literalText(e.X)
		y, okY := literalText(e.Y)
		if e.Op != token.ADD || !okX && !okY {
			return "", false
		}
		if !okX {
			x = "%v"
		}
		if !okY {
			y = "%v"
		}
		return x + y, true
	}
	return "", false
}

// TestPlainEnglish checks that user-facing text has no phrase of the word list.
func TestPlainEnglish(t *testing.T) {
	for _, h := range append(textHits(t), programHits(t)...) {
		t.Error(h)
	}
}

// commentHits returns the phrases in the comments of a Go file, given relative
// to the module.
func commentHits(t *testing.T, path string) []wordHit {
	t.Helper()
	files := token.NewFileSet()
	f, err := parser.ParseFile(files, filepath.Join(root, path), nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	return findInComments(path, files, f)
}

// findInComments returns the phrases in the comments of a parsed file. A phrase
// may span the lines of a comment group.
func findInComments(path string, files *token.FileSet, f *ast.File) (out []wordHit) {
	for _, group := range f.Comments {
		var text strings.Builder
		for _, c := range group.List {
			text.WriteString(strings.Trim(c.Text, "/*") + "\n")
		}
		out = append(out, findPhrases(path, files.Position(group.Pos()).Line, text.String())...)
	}
	return out
}

// TestPlainComments checks that comments have no phrase of the word list. The
// list itself quotes the phrases.
func TestPlainComments(t *testing.T) {
	for _, s := range sources(t) {
		if s.test || s.path == "internal/archtest/words.go" {
			continue
		}
		for _, h := range commentHits(t, s.path) {
			t.Error(h)
		}
	}
}

func TestFindInComments(t *testing.T) {
	const source = `package p

// Get is fast. It
// tells whether a value
// is there.
func Get() string {
	return "nobody" // read by nobody
}

/* Put is to
be called once. */
func Put() {}
`
	files := token.NewFileSet()
	f, err := parser.ParseFile(files, "p.go", source, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, h := range findInComments("p.go", files, f) {
		got = append(got, fmt.Sprintf("%s:%d %s", h.file, h.line, h.phrase.Text))
	}
	want := []string{"p.go:4 tells whether", "p.go:7 nobody", "p.go:10 is to be"}
	if !slices.Equal(got, want) {
		t.Errorf("found %q, want %q", got, want)
	}
}

func TestFindInText(t *testing.T) {
	const script = "#!/bin/sh\n# The check tells\n#   whether a host\n# is there.\necho it is to be # anew\n-- is\n-- told\n"
	var got []string
	for _, h := range findInText("x.sh", script) {
		got = append(got, fmt.Sprintf("%s:%d %s", h.file, h.line, h.phrase.Text))
	}
	want := []string{"x.sh:2 tells whether", "x.sh:5 is to be", "x.sh:5 anew", "x.sh:6 is told"}
	if !slices.Equal(got, want) {
		t.Errorf("found %q, want %q", got, want)
	}
}

func TestFindPhrases(t *testing.T) {
	text := "It Tells\n  whether nobody's household is mending.\nIt is to be\tread. Somebody else reads it.\n"
	var got []string
	for _, h := range findPhrases("docs/x.md", 7, text) {
		got = append(got, fmt.Sprintf("%s:%d %s", h.file, h.line, h.phrase.Text))
	}
	want := []string{"docs/x.md:7 tells whether", "docs/x.md:8 nobody", "docs/x.md:9 is to be", "docs/x.md:9 somebody else"}
	if !slices.Equal(got, want) {
		t.Errorf("found %q, want %q", got, want)
	}
	for source, want := range map[string]string{
		`"is " + "to be"`:               "is to be",
		"`is\nto be`":                   "is\nto be",
		`"is " + name + " to be"`:       "is %v to be",
		`"nobody" + f("x") + "\u0020y"`: "nobody%v y",
	} {
		e, err := parser.ParseExpr(source)
		if err != nil {
			t.Fatal(err)
		}
		if got, ok := literalText(e); !ok || got != want {
			t.Errorf("%s: %q, %v, want %q", source, got, ok, want)
		}
	}
}
