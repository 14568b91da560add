package profile

import (
	"reflect"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

func TestInnerSandbox(t *testing.T) {
	d, err := parseText([]byte("name: x\nbehavior:\n  inner_sandbox: bubblewrap\n  inner_sandbox_args: [--ro-bind, /opt/a, /opt/b, --unshare-net, --setenv, A, --odd]\n"))
	if err != nil {
		t.Fatal(err)
	}
	p := d.Profile()
	if p.InnerSandbox != agentlab.InnerBubblewrap || !reflect.DeepEqual(p.InnerArgs, []string{"--ro-bind", "/opt/a", "/opt/b", "--unshare-net", "--setenv", "A", "--odd"}) {
		t.Errorf("%+v", p)
	}
	if err := d.Usable(qemu); err != nil {
		t.Error(err)
	}
	if d, err := parseText([]byte("name: x\nbehavior: {inner_sandbox: none}")); err != nil || d.Profile().InnerSandbox != "" {
		t.Error(err)
	}
}

func TestInnerSandboxRefused(t *testing.T) {
	const args = "behavior.inner_sandbox_args"
	for _, tc := range []struct{ behavior, field, says string }{
		{"inner_sandbox: firejail", "behavior.inner_sandbox", "not known"},
		{"inner_sandbox_args: [--tmpfs, /x]", args, "require inner_sandbox"},
		{"inner_sandbox: bubblewrap, inner_sandbox_args: ['--ro-bind /a /b']", args, "each word"},
		{"inner_sandbox: bubblewrap, inner_sandbox_args: [--ro-bnd, /a, /b]", args, `"--ro-bind"`},
		{"inner_sandbox: bubblewrap, inner_sandbox_args: [--bind, /a]", args, "requires 2 words"},
		{"inner_sandbox: bubblewrap, inner_sandbox_args: [--, /bin/sh]", args, "not a permitted option"},
		{"inner_sandbox: bubblewrap, inner_sandbox_args: [--args, '0']", args, "not a permitted option"},
		{"inner_sandbox: bubblewrap, inner_sandbox_args: [--seccomp, '3']", args, "not a permitted option"},
		{"inner_sandbox: bubblewrap, inner_sandbox_args: [--share-net]", args, "not a permitted option"},
		{"inner_sandbox: bubblewrap, inner_sandbox_args: [--tmpfs, \"/a\\n\"]", args, "cannot be a word"},
	} {
		_, err := parseText([]byte("name: x\nbehavior: {" + tc.behavior + "}"))
		if agentlab.CodeOf(err) != agentlab.CodeInvalid || fieldOf(err) != tc.field || !strings.Contains(err.Error()+agentlab.HintOf(err), tc.says) {
			t.Errorf("%s: %v (%s)", tc.behavior, err, agentlab.HintOf(err))
		}
	}
}
