package config

import (
	"flag"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

func TestParseHome(t *testing.T) {
	t.Setenv("AGENTLAB_HOME", "/of/the/environment")
	for _, c := range []struct {
		args        []string
		state, fail string
	}{
		{nil, "/of/the/environment/state", ""},
		{[]string{"--home", "/x"}, "/x/state", ""},
		{[]string{"--home=/x", "rest"}, "/x/state", ""},
		{[]string{"--system"}, "/var/lib/agentlab", ""},
		{[]string{"--home"}, "", "needs an argument"},
		{[]string{"--home="}, "", "--home needs a directory"},
		{[]string{"--home=/x", "--system"}, "", "cannot be used together"},
		{[]string{"--nonsense"}, "", "-nonsense"},
	} {
		h, err := ParseHome(flag.NewFlagSet("x", flag.ContinueOnError), c.args)
		if c.fail != "" {
			if agentlab.CodeOf(err) != agentlab.CodeInvalid || !strings.Contains(err.Error(), c.fail) {
				t.Errorf("%q: %v", c.args, err)
			}
			continue
		}
		p, perr := h.Paths()
		if err != nil || perr != nil || p.State != c.state {
			t.Errorf("%q: %s, %v, %v", c.args, p.State, err, perr)
		}
	}
}
