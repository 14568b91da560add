package pvenode_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// entry is one thing that a recording tells: a command, a call, or text that
// only a step of the replay can make again.
type entry struct {
	section string // the "== …" line above it
	line    int    // in its file, from 1
	kind    entryKind
	text    string // the command or call, as recorded

	out, err []string // of a command
	rc       int

	status string // of a call: "200 OK"
	body   string // JSON, or ""
	task   string // JSON of the task's status, or ""
	log    []string

	raw []string // lines of no command: after the entry above
}

type entryKind string

const (
	command entryKind = "$"
	apiCall entryKind = ">"
	rawText entryKind = "raw"
)

// noise are lines that the machine of the recordings added, with why.
var noise = []struct{ pattern, why string }{
	{`^for my \(\.\.\.\) is experimental at `, "the recorded machine has an older Perl than its code requires"},
	{`^unable to get memory stat for \d+ - can't open '/sys/fs/cgroup/`, "the recorded machine has no cgroups v2"},
	{`^Use of uninitialized value in multiplication`, "follows from the missing control groups"},
	{`^(real|user|sys)\t`, "durations; measured by the tests of the traps"},
	{`^   [(a-z]`, "output of the recorder"},
}

func isNoise(line string) bool {
	for _, n := range noise {
		if regexp.MustCompile(n.pattern).MatchString(line) {
			return true
		}
	}
	return false
}

// readTranscript reads one recording.
func readTranscript(t *testing.T, version, name string) []entry {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", "transcripts", version, name))
	if err != nil {
		t.Fatal(err)
	}
	p := transcriptParser{}
	for i, line := range strings.Split(string(data), "\n") {
		p.line(i+1, strings.TrimSuffix(line, "\r"))
	}
	return p.entries
}

type transcriptParser struct {
	entries []entry
	section string
	zfs     bool
	open    bool // a command or call is being read
}

func (p *transcriptParser) last() *entry { return &p.entries[len(p.entries)-1] }

func (p *transcriptParser) line(n int, s string) {
	switch {
	case strings.HasPrefix(s, "== "):
		p.section, p.zfs, p.open = s[3:], false, false
	case s == "-- zfs calls:":
		p.zfs, p.open = true, false
	case strings.HasPrefix(s, "$ "):
		p.begin(entry{line: n, kind: command, text: s[2:]})
	case regexp.MustCompile(`^> (GET|POST|PUT|DELETE) /`).MatchString(s):
		p.begin(entry{line: n, kind: apiCall, text: s[2:]})
	case p.zfs && strings.HasPrefix(s, "   zfs "):
	case p.open && p.detail(s):
	case strings.TrimSpace(s) == "" || isNoise(s):
	default:
		p.rawLine(n, s)
	}
}

func (p *transcriptParser) begin(e entry) {
	e.section, e.text = p.section, strings.TrimRight(e.text, " ")
	p.entries = append(p.entries, e)
	p.zfs, p.open = false, true
}

// detail takes a line of the answer of the entry above.
func (p *transcriptParser) detail(s string) bool {
	e := p.last()
	rest, ok := strings.CutPrefix(s, "  ")
	if !ok {
		return p.continued(s)
	}
	switch {
	case e.kind == command && strings.HasPrefix(rest, "out| "):
		add(&e.out, rest[5:])
	case e.kind == command && strings.HasPrefix(rest, "err| "):
		add(&e.err, rest[5:])
	case e.kind == command && strings.HasPrefix(rest, "rc="):
		e.rc, _ = strconv.Atoi(rest[3:])
	case e.kind == apiCall && strings.HasPrefix(rest, "HTTP/1.1 "):
		e.status = rest[len("HTTP/1.1 "):]
	case e.kind == apiCall && strings.HasPrefix(rest, "{"):
		e.body = rest
	case e.kind == apiCall && strings.HasPrefix(rest, "task: "):
		e.task = rest[len("task: "):]
	case e.kind == apiCall && strings.HasPrefix(rest, "log| "):
		add(&e.log, rest[5:])
	default:
		return false
	}
	return true
}

// continued takes the second line of a parameter that has two.
func (p *transcriptParser) continued(s string) bool {
	e := p.last()
	if e.kind == apiCall && e.status == "" && s != "" {
		e.text += "\n" + s
		return true
	}
	return false
}

func add(lines *[]string, s string) {
	if !isNoise(s) {
		*lines = append(*lines, s)
	}
}

func (p *transcriptParser) rawLine(n int, s string) {
	if len(p.entries) == 0 || p.last().kind != rawText || p.last().section != p.section || p.open {
		p.entries = append(p.entries, entry{section: p.section, line: n, kind: rawText, text: s})
		p.open = false
	}
	p.last().raw = append(p.last().raw, s)
}

// argv splits a recorded command at its blanks. The recordings do not quote:
// spelled says how those were typed whose arguments hold blanks.
func argv(text string) []string {
	for tail, words := range spelled {
		if head, ok := strings.CutSuffix(text, " "+tail); ok {
			return append(strings.Split(head, " "), words...)
		}
	}
	return strings.Split(text, " ")
}

const publicKey = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPZ1Zk8nHk7p2mWq6Fh0K0cGzq1m0m3eDq0oU0r6J5aB agent@lab"

var spelled = map[string][]string{
	"golden image":                   {"golden image"},
	publicKey:                        {publicKey},
	"echo out; echo err >&2; exit 3": {"echo out; echo err >&2; exit 3"},
}

// parameters splits the parameters of a recorded call, whose values may hold
// blanks but nothing that looks like the next name.
func parameters(t *testing.T, text string) (method, path string, params [][2]string) {
	t.Helper()
	method, rest, _ := strings.Cut(text, " ")
	path, rest, _ = strings.Cut(rest, " ")
	starts := regexp.MustCompile(`(^| )[a-zA-Z][a-zA-Z0-9_-]*=`).FindAllStringIndex(rest, -1)
	for i, at := range starts {
		end := len(rest)
		if i+1 < len(starts) {
			end = starts[i+1][0]
		}
		k, v, _ := strings.Cut(strings.TrimPrefix(rest[at[0]:end], " "), "=")
		params = append(params, [2]string{k, v})
	}
	if len(starts) == 0 && strings.TrimSpace(rest) != "" {
		t.Fatalf("call %q: invalid parameters", text)
	}
	return method, path, params
}
