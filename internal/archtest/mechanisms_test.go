package archtest

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// mechanisms are the jobs that one package does for all others: what shows
// another implementation in a source file, and the files that may contain it.
var mechanisms = []struct {
	shows   *regexp.Regexp
	instead string
	allowed []string // files, or directories with a final slash
}{
	{regexp.MustCompile(`\bunix\.Flock\(`), "lock.TryFile", []string{"internal/lock/", "internal/guest/runner/agent.go"}},
	{regexp.MustCompile(`interface\s*\{\s*CloseWrite`), "stream.Splice or stream.CloseWrite", []string{"internal/stream/", "internal/egress/gate/tcp.go"}},
	{regexp.MustCompile(`\btype \w*[bB]ufferedConn\b`), "stream.Unread", nil},
	{regexp.MustCompile(`\btype \w*([bB]ucket|[lL]imiter)\b`), "rate.Limiter", []string{"internal/auth/limiter.go"}},
	{regexp.MustCompile(`\btype (\w*([tT]ailWriter|[lL]imitWriter|[bB]oundedBuffer)|[tT]ail) `), "bounded.Tail or bounded.Head", []string{"internal/bounded/"}},
	{regexp.MustCompile(`\btype \w*[lL]imitListener\b`), "connlimit.New", nil},
	{regexp.MustCompile(`\bToValidUTF8\(`), "agentlab.OneLine or agentlab.Cut", []string{"line.go"}},
}

// Each of these jobs has one implementation.
func TestOneOfEach(t *testing.T) {
	for _, s := range sources(t) {
		if s.test || strings.HasPrefix(s.path, "test/") {
			continue
		}
		text, err := os.ReadFile(filepath.Join(root, s.path))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range mechanisms {
			found := m.shows.Find(text)
			if found != nil && !slices.ContainsFunc(m.allowed, func(a string) bool { return s.path == a || strings.HasSuffix(a, "/") && strings.HasPrefix(s.path, a) }) {
				t.Errorf("%s: %q: use %s", s.path, found, m.instead)
			}
		}
	}
}
