package redact

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"html"
	"net/url"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// minLine is the length below which a line of a value with many lines is not
// a value of its own.
const minLine = 12

// variants returns the forms in which a value is looked for:
//
//   - as it is, and each of its longer lines;
//   - base64, standard and URL alphabet, padded or not, at each of the three
//     alignments that it can have inside longer data, and as wrapped lines;
//   - hexadecimal in both cases;
//   - percent-encoded for queries, paths, userinfo and as JavaScript does;
//   - escaped as in JSON, Go, HTML, POSIX shells and sed.
func variants(value string) []string {
	v := strings.TrimSpace(value)
	if len(v) < MinLength {
		return nil
	}
	out := append([]string{v}, escapes(v)...)
	out = append(out, base64s(v)...)
	out = append(out, hex.EncodeToString([]byte(v)), strings.ToUpper(hex.EncodeToString([]byte(v))))
	if strings.Contains(v, "\n") {
		for line := range strings.SplitSeq(v, "\n") {
			line = strings.TrimSpace(line)
			if len(line) < minLine || strings.HasPrefix(line, "-----") {
				continue // PEM borders tell nothing and stand in public files too
			}
			out = append(append(out, line), escapes(line)...)
		}
	}
	return out
}

func escapes(v string) []string {
	quoted := strconv.Quote(v)
	plain, _ := json.Marshal(v)
	out := []string{
		percent(v, "-._~"), percent(v, "-._~!'()*"), percent(v, "-._~!'()*;,/?:@&=+$#"),
		url.QueryEscape(v), url.PathEscape(v), url.User(v).String(),
		string(plain[1 : len(plain)-1]), quoted[1 : len(quoted)-1],
		jsonPlain(v), strings.ReplaceAll(jsonPlain(v), "/", `\/`), jsonASCII(v),
		html.EscapeString(v), strings.NewReplacer("&#34;", "&quot;", "&#39;", "'").Replace(html.EscapeString(v)),
		strings.NewReplacer("&#34;", "&quot;", "&#39;", "&#x27;").Replace(html.EscapeString(v)),
		strings.ReplaceAll(v, "'", `'\''`), strings.ReplaceAll(v, "'", `'"'"'`),
		backslash(v, "\\\"$`"), backslash(v, `\'`), backslash(v, "/&\\"), backslash(v, "/&\\$.*[]^"),
		backslash(v, " !\"#$%&'()*,;<>?[\\]^`{|}~"), backslash(v, " !\"$&'()*,;<>?[\\]^`{|}"),
		strings.ReplaceAll(v, "\n", "\r\n"), strings.ReplaceAll(v, "\n", " "), strings.ReplaceAll(v, "\n", ""),
		strings.ReplaceAll(backslash(v, `\'`), "\n", `\n`),
	}
	for _, s := range out[:6] {
		out = append(out, lowerPercent(s))
	}
	return out
}

// base64s returns what is sure to appear when v is encoded as a part of longer
// data, and the full form for when it is encoded alone or at the end.
func base64s(v string) []string {
	var out []string
	for _, enc := range []*base64.Encoding{base64.StdEncoding, base64.URLEncoding} {
		for before := range 3 {
			s := enc.EncodeToString([]byte(strings.Repeat("\x00", before) + v))
			from := (before*8 + 5) / 6
			to := (before + len(v)) * 8 / 6
			out = append(out, s[from:to], s[from:], strings.TrimRight(s[from:], "="))
		}
	}
	whole := base64.StdEncoding.EncodeToString([]byte(v))
	for _, width := range []int{76, 64} {
		for rest := whole; len(whole) > width && len(rest) >= minLine; {
			n := min(width, len(rest))
			out = append(out, rest[:n])
			rest = rest[n:]
		}
	}
	return out
}

// percent encodes all but letters, digits and safe.
func percent(v, safe string) string {
	var b strings.Builder
	for i := range len(v) {
		c := v[i]
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte(safe, c) >= 0 {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}

// lowerPercent makes the hexadecimal digits of percent escapes lower case.
func lowerPercent(s string) string {
	p := []byte(s)
	for i := 0; i+2 < len(p); i++ {
		if p[i] == '%' {
			copy(p[i+1:], strings.ToLower(string(p[i+1:i+3])))
			i += 2
		}
	}
	return string(p)
}

func backslash(v, special string) string {
	var b strings.Builder
	for i := range len(v) {
		if strings.IndexByte(special, v[i]) >= 0 {
			b.WriteByte('\\')
		}
		b.WriteByte(v[i])
	}
	return b.String()
}

// jsonPlain is JSON as most languages write it: without Go's escapes of HTML.
func jsonPlain(v string) string {
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(v) // a string and a Builder never fail
	s := strings.TrimSuffix(b.String(), "\n")
	return s[1 : len(s)-1]
}

// jsonASCII is JSON as Python writes it: nothing outside ASCII.
func jsonASCII(v string) string {
	var b strings.Builder
	for _, r := range jsonPlain(v) {
		switch {
		case r < utf8.RuneSelf:
			b.WriteRune(r)
		case r > 0xffff:
			hi, lo := utf16.EncodeRune(r)
			fmt.Fprintf(&b, `\u%04x\u%04x`, hi, lo)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	return b.String()
}

// SettingsSecrets returns the strings in a JSON document of settings that are
// secret: those below an object named "env", and those whose key speaks of a
// key, token, secret, password or credential. What is no JSON has none.
func SettingsSecrets(doc string) []string {
	var v any
	if json.Unmarshal([]byte(doc), &v) != nil {
		return nil
	}
	return settingsSecrets(v, false, nil)
}

func settingsSecrets(v any, secret bool, out []string) []string {
	switch v := v.(type) {
	case string:
		if secret {
			out = append(out, v)
		}
	case []any:
		for _, e := range v {
			out = settingsSecrets(e, secret, out)
		}
	case map[string]any:
		for k, e := range v {
			out = settingsSecrets(e, secret || secretKey(k), out)
		}
	}
	return out
}

func secretKey(k string) bool {
	k = strings.ToLower(k)
	if k == "env" || k == "headers" {
		return true
	}
	for _, word := range []string{"key", "token", "secret", "passw", "credential"} {
		if strings.Contains(k, word) {
			return true
		}
	}
	return false
}
