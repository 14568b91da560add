package redact

import (
	"encoding/base32"
	"encoding/base64"
	"encoding/binary"
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

// minLine is the minimum length of a line of a multi-line value that is also a
// value, and of a value that is also matched in lower case: shorter ones may
// be common words.
const minLine = 12

// variants returns the forms in which a value is matched:
//
//   - unchanged, and each of its longer lines; with minLine bytes or more also
//     in lower case and with the escapes of DNS, as in records of host names;
//   - base64, standard and URL alphabet, padded or not, and base32, at each of
//     the alignments that it can have inside longer data;
//   - hexadecimal in both cases, and UTF-16 in both byte orders;
//   - percent-encoded for queries, paths, userinfo, as JavaScript does, and
//     every byte; also what is percent-encoded of its base64;
//   - escaped as in JSON, JSON inside JSON, Go, Python, HTML, quoted-printable
//     mail, POSIX shells, bash and sed.
func variants(value string) []string {
	v := strings.TrimSpace(value)
	if len(v) < MinLength {
		return nil
	}
	long := len(v) > longValue
	var out []string
	for _, s := range parts(v) {
		out = append(append(out, s), escapes(s)...)
		out = append(out, encodings(s, long)...)
		if !long {
			out = append(out, percentAll(s), strings.ToLower(percentAll(s)))
			out = append(out, wide(s)...)
			if low := strings.ToLower(s); len(low) >= minLine {
				out = append(out, low, dnsName(s))
			}
		}
	}
	return out
}

// parts returns the value, if it is not long, and its lines. Output that
// contains a long value contains its lines.
func parts(v string) []string {
	all := lines(v)
	if len(v) <= longPart || len(all) == 0 {
		all = append(all, v)
	}
	return all
}

// The lengths in bytes from which only the parts of a value are matched, and
// only its usual encodings: a matcher needs about 40 times the length of a
// value in memory, in the guest too.
const (
	longPart  = 1 << 10
	longValue = 4 << 10
)

// gapPatterns returns the patterns of a value that are matched with gaps: dumps,
// and the value itself, whose lines a program may have wrapped, joined or
// indented.
func gapPatterns(value string) []string {
	v := strings.TrimSpace(value)
	if len(v) < MinLength {
		return nil
	}
	var out []string
	for _, s := range parts(v) {
		for _, p := range append(encodings(s, len(v) > longValue), s) {
			p = strings.Map(func(r rune) rune {
				if r < utf8.RuneSelf && isGap(byte(r)) {
					return -1
				}
				return r
			}, p)
			if len(p) >= minLoose {
				out = append(out, p)
			}
		}
	}
	return out
}

// lines returns the lines of a multi-line value that are secret themselves,
// without PEM borders, which are also in public files.
func lines(v string) []string {
	if !strings.Contains(v, "\n") {
		return nil
	}
	var out []string
	for line := range strings.SplitSeq(v, "\n") {
		line = strings.TrimSpace(line)
		if len(line) >= minLine && !strings.HasPrefix(line, "-----") {
			out = append(out, line)
		}
	}
	return out
}

// encodings returns encodings that change every byte, so that escaping does
// not affect them; for long values only the usual ones.
func encodings(v string, usual bool) []string {
	out := append(base64s(v), hex.EncodeToString([]byte(v)))
	if !usual {
		out = append(append(out, base32s(v)...), strings.ToUpper(hex.EncodeToString([]byte(v))))
	}
	return out
}

// wide returns UTF-16 in both byte orders.
func wide(v string) []string {
	var le, be []byte
	for _, u := range utf16.Encode([]rune(v)) {
		le = binary.LittleEndian.AppendUint16(le, u)
		be = binary.BigEndian.AppendUint16(be, u)
	}
	return []string{string(le), string(be)}
}

func escapes(v string) []string {
	quoted := strconv.Quote(v)
	out := []string{
		percent(v, "-._~"), percent(v, "-._~!'()*"), percent(v, "-._~!'()*;,/?:@&=+$#"),
		url.QueryEscape(v), url.PathEscape(v), url.User(v).String(),
		jsonGo(v), quoted[1 : len(quoted)-1],
		jsonPlain(v), strings.ReplaceAll(jsonPlain(v), "/", `\/`), jsonASCII(v),
		html.EscapeString(v), strings.NewReplacer("&#34;", "&quot;", "&#39;", "'").Replace(html.EscapeString(v)),
		strings.NewReplacer("&#34;", "&quot;", "&#39;", "&#x27;").Replace(html.EscapeString(v)),
		strings.ReplaceAll(v, "'", `'\''`), strings.ReplaceAll(v, "'", `'"'"'`),
		backslash(v, "\\\"$`"), backslash(v, `\'`), backslash(v, "/&\\"), backslash(v, "/&\\$.*[]^"),
		backslash(v, " !\"#$%&'()*,;<>?[\\]^`{|}~"), backslash(v, " !\"$&'()*,;<>?[\\]^`{|}"),
		strings.ReplaceAll(v, "\n", "\r\n"), strings.ReplaceAll(v, "\n", " "), strings.ReplaceAll(v, "\n", ""),
		strings.ReplaceAll(backslash(v, `\'`), "\n", `\n`),
		printable(v),
	}
	for _, once := range []string{jsonGo(v), jsonPlain(v), jsonASCII(v)} {
		out = append(out, jsonGo(once), jsonPlain(once))
	}
	for _, quoted := range []string{v, backslash(v, `\'`), backslash(v, `\"`)} {
		out = append(out, byteEscapes(quoted, `\%03o`), byteEscapes(quoted, `\x%02x`), byteEscapes(quoted, `\x%02X`))
	}
	for _, s := range out[:6] {
		out = append(out, lowerPercent(s))
	}
	return out
}

// base64s returns the text that always appears if v is encoded as a part of
// longer data, and the full form if it is encoded alone or at the end.
func base64s(v string) []string {
	var out []string
	for _, enc := range []*base64.Encoding{base64.StdEncoding, base64.URLEncoding} {
		for before := range 3 {
			s := enc.EncodeToString([]byte(strings.Repeat("\x00", before) + v))
			from := (before*8 + 5) / 6
			to := (before + len(v)) * 8 / 6
			out = append(out, s[from:to], s[from:], strings.TrimRight(s[from:], "="))
			for _, part := range []string{s[from:to], s[from:]} {
				if q := percent(part, "-_"); q != part {
					out = append(out, q, lowerPercent(q))
				}
			}
		}
	}
	return out
}

func base32s(v string) []string {
	var out []string
	for before := range 5 {
		s := base32.StdEncoding.EncodeToString([]byte(strings.Repeat("\x00", before) + v))
		out = append(out, s[(before*8+4)/5:(before+len(v))*8/5])
	}
	return out
}

// printable returns quoted-printable without line breaks.
func printable(v string) string {
	var b strings.Builder
	for i := range len(v) {
		if c := v[i]; c == '=' || c > '~' || c < ' ' && c != '\n' && c != '\t' {
			fmt.Fprintf(&b, "=%02X", c)
		} else {
			b.WriteByte(c)
		}
	}
	return b.String()
}

// byteEscapes formats bytes that are not printable ASCII, and writes line ends
// like C.
func byteEscapes(v, format string) string {
	var b strings.Builder
	for i := range len(v) {
		switch c := v[i]; {
		case c == '\n':
			b.WriteString(`\n`)
		case c == '\t':
			b.WriteString(`\t`)
		case c == '\r':
			b.WriteString(`\r`)
		case c < ' ' || c > '~':
			fmt.Fprintf(&b, format, c)
		default:
			b.WriteByte(c)
		}
	}
	return b.String()
}

// dnsName returns v in the format of DNS tools: in lower case, with escapes
// for special characters of zone files. Dots are kept: they separate labels.
func dnsName(v string) string {
	var b strings.Builder
	for _, c := range []byte(v) {
		switch {
		case c < ' ' || c > '~':
			fmt.Fprintf(&b, `\%03d`, c)
		case strings.IndexByte(` '@;()"\`, c) >= 0:
			b.WriteByte('\\')
			b.WriteByte(c)
		case c >= 'A' && c <= 'Z':
			b.WriteByte(c - 'A' + 'a')
		default:
			b.WriteByte(c)
		}
	}
	return b.String()
}

func percentAll(v string) string {
	var b strings.Builder
	for i := range len(v) {
		fmt.Fprintf(&b, "%%%02X", v[i])
	}
	return b.String()
}

// percent encodes everything except letters, digits and safe.
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

// lowerPercent converts the hexadecimal digits of percent escapes to lower
// case.
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

// jsonGo returns JSON like Go's encoder, safe inside HTML.
func jsonGo(v string) string {
	p, _ := json.Marshal(v) // cannot fail for a string
	return string(p[1 : len(p)-1])
}

// jsonPlain returns JSON like most languages: without Go's escapes of HTML.
func jsonPlain(v string) string {
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(v) // cannot fail for a string and a Builder
	s := strings.TrimSuffix(b.String(), "\n")
	return s[1 : len(s)-1]
}

// jsonASCII returns JSON like Python: only ASCII.
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

// OpenVariables are variables of agents that are not secret: the names of models.
var OpenVariables = []string{"ANTHROPIC_MODEL", "GEMINI_MODEL", "OPENAI_MODEL"}

// SettingsSecrets returns the strings in a JSON document of settings that are
// secret: those below an object named "env", and those whose key contains key,
// token, secret, password or credential. Invalid JSON has none.
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
