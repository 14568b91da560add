package profile

import (
	"maps"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/strictyaml"
)

// innerOptions lists the options of bwrap that behavior.inner_sandbox_args may
// contain, with the number of their arguments. Options that need an open file
// or that disable the sandbox as a whole are excluded. Paths are those of the
// guest: no option of bwrap gives access to the host.
var innerOptions = map[string]int{
	"--bind": 2, "--bind-try": 2, "--ro-bind": 2, "--ro-bind-try": 2, "--dev-bind": 2, "--dev-bind-try": 2, "--remount-ro": 1,
	"--tmpfs": 1, "--dir": 1, "--symlink": 2, "--proc": 1, "--dev": 1, "--mqueue": 1, "--size": 1, "--perms": 1, "--chmod": 2,
	"--setenv": 2, "--unsetenv": 1, "--hostname": 1, "--unshare-net": 0, "--new-session": 0, "--as-pid-1": 0, "--cap-drop": 1,
}

const (
	maxInnerArgs    = 128
	maxInnerArgByte = 4096
)

// validateInner checks the inner sandbox of a profile.
func (d *Doc) validateInner() error {
	const key, argsKey = "behavior.inner_sandbox", "behavior.inner_sandbox_args"
	args := d.Behavior.InnerSandboxArgs
	if d.Behavior.InnerSandbox == "" || d.Behavior.InnerSandbox == "none" {
		if len(args) > 0 {
			return invalid(argsKey, "options for an inner sandbox require inner_sandbox").WithHint("add inner_sandbox: bubblewrap, or remove them")
		}
		return nil
	}
	if err := strictyaml.OneOf(key, d.Behavior.InnerSandbox, []string{"none", agentlab.InnerBubblewrap}); err != nil {
		return err
	}
	if len(args) > maxInnerArgs {
		return invalid(argsKey, "%d words exceed the limit of %d", len(args), maxInnerArgs)
	}
	for i := 0; i < len(args); {
		n, ok := innerOptions[args[i]]
		if !ok {
			known := slices.Sorted(maps.Keys(innerOptions))
			e := invalid(argsKey, "%.100q is not a permitted option", args[i])
			if near := strictyaml.Nearest(args[i], known); near != "" {
				return e.WithHint("did you mean %q? Each word is a separate item", near)
			}
			return e.WithHint("each word is a separate item; the options are %s", strings.Join(known, " "))
		}
		if i+n >= len(args) {
			return invalid(argsKey, "%s requires %d words, but has %d", args[i], n, len(args)-i-1)
		}
		for _, w := range args[i+1 : i+1+n] {
			if w == "" || len(w) > maxInnerArgByte || strings.ContainsFunc(w, func(r rune) bool { return r < ' ' || r == 0x7f }) {
				return invalid(argsKey, "%.100q cannot be a word of %s", w, args[i])
			}
		}
		i += n + 1
	}
	return nil
}

// innerSandbox returns the value for the services.
func (d *Doc) innerSandbox() string {
	if d.Behavior.InnerSandbox == "none" {
		return ""
	}
	return d.Behavior.InnerSandbox
}
