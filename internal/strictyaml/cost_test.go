package strictyaml

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

// fill repeats a line, in which %d counts, up to n bytes.
func fill(head, lineFormat, tail string, n int) []byte {
	var b strings.Builder
	b.WriteString(head)
	for i := 0; ; i++ {
		next := strings.ReplaceAll(lineFormat, "%d", fmt.Sprint(i))
		if b.Len()+len(next)+len(tail) > n {
			break
		}
		b.WriteString(next)
	}
	b.WriteString(tail)
	return []byte(b.String())
}

// stairs nests n mappings or sequences by indentation, up to MaxBytes.
func stairs(line string) []byte {
	var b strings.Builder
	for i := 0; b.Len()+i+len(line) < MaxBytes; i++ {
		b.WriteString(strings.Repeat(" ", i) + line)
	}
	return []byte(b.String())
}

// shapes are texts of nearly MaxBytes, each of many small parts.
func shapes() map[string][]byte {
	most := "top:\n" + string(fill("", " k%d: 1\n", "", 9*(MaxKeys-10)))
	return map[string][]byte{
		"unique keys":          fill("", "k%d: 1\n", "", MaxBytes),
		"short keys":           fill("", "%d:\n", "", MaxBytes),
		"explicit keys":        fill("", "? k%d\n", "", MaxBytes),
		"explicit pairs":       fill("", "? k%d\n: 1\n", "", MaxBytes),
		"nested keys":          fill("", "k%d:\n  a: 1\n", "", MaxBytes),
		"keys of one flow map": fill("a: {", "k%d: 1,", "}", MaxBytes),
		"flow maps":            fill("a: [", "{k: 1},", "]", MaxBytes),
		"a sequence":           fill("", "- a\n", "", MaxBytes),
		"maps in a sequence":   fill("", "- k%d: 1\n", "", MaxBytes),
		"a flow sequence":      fill("a: [", "b,", "]", MaxBytes),
		"comments":             fill("a: 1\n", "#\n", "", MaxBytes),
		"most keys, comments":  fill(most, "#\n", "", MaxBytes),
		"most keys, items":     fill(most+"rest:\n", "- a\n", "", MaxBytes),
		"block text":           fill("a: |\n", "  x\n", "", MaxBytes),
		"quoted text":          fill("a: \"", "x\n ", "\"", MaxBytes),
		"plain text":           fill("a: x", "\n  x", "", MaxBytes),
		"empty lines":          fill("a: 1", "\n", "", MaxBytes),
		"stairs of keys":       stairs("a:\n"),
		"stairs of items":      stairs("-\n"),
		"documents":            fill("", "---\n", "", MaxBytes),
		"anchors":              fill("", "- &a%d x\n", "", MaxBytes),
		"tags":                 fill("", "- !!str x\n", "", MaxBytes),
		"aliases":              fill("a: [", "*a,", "]", MaxBytes),
		"full documents":       fill("", "--- a\n", "", MaxBytes),
		"ends of documents":    fill("", "---\n...\n", "", MaxBytes),
		"keys without values":  fill("a: {", "k%d,", "}", MaxBytes),
		"items without values": fill("", "-\n", "", MaxBytes),
		"blocks":               fill("a:\n", " - |\n   x\n", "", MaxBytes),
		"empty lines in text":  fill("a: |\n", "  x\n"+strings.Repeat("\n", maxEmpty), "", MaxBytes),
		"text, empty lines":    fill("a: |\n", "  some text\n", strings.Repeat("\n", maxEmpty), MaxBytes),
	}
}

// TestCostIsLinear counts the bytes that Parse allocates, which are the same
// on a busy machine. What is quadratic in the number of parts allocates more
// than 5,000 bytes for each byte of such a text.
func TestCostIsLinear(t *testing.T) {
	const perByte = 1500
	for name, text := range shapes() {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := Parse(text)
		runtime.ReadMemStats(&after)
		if n := (after.TotalAlloc - before.TotalAlloc) / uint64(len(text)); n > perByte {
			t.Errorf("%s: parsing %d bytes (%v) allocates %d bytes for each, more than %d", name, len(text), err, n, perByte)
		} else {
			t.Logf("%s: %d bytes for each of %d (%v)", name, n, len(text), err)
		}
	}
}

func TestNumberOfKeysIsBounded(t *testing.T) {
	var b strings.Builder
	for i := range MaxKeys {
		fmt.Fprintf(&b, "k%d: 1\n", i)
	}
	if doc, err := Parse([]byte(b.String())); err != nil || len(doc.Keys()) != MaxKeys {
		t.Fatalf("%d keys: %v", MaxKeys, err)
	}
	b.WriteString("one: more\n")
	_, err := Parse([]byte(b.String()))
	if agentlab.CodeOf(err) != agentlab.CodeInvalid || !strings.Contains(err.Error(), "line 2001: more than 2000 keys") {
		t.Errorf("%d keys: %v", MaxKeys+1, err)
	}
}

// What the lexer reads again and again, or the parser copies, is refused before.
func TestRunsAreBounded(t *testing.T) {
	for text, want := range map[string]string{
		"a: |\n  x" + strings.Repeat("\n", maxEmpty+2):         "line 103: more than 100 empty lines in a row",
		"a: |\n  x" + strings.Repeat("\r\n", maxEmpty+2):       "line 103: more than 100 empty lines in a row",
		"a: |\n  x" + strings.Repeat("\r", maxEmpty+2):         "line 103: more than 100 empty lines in a row",
		"a: |\n  x\n" + strings.Repeat(" \t\n", maxEmpty+1):    "line 103: more than 100 empty lines in a row",
		"\na: \"" + strings.Repeat("\tx", maxChars+1) + "\"\n": `line 2: more than 1000 characters "\t"`,
		"a: " + strings.Repeat("<", maxChars+1):                `line 1: more than 1000 characters "<"`,
		"- a\n" + strings.Repeat("- &a x\n", 10000):            "line 2: anchors and aliases are not allowed",
		"- a\n" + strings.Repeat("- *a\n", 10000):              "line 2: anchors and aliases are not allowed",
		strings.Repeat("---\n", maxMarks+1):                    "line 11: a second document",
		"a: 1\n" + strings.Repeat("---\nb: 1\n", 10000):        "line 3: a second document",
		"a: {" + strings.Repeat("a,", MaxKeys+1) + "}":         "line 1: more than 2000 keys",
		strings.Repeat("-\n", MaxKeys+2):                       "line 2002: more than 2000 keys",
	} {
		if _, err := Parse([]byte(text)); agentlab.CodeOf(err) != agentlab.CodeInvalid || !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%.20q: %v", text, err)
		}
	}
	for _, text := range []string{
		"a: |\n  x\n" + strings.Repeat("\n", maxEmpty) + "b: 1\n", "a: \"" + strings.Repeat("\t", maxChars) + "\"\n\t", "# a\n---\na: '&b *c !d'\n...\n# b\n---\n",
	} {
		if _, err := Parse([]byte(text)); err != nil {
			t.Errorf("%.20q: %v", text, err)
		}
	}
}

func BenchmarkParse(b *testing.B) {
	for name, text := range shapes() {
		b.Run(strings.ReplaceAll(name, " ", "_"), func(b *testing.B) {
			b.SetBytes(int64(len(text)))
			for b.Loop() {
				_, _ = Parse(text)
			}
		})
	}
}
