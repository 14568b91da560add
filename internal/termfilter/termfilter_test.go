package termfilter

import (
	"bytes"
	"encoding/base64"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/creack/pty"

	"github.com/agentlab-vm/agentlab/test/guard"
)

func filtered(in string, split func(i int) bool) string {
	var out bytes.Buffer
	f := New(&out, Options{Clipboard: true})
	from := 0
	for i := range len(in) {
		if split(i) {
			_, _ = f.Write([]byte(in[from:i]))
			from = i
		}
	}
	_, _ = f.Write([]byte(in[from:]))
	return out.String()
}

func whole(int) bool      { return false }
func eachByte(int) bool   { return true }
func b64(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }

// Each row is an attack of a guest, and what the terminal gets of it.
func TestAttacks(t *testing.T) {
	const replaced = "\uFFFD"
	for name, c := range map[string]struct{ in, want string }{
		"clipboard read":               {"\x1b]52;c;?\aX", "X"},
		"clipboard read, several":      {"\x1b]52;cp;?\x1b\\X", "X"},
		"clipboard, not base64":        {"\x1b]52;c;a b\aX", "X"},
		"clipboard, empty":             {"\x1b]52;c;\aX", "X"},
		"clipboard, cut buffer":        {"\x1b]52;0;" + b64("x") + "\aX", "X"},
		"clipboard, end of a paste":    {"\x1b]52;c;" + b64("\x1b[201~rm\n") + "\aX", "X"},
		"clipboard, too large":         {"\x1b]52;c;" + b64(strings.Repeat("a", 100<<10)) + "\aX", "X"},
		"clipboard of kitty":           {"\x1b]5522;type=read;Lg==\x1b\\X", "X"},
		"title report":                 {"\x1b]2;;touch x;\a\x1b[21tX", "\x1b]2;;touch x;\aX"},
		"icon report":                  {"\x1b[20tX", "X"},
		"title in hexadecimal":         {"\x1b[>0tX\x1b[>1T", "X"},
		"title report with zeros":      {"\x1b[0021tX", "X"},
		"title with controls":          {"\x1b]0;a\nb\x01c\u009bd\x9be\u202ef\aX", "\x1b]0;abcdef\aX"},
		"title, long":                  {"\x1b]2;" + strings.Repeat("é", 200) + "\aX", "\x1b]2;" + strings.Repeat("é", 128) + "\aX"},
		"DECRQSS":                      {"\x1bP$q\"p\x1b\\X", "X"},
		"XTGETTCAP":                    {"\x1bP+q544e\x1b\\X", "X"},
		"user-defined keys":            {"\x1bP0;1|17/6c730a\x1b\\X", "X"},
		"sixel":                        {"\x1bPq#0~~\x1b\\X", "X"},
		"tmux control mode":            {"\x1bP1000p%exit\x1b\\X", "X"},
		"passthrough of tmux":          {"\x1bPtmux;\x1b\x1b]52;c;?\a\x1b\\X", "X"},
		"passthrough of a title":       {"\x1bPtmux;\x1b\x1b]2;x\a\x1b\\X", "X"},
		"passthrough of a report":      {"\x1bPtmux;\x1b\x1b[21t\x1b\\X", "X"},
		"passthrough of two":           {"\x1bPtmux;\x1b\x1b]52;c;" + b64("a") + "\a\x1b\x1b]52;c;?\a\x1b\\X", "X"},
		"passthrough without end":      {"\x1bPtmux;\x1b\x1b]52;c;" + b64("a") + "\x1b\\X", "X"},
		"passthrough, too large":       {"\x1bPtmux;\x1b\x1b]52;c;" + b64(strings.Repeat("a", 100<<10)) + "\a\x1b\\X", "X"},
		"passthrough, end of a paste":  {"\x1bPtmux;\x1b\x1b]52;c;" + b64("\x1b[201~rm\n") + "\a\x1b\\X", "X"},
		"passthrough in a passthrough": {"\x1bPtmux;\x1b\x1bPtmux;\x1b\x1b\x1b\x1b]52;c;" + b64("a") + "\a\x1b\x1b\\\x1b\\X", "X"},
		"passthrough of another":       {"\x1bPtmuy;\x1b\x1b]2;x\aX", "\x1b]2;x\aX"},
		"answerback":                   {"\x05X", "X"},
		"ZMODEM":                       {"**\x18B00000000000000\r", "**B00000000000000\r"},
		"checksum of a rectangle":      {"\x1b[1;1;1;1;9;9*yX", "X"},
		"checksum of macros":           {"\x1b[?63;1nX", "X"},
		"macro":                        {"\x1b[1*zX", "X"},
		"print":                        {"\x1b[iX\x1b[5i\x1b[?4i", "X"},
		"identity, obsolete":           {"\x1bZX", "X"},
		"rxvt graphics":                {"\x1bGQX", "QX"},
		"font":                         {"\x1b]50;?\aX", "X"},
		"iTerm2 file":                  {"\x1b]1337;File=inline=0:QQ==\aX", "X"},
		"working directory":            {"\x1b]7;file:///etc\aX", "X"},
		"notification":                 {"\x1b]9;x\a\x1b]99;i=1;x\x1b\\\x1b]777;notify;a;b\aX", "X"},
		"functions of editors":         {"\x1b]51;[\"call\",\"f\",[]]\aX", "X"},
		"file of dtterm":               {"\x1b]I/etc/passwd\x1b\\X", "X"},
		"move and resize":              {"\x1b[3;0;0t\x1b[8;9;9t\x1b[2tX", "X"},
		"kitty graphics":               {"\x1b_Gt=f,a=T;L2V0Yy9wYXNzd2Q=\x1b\\X", "X"},
		"privacy message":              {"\x1b^x\x1b\\X", "X"},
		"start of string":              {"\x1bXx\x1b\\X", "X"},
		"title of screen":              {"\x1bkx\x1b\\X", "X"},
		"link to a file":               {"\x1b]8;;file:///etc/passwd\aX\x1b]8;;\a", "\x1b]8;;\aX\x1b]8;;\a"},
		"link to a program":            {"\x1b]8;id=1;ssh://-oProxyCommand=x\aX", "\x1b]8;;\aX"},
		"link, scheme in disguise":     {"\x1b]8;; http://a\aX\x1b]8;;javascript:http://a\a", "\x1b]8;;\aX\x1b]8;;\a"},
		"mail with a file":             {"\x1b]8;;mailto:a@b?attach=/etc/passwd\aX", "\x1b]8;;\aX"},
		"VT52":                         {"\x1b[?2lX", "X"},
		"VT52 in a list":               {"\x1b[?2;25lX", "\x1b[?25lX"},
		"leave UTF-8":                  {"\x1b%@ě", "ě"},
		"8-bit answers":                {"\x1b GX", "X"},
		"conformance level":            {"\x1b[62;2\"pX", "X"},
		"locked keyboard":              {"\x1b[2hX", "X"},
		"mouse that hangs":             {"\x1b[?1001hX", "X"},
		"8-bit CSI":                    {"\x9b21tX", replaced + "21tX"},
		"8-bit OSC":                    {"\x9d52;c;?\x9cX", replaced + "52;c;?" + replaced + "X"},
		"8-bit control in UTF-8":       {"\u009b21tX\u0085", "21tX"},
		"control in a broken rune":     {"\xe2\x9b21tX", replaced + replaced + "21tX"},
		"large count":                  {"a\x1b[99999999bX", "aX"},
		"endless CSI":                  {"\x1b[" + strings.Repeat("1;", 1<<20) + "mX", "X"},
		"endless OSC":                  {"\x1b]2;" + strings.Repeat("a", 1<<20) + "\aX", "X"},
		"endless DCS":                  {"\x1bP" + strings.Repeat("a", 1<<20) + "\x1b\\X", "X"},
		"control in a sequence":        {"\x1b[3\n1mX", "\n\x1b[31mX"},
		"escape in a sequence":         {"\x1b[2\x1b[31mX", "\x1b[31mX"},
		"cancelled":                    {"\x1b[2\x18X\x1b]2;a\x1aY", "XY"},
		"OSC hidden in an OSC":         {"\x1b]2;a\x1b]52;c;?\aX", "X"},
		"command in a colour":          {"\x1b]11;`id`\aX", "X"},
		"text in a prompt mark":        {"\x1b]133;C;cmdline=rm -rf\aX", "X"},
		"prefix in the middle":         {"\x1b[1>qX\x1b[2?1hX", "XX"},
		"intermediate before a number": {"\x1b[$1pX", "X"},
		"unknown":                      {"\x1b[1~X\x1b#8\x1b]6;x\a", "X"},
		"not complete":                 {"X\x1b]52;c;", "X"},
	} {
		for way, split := range map[string]func(int) bool{"whole": whole, "in bytes": eachByte} {
			if got := filtered(c.in, split); got != c.want {
				t.Errorf("%s, %s: %q, want %q", name, way, got, c.want)
			}
		}
	}
}

// Each row passes unchanged: full-screen programs need it.
func TestWhatPasses(t *testing.T) {
	for _, in := range []string{
		"text\r\n\ttab\bé€😀\x0e\x0f\a",
		"\x1b[H\x1b[2J\x1b[3;4H\x1b[K\x1b[5A\x1b[2L\x1b[3P\x1b[4X\x1b[80b\x1b[2;20r\x1b[3S\x1b[2T\x1b[s\x1b[u",
		"\x1b[m\x1b[1;31m\x1b[38;2;1;2;3m\x1b[48:2::1:2:3m\x1b[4:3m\x1b[58:5:1m",
		"\x1b[?1049h\x1b[?1;1000;1002;1006h\x1b[?2004h\x1b[?1004h\x1b[?2026h\x1b[?2026l\x1b[?25l\x1b[4l\x1b[34h",
		"\x1b[2 q\x1b[!p\x1b[>1u\x1b[<u\x1b[=5;1u\x1b[?u\x1b[>4;1m\x1b[>4m\x1b[>4n\x1b[?4m",
		"\x1b[c\x1b[>c\x1b[0c\x1b[>q\x1b[6n\x1b[5n\x1b[?996n\x1b[?2026$p\x1b[14t\x1b[16t\x1b[18t\x1b[22;0;0t\x1b[23;2t",
		"\x1b(B\x1b)0\x1b7\x1b8\x1b=\x1b>\x1bM\x1bD\x1bE\x1bH\x1bc\x1b%G",
		"\x1b]0;title\a\x1b]2;título ✜\x1b\\\x1b]1;\a",
		"\x1b]8;id=a1;https://example.com/?q=1\x1b\\link\x1b]8;;\x1b\\\x1b]8;;mailto:a@example.com\a",
		"\x1b]52;c;" + b64("copied\ttext\nž") + "\a\x1b]52;;" + b64("tmux") + "\a\x1b]52;p;" + b64("x") + "\x1b\\",
		"\x1b]52;c;" + b64(strings.Repeat("a", 75<<10)) + "\a",
		"\x1b]4;1;?;2;#aabbcc\a\x1b]10;?\x1b\\\x1b]11;rgb:11/22/33\a\x1b]12;light blue\a\x1b]104\a\x1b]104;1;2\a\x1b]110\a\x1b]112\a",
		"\x1b]133;A\a\x1b]133;D;0\a\x1bP=1s\x1b\\\x1bP=2s\x1b\\",
	} {
		for way, split := range map[string]func(int) bool{"whole": whole, "in bytes": eachByte} {
			if got := filtered(in, split); got != in {
				t.Errorf("%s: %q, want %q", way, got, in)
			}
		}
	}
}

func TestClipboardOff(t *testing.T) {
	var out bytes.Buffer
	if _, err := New(&out, Options{}).Write([]byte("a\x1b]52;c;" + b64("x") + "\ab")); err != nil || out.String() != "ab" {
		t.Errorf("%q, %v", &out, err)
	}
}

func TestWriteFails(t *testing.T) {
	r, w := io.Pipe()
	_ = r.Close()
	if n, err := New(w, Options{}).Write([]byte("text")); n != 0 || err != io.ErrClosedPipe {
		t.Errorf("%d, %v", n, err)
	}
}

// forbidden is what no output of the filter may contain, independent of its parser.
var forbidden = regexp.MustCompile(`\x1b[PX^_k]([^=]|=[^12])|\x05|\x18|\x1b\]52;[^;]*;\?|` +
	`\x1b\](7|9|50|51|99|777|1337);|\x1b\[2[01]t|\x1b\[[0-9;]*i|\x1b\[[0-9;]*\*|\x1b%@|\x1b G|\x1b[ZG]|` +
	`\x1b\][^\a\x1b]*\x1b[^\\]`)

// FuzzFilter checks that the output does not depend on how the input is split, has no
// forbidden sequence, is valid UTF-8, and passes the filter again unchanged.
func FuzzFilter(f *testing.F) {
	for _, s := range []string{
		"\x1b[31mé\x1b]0;t\a", "\x1b]52;c;?\a", "\x1b]8;;http://a\x1b\\x", "\x1b[?2;25l\xc3(\xe2\x9b1", "\x1bP=1s\x1b\\\x1b_G\x1b]2;\x1b[21t",
		"\x1b]4;1;?\a\x1b[>4;1m\x1b(B\u009b\x1b]R\x1b]P1234567", "\x1b[3\n\x7f1m\x1b[1$p",
	} {
		f.Add(s, uint64(0x5a5a))
	}
	f.Fuzz(func(t *testing.T, in string, splits uint64) {
		want := filtered(in, whole)
		if got := filtered(in, eachByte); got != want {
			t.Fatalf("in bytes %q, want %q", got, want)
		}
		if got := filtered(in, func(i int) bool { return splits>>(i%64)&1 != 0 }); got != want {
			t.Fatalf("split %q, want %q", got, want)
		}
		if bad := forbidden.FindString(want); bad != "" {
			t.Fatalf("%q contains %q", want, bad)
		}
		if !utf8.ValidString(want) {
			t.Fatalf("%q is not UTF-8", want)
		}
		if again := filtered(want, whole); again != want {
			t.Fatalf("%q becomes %q", want, again)
		}
	})
}

// What Zellij 0.45 writes passes: the constants of zellij-client/src/lib.rs,
// os_input_output.rs and stdin_handler.rs, and zellij-server/src/tab/clipboard.rs. Its
// question about kitty's graphics does not pass; without an answer it draws none.
func TestZellijPassesUnchanged(t *testing.T) {
	text := "\x1b[?1049h\x1b[?1l\x1b=\x1b[r\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1005l\x1b[?1006l\x1b[?12l\x1b[>1u\x1b[?2031h\x1b[?996n" +
		"\x1b[?2004h\x1b[?1004h\x1b[14t\x1b[16t\x1b]11;?\x1b\\\x1b]10;?\x1b\\\x1b[?2026$p\x1b]4;5;?\x1b\\\x1b[c" +
		"\x1b[?1000h\x1b[?1002h\x1b[?1003h\x1b[?1015h\x1b[?1006h" +
		"\x1b[?2026h\x1b[?25l\x1b[3;1H\x1b[m\x1b[38;2;1;2;3m\x1b[48;5;4m\x1b[4:3mtext │\x1b[2 q\x1b[?25h\x1b[?2026l\x1bP=1s\x1b\\x\x1bP=2s\x1b\\" +
		"\x1b]0;main | claude\x07\x1b]8;id=3;https://example.com/\x1b\\link\x1b]8;;\x1b\\\x1b]52;c;" + base64.StdEncoding.EncodeToString([]byte("copied")) + "\x1b\\" +
		"\x1b[?1006l\x1b[?1015l\x1b[?1003l\x1b[?1002l\x1b[?1000l\x1b[<1u\x1b[?2031l\x1b[?1004l\x1b[?1049l\x1b[m\x1b[?25h\x1b[24;1HBye from Zellij!\n"
	if got := filtered(text, whole); got != text {
		t.Errorf("%q, want %q", got, text)
	}
	if got := filtered("a\x1b_Ga=q,i=31,s=1,v=1,t=d,f=24;AAAA\x1b\\b", whole); got != "ab" {
		t.Errorf("the question about graphics passes: %q", got)
	}
}

// A session of tmux with less and vim in a terminal passes unchanged.
func TestTmuxPassesUnchanged(t *testing.T) {
	tmux, err := exec.LookPath("tmux")
	if err != nil {
		t.Skip("tmux is not installed")
	}
	dir, err := os.MkdirTemp("", "tf")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte(strings.Repeat("line é\n", 200)), 0o600); err != nil {
		t.Fatal(err)
	}
	editor := "less"
	if _, err := exec.LookPath("vim"); err == nil {
		editor = "vim -u NONE -n"
	}
	cmd := exec.Command(tmux, "-u", "-S", filepath.Join(dir, "s"), "-f", "/dev/null", "new-session",
		"less "+file+"; "+editor+" "+file, ";", "set", "-g", "mouse", "on", ";", "set", "-g", "set-titles", "on")
	cmd.Env = append(os.Environ(), "TERM=xterm-256color", "TMUX=", "LC_ALL=C.UTF-8")
	f, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 24, Cols: 80})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	stop := time.AfterFunc(guard.Patience, func() { _ = cmd.Process.Kill() })
	defer stop.Stop()
	var all bytes.Buffer
	step := 0
	steps := []struct{ see, send string }{{"line é", " G"}, {"(END)", "q"}, {"200 lines", ":q!\r"}}
	if editor == "less" {
		steps[2] = struct{ see, send string }{"line", "q"}
	}
	from := 0
	buf := make([]byte, 4096)
	for {
		n, err := f.Read(buf)
		all.Write(buf[:n])
		for step < len(steps) && strings.Contains(all.String()[from:], steps[step].see) {
			_, _ = f.WriteString(steps[step].send)
			from = all.Len()
			step++
		}
		if err != nil {
			break
		}
	}
	_ = cmd.Wait()
	if step < len(steps) {
		t.Fatalf("stopped before %q: %q", steps[step].see, all.String())
	}
	if got := filtered(all.String(), whole); got != all.String() {
		t.Errorf("%q, want %q", got, all.String())
	}
}

func BenchmarkPlainText(b *testing.B) {
	p := []byte(strings.Repeat("The quick brown fox jumps over the lazy dog.\r\n", 700))
	f := New(io.Discard, Options{})
	b.SetBytes(int64(len(p)))
	for b.Loop() {
		_, _ = f.Write(p)
	}
}

// Text for the clipboard passes in a passthrough of tmux, too, as the plain sequence.
func TestClipboardInPassthrough(t *testing.T) {
	for _, end := range []string{"\a", "\x1b\\"} {
		plain := "\x1b]52;c;" + b64("copied") + end
		in := "a\x1bPtmux;" + strings.ReplaceAll(plain, "\x1b", "\x1b\x1b") + "\x1b\\b"
		for _, split := range []func(int) bool{whole, eachByte} {
			if got := filtered(in, split); got != "a"+plain+"b" {
				t.Errorf("%q: %q", in, got)
			}
		}
		var out bytes.Buffer
		if _, err := New(&out, Options{}).Write([]byte(in)); err != nil || out.String() != "ab" {
			t.Errorf("without the clipboard: %q, %v", out.String(), err)
		}
	}
}
