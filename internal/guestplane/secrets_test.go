package guestplane_test

import (
	"bytes"
	"encoding/base32"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"html"
	"io/fs"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf16"
	"unicode/utf8"

	"pgregory.net/rapid"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
	"github.com/agentlab-vm/agentlab/internal/guestplane"
	"github.com/agentlab-vm/agentlab/internal/guestplane/guesttest"
)

// shown are ways in which programs show a value, in the middle of other data.
var shown = map[string]func(before, v, after string) string{
	"plain":     func(b, v, a string) string { return b + v + a },
	"base64":    func(b, v, a string) string { return base64.StdEncoding.EncodeToString([]byte(b + v + a)) },
	"base64url": func(b, v, a string) string { return base64.RawURLEncoding.EncodeToString([]byte(b + v + a)) },
	"wrapped 76": func(b, v, a string) string {
		return fold(base64.StdEncoding.EncodeToString([]byte(b+v+a)), 76)
	},
	"wrapped 64": func(b, v, a string) string { return fold(base64.StdEncoding.EncodeToString([]byte(b+v+a)), 64) },
	"base64 query": func(b, v, a string) string {
		return url.QueryEscape(base64.StdEncoding.EncodeToString([]byte(b + v + a)))
	},
	"base32":      func(b, v, a string) string { return base32.StdEncoding.EncodeToString([]byte(b + v + a)) },
	"hex":         func(b, v, a string) string { return hex.EncodeToString([]byte(b + v + a)) },
	"HEX":         func(b, v, a string) string { return strings.ToUpper(hex.EncodeToString([]byte(b + v + a))) },
	"hex dump":    func(b, v, a string) string { return fmt.Sprintf("% x", b+v+a) },
	"hex wrapped": func(b, v, a string) string { return fold(hex.EncodeToString([]byte(b+v+a)), 60) },
	"folded":      func(b, v, a string) string { return fold(b+v+a, 20) },
	"query":       func(b, v, a string) string { return url.QueryEscape(b + v + a) },
	"path":        func(b, v, a string) string { return url.PathEscape(b + v + a) },
	"userinfo":    func(b, v, _ string) string { return url.UserPassword(b, v).String() },
	"JSON":        func(b, v, a string) string { p, _ := json.Marshal(b + v + a); return string(p) },
	"JSON in JSON": func(b, v, a string) string {
		p, _ := json.Marshal(b + v + a)
		p, _ = json.Marshal(string(p))
		return string(p)
	},
	"Go":     func(b, v, a string) string { return strconv.Quote(b + v + a) },
	"HTML":   func(b, v, a string) string { return html.EscapeString(b + v + a) },
	"shell":  func(b, v, a string) string { return "'" + strings.ReplaceAll(b+v+a, "'", `'\''`) + "'" },
	"CRLF":   func(b, v, a string) string { return strings.ReplaceAll(b+v+a, "\n", "\r\n") },
	"UTF-16": func(b, v, a string) string { return wide(b + v + a) },
}

func fold(s string, width int) string {
	var b strings.Builder
	for ; len(s) > width; s = s[width:] {
		b.WriteString(s[:width] + "\n")
	}
	return b.String() + s
}

func wide(s string) string {
	var out []byte
	for _, u := range utf16.Encode([]rune(s)) {
		out = append(out, byte(u), byte(u>>8))
	}
	return string(out)
}

// traces of a run of letters and digits, in the encodings that change those.
func traces(core string) map[string]string {
	out := map[string]string{"plain": core, "hex": hex.EncodeToString([]byte(core)), "HEX": strings.ToUpper(hex.EncodeToString([]byte(core))), "UTF-16": wide(core)}
	for n := range 5 {
		lead := strings.Repeat("\x00", n)
		if n < 3 {
			s := base64.StdEncoding.EncodeToString([]byte(lead + core))
			out[fmt.Sprint("base64 at ", n)] = s[(n*8+5)/6 : (n+len(core))*8/6]
		}
		s := base32.StdEncoding.EncodeToString([]byte(lead + core))
		out[fmt.Sprint("base32 at ", n)] = s[(n*8+4)/5 : (n+len(core))*8/5]
	}
	return out
}

// kept is every byte that the controller holds, with white space taken out in
// a second copy, so that what is only wrapped is seen.
func kept(t *rapid.T, c *guesttest.Controller) []byte {
	var all bytes.Buffer
	err := filepath.WalkDir(c.Dir, func(path string, e fs.DirEntry, err error) error {
		all.WriteString(path + "\n")
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		p, err := os.ReadFile(path)
		all.Write(p)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	rows, _ := c.Artifacts(t.Context(), c.JobID)
	fmt.Fprintf(&all, "%+v\n%+v\n%+v\n", rows, c.Reports(), c.Events())
	return append(all.Bytes(), bytes.Join(bytes.Fields(all.Bytes()), nil)...)
}

// Whatever a secret holds, however a guest's programs show it and wherever
// the chunks are cut, no byte that is kept tells it.
func TestNothingSecretIsKept(t *testing.T) {
	var names []string
	for name := range shown {
		names = append(names, name)
	}
	rapid.Check(t, func(rt *rapid.T) {
		c := guesttest.New(t, guestapi.BootstrapResponse{Job: &guestapi.Job{Upload: true}}, artifact.Limits{})
		defer c.Stop()
		h := c.Plane(guestplane.Config{}).Handler(c.VMID)
		send := func(method, target, token, body string) int {
			req := httptest.NewRequestWithContext(t.Context(), method, target, strings.NewReader(body))
			req.Header.Set("Authorization", "Bearer "+token)
			w := httptest.NewRecorder()
			h.ServeHTTP(w, req)
			return w.Code
		}
		core := rapid.StringMatching("[A-Za-z0-9]{16}").Draw(rt, "core")
		around := rapid.StringMatching(`([ -~éß€]{0,8}|[ -~]{0,9}\n[ -~]{0,9})`)
		v := around.Draw(rt, "head") + core + around.Draw(rt, "tail")
		c.Secrets = []string{v}
		how := rapid.SampledFrom(names).Draw(rt, "how")
		text := shown[how](rapid.StringMatching("[a-z:]{0,7}").Draw(rt, "before"), v, rapid.StringMatching("[a-z.]{0,7}").Draw(rt, "after"))
		log := "begin " + text + " end\n" + text
		for off := 0; off < len(log); {
			n := min(len(log), off+rapid.IntRange(1, 200).Draw(rt, "chunk"))
			target := fmt.Sprintf("%s?offset=%d", guestapi.PathLog, off)
			if n == len(log) {
				target += "&final=1"
			}
			if code := send("POST", target, c.Response().Runner.Token, log[off:n]); code != http.StatusOK {
				rt.Fatalf("log: %d", code)
			}
			size, err := c.Service.LogSize(t.Context(), c.JobID)
			if err != nil {
				rt.Fatal(err)
			}
			if int(size) <= off && n < len(log) { // all was held back: more at once
				n = len(log)
				if code := send("POST", target+"&final=1", c.Response().Runner.Token, log[off:n]); code != http.StatusOK {
					rt.Fatalf("log: %d", code)
				}
				break
			}
			off = int(size)
		}
		if !utf8.ValidString(text) {
			text = v // JSON holds no other text
		}
		message, _ := json.Marshal(guestapi.Report{Status: "RUNNING", Phase: "agent", Message: "why: " + text, Result: &guestapi.Result{Branch: "x/" + v}})
		send("POST", guestapi.PathReport, c.Response().Runner.Token, string(message))
		for _, path := range []string{"agent.log", "report.json"} {
			if code := send("PUT", guestapi.PathUpload+path, c.Response().Artifact.Token, log); code != http.StatusOK {
				rt.Fatalf("%s: %d", path, code)
			}
		}
		send("PUT", guestapi.PathUpload+"outputs/"+url.PathEscape(text), c.Response().Artifact.Token, "x")
		all := kept(rt, c)
		for form, trace := range traces(core) {
			if i := bytes.Index(all, []byte(trace)); i >= 0 {
				rt.Fatalf("%q shown as %s is kept (%s): …%q", v, how, form, all[max(0, i-60):min(len(all), i+80)])
			}
		}
	})
}

// A guest that makes every call fail gets a few lines of the daemon's log.
func TestLogLinesAreBounded(t *testing.T) {
	var out bytes.Buffer
	now := time.Now().Add(-2 * time.Hour) // grants last an hour from now on
	c := guesttest.New(t, guestapi.BootstrapResponse{Job: &guestapi.Job{}}, artifact.Limits{})
	h := c.Plane(guestplane.Config{
		Logger: slog.New(slog.NewTextHandler(&out, nil)),
		Clock:  func() time.Time { return now },
	}).Handler(c.VMID)
	c.Fail(agentlab.Errorf(agentlab.CodeUnavailable, "the database failed"))
	const hour = 3600
	for range 10 * hour {
		req := httptest.NewRequestWithContext(t.Context(), "POST", guestapi.PathReport, strings.NewReader(`{"status":"RUNNING","phase":"agent"}`))
		req.Header.Set("Authorization", "Bearer "+c.Response().Runner.Token)
		h.ServeHTTP(httptest.NewRecorder(), req)
		now = now.Add(time.Second / 10)
	}
	lines := strings.Count(out.String(), "\n")
	if most := 50 + hour/5 + 1; lines > most || lines < most/2 {
		t.Errorf("%d lines in an hour, want about %d", lines, most)
	}
	if !strings.Contains(out.String(), "dropped_before=") {
		t.Error("it is not told how many lines were dropped")
	}
}
