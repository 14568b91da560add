package image

import (
	"flag"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the generated documents")

// The table of keys in docs/images.md is generated from the doc tags of Recipe.
func TestReference(t *testing.T) {
	const document, begin, end = "../../docs/images.md", "<!-- keys: go test ./internal/image -run TestReference -update -->\n", "<!-- end of keys -->"
	have, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, ok := strings.Cut(string(have), begin)
	_, tail, closed := strings.Cut(rest, end)
	if !ok || !closed {
		t.Fatalf("%s has no place for the table", document)
	}
	want := head + begin + "| key | meaning |\n|---|---|\n" + strings.Join(rows(t, "", reflect.TypeFor[Recipe]()), "") + end + tail
	if *update {
		if err := os.WriteFile(document, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if string(have) != want {
		t.Errorf("%s is out of date: go test ./internal/image -run TestReference -update", document)
	}
	// The examples are recipes, but for what stands in them as "…".
	examples := strings.Split(want, "```yaml\n")[1:]
	if len(examples) < 2 {
		t.Errorf("%d examples", len(examples))
	}
	for _, example := range examples {
		example, _, _ = strings.Cut(example, "```")
		example = strings.ReplaceAll(example, "sha256: …", "sha256: "+strings.Repeat("0", 64))
		example = strings.Replace(example, "      …\n", "", 1)
		if _, err := ParseRecipe([]byte(example)); err != nil {
			t.Errorf("not a recipe: %v\n%s", err, example)
		}
	}
}

// rows returns a row for each key; every key must have a text.
func rows(t *testing.T, prefix string, of reflect.Type) []string {
	t.Helper()
	var out []string
	for i := range of.NumField() {
		f := of.Field(i)
		if !f.IsExported() {
			continue
		}
		name, doc := prefix+f.Tag.Get("yaml"), f.Tag.Get("doc")
		if doc == "" {
			t.Errorf("%s has no doc", name)
		}
		out = append(out, fmt.Sprintf("| `%s` | %s |\n", name, doc))
		inner := f.Type
		if inner.Kind() == reflect.Slice {
			inner, name = inner.Elem(), name+"[]"
		}
		if inner.Kind() == reflect.Struct {
			out = append(out, rows(t, name+".", inner)...)
		}
	}
	return out
}
