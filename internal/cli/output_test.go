package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/creack/pty"

	"github.com/agentlab-vm/agentlab"

	"github.com/agentlab-vm/agentlab/internal/work/attach"
)

// A guest cannot make a failure look like success with a code that is cut to
// eight bits.
func TestGuestStatus(t *testing.T) {
	for code, want := range map[int]int{0: 0, 1: 1, 7: 7, 255: 255, 256: 255, 512: 255, 257: 255, -1: 255, -256: 255, 1 << 40: 255} {
		if got := ExitCode(attach.GuestStatus(code)); got != want {
			t.Errorf("%d becomes %d, want %d", code, got, want)
		}
	}
}

// On a terminal an artifact is shown only as far as it is text.
func TestArtifactOnATerminal(t *testing.T) {
	const hostile = "plain\n\x1b]0;title\a\u009b2Jend\n"
	binary := "\x1f\x8b\x08\x00\x00" + hostile
	for name, c := range map[string]struct {
		body  string
		force bool
		code  agentlab.Code
		want  string
	}{
		"text":          {body: "one\ntwo\n", want: "one\ntwo\n"},
		"hostile":       {body: hostile, want: "plain\n.]0;title..2Jend\n"},
		"binary":        {body: binary, code: agentlab.CodeInvalid},
		"binary forced": {body: binary, force: true, want: binary},
		"empty":         {},
	} {
		t.Run(name, func(t *testing.T) {
			ptmx, tty, err := pty.Open()
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = ptmx.Close() }()
			shown := make(chan string, 1)
			go func() {
				p, _ := io.ReadAll(ptmx) // ends with an error when the terminal is closed
				shown <- strings.ReplaceAll(string(p), "\r\n", "\n")
			}()
			err = CopyOut(tty, strings.NewReader(c.body), c.force)
			if agentlab.CodeOf(err) != c.code {
				t.Errorf("%v, want code %q", err, c.code)
			}
			_ = tty.Close()
			if got := <-shown; got != c.want {
				t.Errorf("the terminal shows %q, want %q", got, c.want)
			}
		})
	}
	// A file or a pipe gets the bytes as they are.
	var out bytes.Buffer
	if err := CopyOut(&out, strings.NewReader(binary), false); err != nil || out.String() != binary {
		t.Errorf("%q %v", out.String(), err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	if err := CopyOut(w, strings.NewReader(binary), false); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	if p, _ := io.ReadAll(r); string(p) != binary {
		t.Errorf("%q", p)
	}
}

// JSON on a terminal has no character of a guest that controls the terminal, and the
// same values.
func TestJSONDoesNotControlATerminal(t *testing.T) {
	const hostile = "\u009b2J\u202e\x1b]0;x\a <b>"
	var out, errOut bytes.Buffer
	a := &App{Stdout: &out, Stderr: &errOut, JSON: true}
	if err := errors.Join(a.PrintJSON(map[string]string{"text": hostile}), a.PrintJSONLine([]string{hostile})); err != nil {
		t.Fatal(err)
	}
	a.PrintError(errors.New(hostile))
	for _, text := range []string{out.String(), errOut.String()} {
		if strings.ContainsFunc(text, func(r rune) bool { return r != '\n' && agentlab.ControlsTerminal(r) }) || text == "" {
			t.Errorf("%q", text)
		}
	}
	var doc struct{ Text string }
	if err := json.NewDecoder(&out).Decode(&doc); err != nil || doc.Text != hostile {
		t.Errorf("%q, %v", doc.Text, err)
	}
}
