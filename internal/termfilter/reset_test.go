package termfilter

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/test/guard"
)

// undone returns what Reset writes after the output of a guest.
func undone(t *testing.T, in string) string {
	t.Helper()
	var out bytes.Buffer
	f := New(&out, Options{})
	_, _ = f.Write([]byte(in))
	out.Reset()
	if err := f.Reset(); err != nil {
		t.Fatal(err)
	}
	got := out.String()
	out.Reset()
	if err := f.Reset(); err != nil || out.Len() > 0 {
		t.Errorf("the second reset writes %q, %v", &out, err)
	}
	return got
}

const plainStyle = "\x1b[m\x1b(B\x0f"

func TestReset(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"text\r\n", ""},
		{"text\x1b[?10", ""},
		{"\x1b[1;31m", plainStyle},
		{"\x1b[?1049h\x1b[22;0;0t\x1b[?25l", "\x1b[?25h\x1b[23;0t\x1b[?1049l" + plainStyle},
		{"\x1b[?1049h\x1b[22;0;0t\x1b[?1049l\x1b[23;0;0t", plainStyle},
		{"\x1b[?1;1000;1002;1006h\x1b[?1000l", "\x1b[?1l\x1b[?1002l\x1b[?1006l" + plainStyle},
		{"\x1b[?1003r", "\x1b[?1003l" + plainStyle}, // may be saved as set
		{"\x1b=\x1b[2;5r", "\x1b>\x1b7\x1b[r\x1b8" + plainStyle},
		{"\x1b=\x1b>\x1b[2;5r\x1b[r", plainStyle},
		{"\x1b[>1u\x1b[?1049h\x1b[>1u\x1b[>3u\x1b[<u", "\x1b[<1u\x1b[?1049l\x1b[<1u" + plainStyle},
		{"\x1b[=5;1u\x1b[>4;2m\x1b[4 q", "\x1b[=0u\x1b[0 q\x1b[>4m" + plainStyle},
		{"\x1bP=1s\x1b\\\x1b]8;;http://a\a\x1b]4;1;red\a\x1b]11;red\a\x1b]10;?\a", "\x1bP=2s\x1b\\\x1b]8;;\x1b\\\x1b]111\x1b\\\x1b]104\x1b\\" + plainStyle},
		{"\x1bP=1s\x1b\\\x1bP=2s\x1b\\\x1b]8;;http://a\a\x1b]8;;\a", plainStyle},
	} {
		if got := undone(t, c.in); got != c.want {
			t.Errorf("%q: %q, want %q", c.in, got, c.want)
		}
	}
}

// Each mode that passes is reset, unless its default is unknown.
func TestResetOfEachMode(t *testing.T) {
	for prefix, list := range map[string][]string{"?": privateModes, "": ansiModes} {
		for _, mode := range list {
			on, off := "h", "l"
			if slices.Contains(modesSet, prefix+mode) {
				on, off = "l", "h"
			}
			want := "\x1b[" + prefix + mode + off + plainStyle
			if slices.Contains(modesKept, prefix+mode) {
				want = plainStyle
			}
			if got := undone(t, "\x1b["+prefix+mode+on); got != want {
				t.Errorf("%s%s: %q, want %q", prefix, mode, got, want)
			}
			if got := undone(t, "\x1b["+prefix+mode+off); got != plainStyle {
				t.Errorf("%s%s was not changed: %q", prefix, mode, got)
			}
		}
	}
}

// A terminal in which a full-screen program was cut off is as it was before.
func TestResetInTmux(t *testing.T) {
	tmux, err := exec.LookPath("tmux")
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "tf")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	run := func(args ...string) string {
		t.Helper()
		cmd := exec.Command(tmux, append([]string{"-u", "-S", filepath.Join(dir, "s"), "-f", "/dev/null"}, args...)...)
		cmd.Env = append(os.Environ(), "TMUX=")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	const flags = "#{alternate_on} #{cursor_flag} #{insert_flag} #{keypad_flag} #{keypad_cursor_flag} #{mouse_any_flag} " +
		"#{mouse_sgr_flag} #{origin_flag} #{wrap_flag} #{scroll_region_upper} #{scroll_region_lower} #{cursor_x} #{cursor_y}"
	const guest = "\x1b[?1049h\x1b[22;0;0t\x1b[?1h\x1b=\x1b[?25l\x1b[?7l\x1b[4h\x1b[?1000h\x1b[?1002h\x1b[?1006h\x1b[?2004h\x1b[2;9r\x1b[?6h\x1b[31mfull"
	screens := map[string]string{"before": "", "cut": guest, "reset": guest + undone(t, guest)}
	state := map[string]string{}
	for name, text := range screens {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte("first\n"+text), 0o600); err != nil {
			t.Fatal(err)
		}
		run("new-session", "-d", "-s", name, "-x", "80", "-y", "24", "cat "+file+"; printf '\\033]2;shown\\007'; exec sleep 300")
		guard.Until(t, name+" is shown", func() bool {
			return run("display-message", "-p", "-t", name, "#{pane_title}") == "shown\n"
		})
		state[name] = run("display-message", "-p", "-t", name, flags) + strings.TrimSpace(run("capture-pane", "-p", "-t", name))
	}
	run("kill-server")
	if state["reset"] != state["before"] {
		t.Errorf("%q, want %q", state["reset"], state["before"])
	}
	if state["cut"] == state["before"] {
		t.Error("the guest changes nothing")
	}
}
