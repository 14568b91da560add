// Package lazyre has regular expressions that are compiled when they are first
// used. The supervisor of each VM is a process that contains every package of the
// daemon: a compiled expression costs it memory and time, and it uses few of them.
package lazyre

import (
	"os"
	"regexp"
	"strings"
	"sync"
)

// Regexp is a regular expression. Its methods are those of regexp.Regexp.
type Regexp struct{ compile func() *regexp.Regexp }

// inTest is whether this process is a test, in which a bad expression fails at once.
var inTest = strings.HasSuffix(os.Args[0], ".test")

// New returns the expression text. A bad one panics in every test of the package
// that has it.
func New(text string) *Regexp {
	r := &Regexp{sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(text) })}
	if inTest {
		r.compile()
	}
	return r
}

// MatchString reports whether s contains a match.
func (r *Regexp) MatchString(s string) bool { return r.compile().MatchString(s) }

// FindStringSubmatch returns the first match in s and its groups, nil if there is
// none.
func (r *Regexp) FindStringSubmatch(s string) []string { return r.compile().FindStringSubmatch(s) }

// ReplaceAllString returns s with each match replaced.
func (r *Regexp) ReplaceAllString(s, by string) string { return r.compile().ReplaceAllString(s, by) }
