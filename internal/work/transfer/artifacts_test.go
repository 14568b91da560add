package transfer

import (
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/projectfile"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

func TestArtifactPatterns(t *testing.T) {
	for name, c := range map[string]struct {
		file string
		args []string
		want []string
		code agentlab.Code
	}{
		"declared":         {"outputs: [dist/**, ./a.log]\nsetup: [make]\nnetwork: {mode: nat}\n", nil, []string{"dist/**", "a.log"}, ""},
		"arguments":        {"outputs: [dist/**]\n", []string{"*.log"}, []string{"*.log"}, ""},
		"no file":          {"", nil, nil, agentlab.CodeNotFound},
		"no outputs":       {"setup: [make]\n", nil, nil, agentlab.CodeNotFound},
		"unknown key":      {"output: [dist/**]\n", nil, nil, agentlab.CodeInvalid},
		"outside":          {"outputs: [../x]\n", nil, nil, agentlab.CodeInvalid},
		"absolute":         {"", []string{"/etc/*"}, nil, agentlab.CodeInvalid},
		"not a pattern":    {"", []string{"[a"}, nil, agentlab.CodeInvalid},
		"hidden parent":    {"", []string{"a/../../b"}, nil, agentlab.CodeInvalid},
		"too large a file": {strings.Repeat("#", projectfile.MaxBytes+1), nil, nil, agentlab.CodeInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			top := t.TempDir()
			if c.file != "" {
				worktest.Put(t, top, map[string]string{projectfile.Name: c.file})
			}
			got, err := ArtifactPatterns(top, c.args)
			if agentlab.CodeOf(err) != c.code && (c.code != "" || err != nil) || !slices.Equal(got, c.want) {
				t.Errorf("%q %v", got, err)
			}
			if err != nil && c.code == agentlab.CodeNotFound && agentlab.HintOf(err) == "" {
				t.Error("there is no next step")
			}
		})
	}
}
