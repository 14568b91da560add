package redact

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"os/exec"
	"strings"
	"testing"
	"testing/iotest"

	"pgregory.net/rapid"
)

const secret = `p@ss/w0rd&more \ $HOME's "quoted"`

func TestEncodings(t *testing.T) {
	r := New(secret)
	b64 := func(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }
	js, err := json.Marshal(map[string]string{"k": secret})
	if err != nil {
		t.Fatal(err)
	}
	cases := map[string]string{
		"plain":            "x" + secret + "y",
		"base64":           b64(secret),
		"base64 in line":   b64("user:" + secret + "\n"),
		"base64 offset 1":  b64("a" + secret + "b"),
		"base64 offset 2":  b64("ab" + secret + "c"),
		"base64 offset 3":  b64("abc" + secret),
		"base64 url":       base64.RawURLEncoding.EncodeToString([]byte("é" + secret + "ÿÿ")),
		"hex":              hex.EncodeToString([]byte("a" + secret)),
		"HEX":              strings.ToUpper(hex.EncodeToString([]byte(secret))),
		"query":            url.Values{"q": {secret}}.Encode(),
		"path":             "/a/" + url.PathEscape(secret) + "/b",
		"userinfo":         (&url.URL{Scheme: "https", User: url.UserPassword("u", secret), Host: "h"}).String(),
		"lower percent":    lowerPercent(url.QueryEscape(secret)),
		"json":             string(js),
		"go":               fmt.Sprintf("%q", secret),
		"single quoted":    `export A='` + strings.ReplaceAll(secret, "'", `'\''`) + `'`,
		"sed":              `s/x/` + backslash(secret, `/&\`) + `/`,
		"html":             `p@ss/w0rd&amp;more \ $HOME's &quot;quoted&quot;`,
		"as a host name":   strings.ToLower(secret) + ".example.com", // records of DNS hold lower case only
		"touching another": secret + secret,
	}
	for name, in := range cases {
		t.Run(name, func(t *testing.T) {
			got := r.String(in)
			if !strings.Contains(got, Replacement) {
				t.Fatalf("nothing redacted in %q", in)
			}
			for _, part := range []string{"w0rd", "more", "cQ@c3", b64("w0rd&more")[2:8], hex.EncodeToString([]byte("w0rd"))} {
				if strings.Contains(got, part) {
					t.Errorf("%q is left of %q", got, in)
				}
			}
		})
	}
	if got := r.String(secret + secret); got != Replacement {
		t.Errorf("touching values: %q", got)
	}
}

// What real tools make of the value is what has to be found.
func TestToolOutput(t *testing.T) {
	scripts := map[string]string{
		"set -x":   `set -x; : "$S"`,
		"printf q": `printf %q "$S"`,
		"declare":  `declare -p S`,
		"base64":   `printf %s "$S" | base64`,
		"xxd":      `printf %s "$S" | od -An -v -tx1 | tr -d ' \n'`,
		"env":      `env | grep ^S=`,
		"export":   `export -p | grep ' S='`,
	}
	for _, val := range []string{secret, "simple-token-0123456789", strings.Repeat("0123456789abcdef-", 20)} {
		r := New(val)
		for name, script := range scripts {
			cmd := exec.Command("bash", "-c", script)
			cmd.Env = []string{"S=" + val, "PATH=/usr/bin:/bin"}
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			got := r.Bytes(out)
			if !bytes.Contains(got, []byte(Replacement)) {
				t.Errorf("%s: not redacted: %q", name, out)
			}
			if name == "base64" && len(got) > len(out)/4+len(Replacement) {
				t.Errorf("%s: too much is left: %q", name, got)
			}
		}
	}
}

func TestManyLines(t *testing.T) {
	key := "-----BEGIN KEY-----\nQyNTUxOQAAACBhbGw5\nab\nAAAEC1c2VyQGhvc3QB\n-----END KEY-----\n"
	r := New(key)
	for name, in := range map[string]string{
		"whole":    "key: " + key + "end",
		"CRLF":     strings.ReplaceAll(key, "\n", "\r\n"),
		"indented": strings.ReplaceAll(key, "\n", "\n    "),
		"one line": "| AAAEC1c2VyQGhvc3QB |",
		"joined":   strings.ReplaceAll(key, "\n", " "),
		"json":     strings.ReplaceAll(key, "\n", `\n`),
	} {
		got := r.String(in)
		if strings.Contains(got, "QyNTUxOQAAAC") || strings.Contains(got, "AAAEC1c2Vy") {
			t.Errorf("%s: %q", name, got)
		}
	}
	if got := r.String("-----BEGIN KEY-----"); strings.Contains(got, Replacement) {
		t.Errorf("a PEM border alone was redacted: %q", got)
	}
}

func TestShortAndEmptyValues(t *testing.T) {
	r := New("", "true", "  12345 ", "\n")
	if !r.Empty() {
		t.Error("short values were taken")
	}
	if got := r.String("true 12345"); got != "true 12345" {
		t.Errorf("got %q", got)
	}
	var none *Redactor
	if got := none.String("abc"); got != "abc" {
		t.Errorf("nil redactor: %q", got)
	}
	p := []byte("abc")
	if none.Mask(nil, p) != 3 || none.Writer(io.Discard) == nil {
		t.Error("nil redactor does not pass all")
	}
}

func TestLongValueIsFoundInPieces(t *testing.T) {
	var b strings.Builder
	for i := range 900 {
		fmt.Fprintf(&b, "%05d", i*7919%100003)
	}
	v := b.String()
	r := New(v)
	if got := r.String("<" + v + ">"); got != "<"+Replacement+">" {
		t.Errorf("got %d bytes", len(got))
	}
	for i := range r.exact.nodes {
		if r.exact.nodes[i].hold >= MaxPattern {
			t.Fatalf("holds back %d bytes", r.exact.nodes[i].hold)
		}
	}
}

func TestBuffersOnlyPossibleSecrets(t *testing.T) {
	var out bytes.Buffer
	w := New("hunter2-secret").Writer(&out)
	for _, c := range []struct{ in, want string }{
		{"hello ", "hello "}, {"hunt", ""}, {"ing season\n", "hunting season\n"}, {"hunter2-secre", ""}, {"t!", "[redacted]!"},
	} {
		out.Reset()
		if n, err := io.WriteString(w, c.in); err != nil || n != len(c.in) {
			t.Fatal(n, err)
		}
		if out.String() != c.want {
			t.Errorf("after %q: got %q, want %q", c.in, out.String(), c.want)
		}
	}
	out.Reset()
	_, _ = io.WriteString(w, "hunte")
	if err := w.Flush(); err != nil || out.String() != "hunte" {
		t.Errorf("flush: %v %q", err, out.String())
	}
}

func TestWriterPassesErrorsOn(t *testing.T) {
	r, w := io.Pipe()
	_ = r.Close()
	if _, err := io.WriteString(New("hunter2-secret").Writer(w), "text"); err == nil {
		t.Error("the error of the underlying writer is lost")
	}
}

// model redacts by brute force: every occurrence of every pattern, with gaps
// where those are allowed, and one that is cut off by the end.
func model(values []string, in string) (marks []bool) {
	marks = make([]bool, len(in))
	plain := make([]int, len(in))
	for i := range plain {
		plain[i] = i
	}
	for _, v := range values {
		for _, p := range variants(v) {
			if len(p) >= MinLength {
				mark(marks, in, [][]int{plain}, pieces(p, MaxPattern, 0), len(in)-1, 0)
			}
		}
		for _, p := range gapPatterns(v) {
			runs, end := significant(in)
			mark(marks, in, runs, pieces(p, loosePiece, looseLead), end, looseLead)
		}
	}
	return marks
}

// significant returns the positions of the bytes that are in no gap, as runs
// without a gap that is too long, and the position that counts as the end.
func significant(in string) (runs [][]int, end int) {
	var run []int
	gap := 0
	for i := range len(in) {
		if isGap(in[i]) {
			if gap++; gap > maxGap {
				runs, run = append(runs, run), nil
			}
			continue
		}
		gap, end = 0, i
		run = append(run, i)
	}
	if gap > maxGap {
		end = -1
	}
	return append(runs, run), end
}

func mark(marks []bool, in string, runs [][]int, patterns []string, end, lead int) {
	for _, run := range runs {
		text := make([]byte, len(run))
		for k, at := range run {
			text[k] = in[at]
		}
		for _, p := range patterns {
			for k := range run {
				n := len(p)
				for n > 0 && !strings.HasPrefix(string(text[k:]), p[:n]) {
					n--
				}
				switch {
				case n == len(p):
					for j := run[k+lead]; j <= run[k+n-1]; j++ {
						marks[j] = true
					}
				case n >= minPart && k+n == len(run) && run[k+n-1] == end:
					for j := run[k+lead]; j < len(in); j++ { // and the gap at the very end
						marks[j] = true
					}
				}
			}
		}
	}
}

func replaced(in string, marks []bool) string {
	var b strings.Builder
	for i := range len(in) {
		if !marks[i] {
			b.WriteByte(in[i])
		} else if i == 0 || !marks[i-1] {
			b.WriteString(Replacement)
		}
	}
	return b.String()
}

func masked(in string, marks []bool) string {
	p := []byte(in)
	for i := range p {
		if marks[i] {
			p[i] = '*'
		}
	}
	return string(p)
}

// genCase draws values over a small alphabet, so that they overlap, and a text
// that is full of them and of their parts.
func genCase(t *rapid.T) (values []string, in string) {
	values = rapid.SliceOfN(rapid.StringMatching("[ab/\n]{1,3}([abc]{5,9}|[ab:]{14,20})"), 1, 3).Draw(t, "values")
	var parts []string
	for _, v := range values {
		parts = append(parts, wrapped(v, 7), wrapped(hex.EncodeToString([]byte(v)), 5), v[:len(v)-1], v, v[:len(v)/2], v[len(v)/2:], base64.StdEncoding.EncodeToString([]byte("x"+v)), url.QueryEscape(v))
	}
	part := rapid.OneOf(rapid.SampledFrom(parts), rapid.StringMatching("[abc/*\n ]{0,4}|[ \n]{14,19}"))
	return values, strings.Join(rapid.SliceOfN(part, 0, 12).Draw(t, "parts"), "")
}

// genOverlaps draws values that begin with the end of others, and a text of them and of
// their parts, with gaps.
func genOverlaps(t *rapid.T) (values []string, in string) {
	for i := range rapid.IntRange(1, 3).Draw(t, "count") {
		v := rapid.StringMatching("[ab]{6,11}|[abc]{14,22}").Draw(t, "value")
		if i > 0 && rapid.Bool().Draw(t, "overlaps") {
			o := rapid.SampledFrom(values).Draw(t, "of")
			v = o[len(o)-rapid.IntRange(1, 4).Draw(t, "end"):] + v
		}
		values = append(values, v)
	}
	for range rapid.IntRange(1, 5).Draw(t, "parts") {
		v := rapid.SampledFrom(values).Draw(t, "part")
		v = v[rapid.IntRange(0, 2).Draw(t, "from") : len(v)-rapid.SampledFrom([]int{0, 0, 1, 4}).Draw(t, "short")]
		for at := range v {
			in += v[at:at+1] + rapid.SampledFrom([]string{"", "", "", "", "", "\n", " ", "\n "}).Draw(t, "gap")
		}
	}
	return values, in
}

// wrapped breaks s into lines, set in by a space, as tools do.
func wrapped(s string, width int) string {
	var lines []string
	for ; len(s) > width; s = s[width:] {
		lines = append(lines, s[:width])
	}
	return strings.Join(append(lines, s), "\n ")
}

// maxHeld is the most that a stream holds back, in bytes: one piece, or one
// that is looked for loosely with the longest gaps in it.
const maxHeld = max(MaxPattern, loosePiece*(1+maxGap))

func TestStreamEqualsModelHoweverItIsSplit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		values, in := genCase(t)
		r := New(values...)
		want := replaced(in, model(values, in))
		var out bytes.Buffer
		w := r.Writer(&out)
		for rest := in; rest != ""; {
			n := rapid.IntRange(1, len(rest)).Draw(t, "n")
			if _, err := io.WriteString(w, rest[:n]); err != nil {
				t.Fatal(err)
			}
			if len(w.held) >= maxHeld {
				t.Fatalf("holds back %d", len(w.held))
			}
			rest = rest[n:]
		}
		if err := w.Flush(); err != nil {
			t.Fatal(err)
		}
		if out.String() != want {
			t.Fatalf("values %q text %q:\n got %q\nwant %q", values, in, out.String(), want)
		}
		viaReader, err := io.ReadAll(r.Reader(iotest.OneByteReader(strings.NewReader(in))))
		if err != nil || string(viaReader) != want {
			t.Fatalf("reader: %v %q, want %q", err, viaReader, want)
		}
	})
}

// A sender that resumes at the settled byte, like the log upload, ends with
// every secret masked.
func TestMaskResumedAtTheSettledByte(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		gen := rapid.SampledFrom([]func(*rapid.T) ([]string, string){genCase, genOverlaps}).Draw(t, "gen")
		values, in := gen(t)
		r := New(values...)
		want := masked(in, model(values, in))
		var got []byte
		seen := 0
		for seen < len(in) {
			seen = min(len(in), seen+rapid.IntRange(1, 9).Draw(t, "n"))
			chunk := []byte(in[len(got):seen])
			n, before := len(chunk), got[max(len(got)-Context, 0):]
			if seen == len(in) {
				r.MaskEnd(before, chunk)
			} else {
				n = r.Mask(before, chunk)
			}
			got = append(got, chunk[:n]...)
		}
		if string(got) != want {
			t.Fatalf("values %q text %q:\n got %q\nwant %q", values, in, got, want)
		}
	})
}

// More bytes than the longest possible beginning of a secret are not held back.
func TestMaskSettlesLongRuns(t *testing.T) {
	for _, secret := range []string{"hunter2-very-secret", "abcabcabcabc"} { // the second ends as it begins
		in := strings.Repeat("*", maxRun) + secret
		for cut := range len(secret) {
			p := []byte(in[:len(in)-cut])
			r := New(secret)
			n := r.Mask(nil, p)
			if n == 0 {
				t.Fatal("nothing is settled")
			}
			rest := []byte(in[n:] + "\n")
			r.MaskEnd(p[n-Context:n], rest)
			if got := string(p[:n]) + string(rest); got != strings.Repeat("*", len(in))+"\n" {
				t.Errorf("%d bytes follow: %q", cut, got[maxRun-10:])
			}
		}
	}
}

func TestSettingsSecrets(t *testing.T) {
	doc := `{"model":"opus","env":{"A":"value-a"},"permissions":{"allow":["Bash"]},"apiKeyHelper":"helper","x":[{"auth_token":"tok"}]}`
	got := map[string]bool{}
	for _, s := range SettingsSecrets(doc) {
		got[s] = true
	}
	if len(got) != 3 || !got["value-a"] || !got["helper"] || !got["tok"] {
		t.Errorf("got %v", got)
	}
	if SettingsSecrets("{") != nil {
		t.Error("broken JSON has secrets")
	}
}

func FuzzStream(f *testing.F) {
	f.Add("hunter2-secret", []byte("a hunter2-secret b"), 3)
	f.Add("a\nbbbbbbbbbbbbbbbb\nc", []byte("bbbbbbbbbbbbbbbbbb"), 1)
	f.Fuzz(func(t *testing.T, value string, text []byte, n int) {
		if n < 1 || len(value) > 300 || len(text) > 4096 {
			return
		}
		r := New(value)
		whole := r.String(string(text))
		var out bytes.Buffer
		w := r.Writer(&out)
		for rest := text; len(rest) > 0; {
			k := min(n, len(rest))
			_, _ = w.Write(rest[:k])
			rest = rest[k:]
		}
		_ = w.Flush()
		if out.String() != whole {
			t.Fatalf("split by %d: %q, whole: %q", n, out.String(), whole)
		}
		if v := strings.TrimSpace(value); len(v) >= MinLength && !strings.Contains(Replacement, v) {
			if strings.Contains(string(text), v) && !strings.Contains(whole, Replacement) {
				t.Fatalf("%q is left in %q", v, whole)
			}
		}
		if n := r.Mask(text[:len(text)/2], bytes.Clone(text)); n < 0 || n > len(text) {
			t.Fatalf("Mask settled %d of %d", n, len(text))
		}
	})
}

func BenchmarkWriter(b *testing.B) {
	r := New(secret, strings.Repeat("k3y", 20), "another-token-abcdef")
	text := []byte(strings.Repeat("The quick brown fox jumps over the lazy dog 0123456789.\n", 1000))
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		w := r.Writer(io.Discard)
		_, _ = w.Write(text)
	}
}
