package nft

import (
	"fmt"
	"strings"
)

// ruleset is the rendered rules as data, so that a test can remove single
// rules and check that a probe detects it.
type ruleset struct{ tables []*table }

type table struct {
	family, name string
	sets         []*set
	chains       []*chain
}

// set is a set, or a map if its elements have verdicts.
type set struct {
	name     string
	key      string // e.g. "ipv4_addr . inet_service"
	verdicts bool   // a verdict map
	flags    string
	size     int
	timeout  string // of elements that are added without a timeout
	note     string
	elems    []elem
}

// elem is one element. rule is the name of its policy rule.
type elem struct{ key, verdict, options, rule string }

type chain struct {
	name, hook string // hook is "" for a chain that is only a jump target
	rules      []rule
}

// rule is one statement line. name is the policy rule or guard that it
// enforces; it becomes the rule's comment.
type rule struct{ name, text string }

func (t *table) set(s set) *set {
	t.sets = append(t.sets, &s)
	return &s
}

func (t *table) chain(name, hook string) *chain {
	c := &chain{name: name, hook: hook}
	t.chains = append(t.chains, c)
	return c
}

func (c *chain) add(name, format string, args ...any) {
	c.rules = append(c.rules, rule{name, fmt.Sprintf(format, args...)})
}

func (s *set) add(rule, key, verdict, options string) {
	s.elems = append(s.elems, elem{key: key, verdict: verdict, options: options, rule: rule})
}

// text renders the ruleset as one transaction that replaces the loaded tables.
// A table is added before it is deleted, so that the deletion succeeds if
// there is none: nftables 1.0.6 has no command for that.
func (r *ruleset) text() string {
	var b strings.Builder
	b.WriteString(removal(r.families()...))
	for _, t := range r.tables {
		t.write(&b)
	}
	return b.String()
}

func (r *ruleset) families() []string {
	var out []string
	for _, t := range r.tables {
		out = append(out, t.family)
	}
	return out
}

func removal(families ...string) string {
	var b strings.Builder
	for _, f := range families {
		fmt.Fprintf(&b, "add table %s %s\ndelete table %s %s\n", f, tableName, f, tableName)
	}
	return b.String()
}

func (t *table) write(b *strings.Builder) {
	fmt.Fprintf(b, "\ntable %s %s {\n", t.family, t.name)
	for _, s := range t.sets {
		s.write(b)
	}
	// A chain must be declared before a map or a rule refers to it, but not
	// within one table block: nft reads the block completely first.
	for _, c := range t.chains {
		c.write(b)
	}
	b.WriteString("}\n")
}

// writeChains adds sets and chains to an existing table. An existing chain is
// flushed first, so that it has its rules only once.
func (t *table) writeChains(b *strings.Builder) {
	for _, s := range t.sets {
		fmt.Fprintf(b, "table %s %s {\n", t.family, t.name)
		s.write(b)
		b.WriteString("}\n")
	}
	for _, c := range t.chains {
		fmt.Fprintf(b, "add chain %s %s %s\nflush chain %s %s %s\n", t.family, t.name, c.name, t.family, t.name, c.name)
	}
	fmt.Fprintf(b, "table %s %s {\n", t.family, t.name)
	for _, c := range t.chains {
		c.write(b)
	}
	b.WriteString("}\n")
}

func (s *set) write(b *strings.Builder) {
	kind, key := "set", s.key
	if s.verdicts {
		kind, key = "map", s.key+" : verdict"
	}
	if s.note != "" {
		fmt.Fprintf(b, "\t# %s\n", s.note)
	}
	fmt.Fprintf(b, "\t%s %s {\n\t\ttype %s\n", kind, s.name, key)
	if s.size != 0 {
		fmt.Fprintf(b, "\t\tsize %d\n", s.size)
	}
	if s.flags != "" {
		fmt.Fprintf(b, "\t\tflags %s\n", s.flags)
	}
	if s.timeout != "" {
		fmt.Fprintf(b, "\t\ttimeout %s\n", s.timeout)
	}
	if len(s.elems) != 0 {
		b.WriteString("\t\telements = {\n")
		for i, e := range s.elems {
			b.WriteString("\t\t\t" + e.String())
			if i != len(s.elems)-1 {
				b.WriteByte(',')
			}
			b.WriteByte('\n')
		}
		b.WriteString("\t\t}\n")
	}
	b.WriteString("\t}\n\n")
}

// String returns the element in the syntax of nft.
func (e elem) String() string {
	out := e.key
	if e.options != "" {
		out += " " + e.options
	}
	if e.rule != "" {
		out += " comment " + quote(e.rule)
	}
	if e.verdict != "" {
		out += " : " + e.verdict
	}
	return out
}

func (c *chain) write(b *strings.Builder) {
	fmt.Fprintf(b, "\tchain %s {\n", c.name)
	if c.hook != "" {
		fmt.Fprintf(b, "\t\t%s; policy accept;\n", c.hook)
	}
	for _, r := range c.rules {
		b.WriteString("\t\t" + r.text)
		if r.name != "" {
			b.WriteString(" comment " + quote(r.name))
		}
		b.WriteByte('\n')
	}
	b.WriteString("\t}\n\n")
}

// maxQuoted is the maximum length of a comment or a log prefix in nftables.
const maxQuoted = 120

// quote returns a string constant of s. nft has no escapes, so characters that
// are not known to be safe are replaced.
func quote(s string) string {
	s = strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', strings.ContainsRune(" ._:/*-[]", r):
			return r
		}
		return '?'
	}, s)
	return `"` + s[:min(len(s), maxQuoted)] + `"`
}
