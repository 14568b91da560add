package e2e

import (
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// TestScriptsQEMU runs the scripts that every backend must pass on qemu;
// TestProxmoxShell runs the same ones there.
func TestScriptsQEMU(t *testing.T) {
	t.Parallel()
	runScripts(newLab(t), t, "qemu", scripts(t)...)
}

// scripts are the scripts that every backend must pass.
func scripts(t testing.TB) []string {
	t.Helper()
	return txtar(t, "script")
}

// txtar are the scripts in a directory below testdata.
func txtar(t testing.TB, dir string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("testdata", dir, "*.txtar"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%d scripts, %v", len(files), err)
	}
	return files
}

// runScripts runs scripts against the daemon of l.
func runScripts(l *lab, t *testing.T, backend string, files ...string) {
	t.Helper()
	testscript.Run(t, testscript.Params{
		Files: files,
		Setup: func(env *testscript.Env) error {
			env.Vars = append(env.Vars, l.env...)
			env.Setenv("BACKEND", backend)
			env.Setenv("HOME", env.WorkDir)
			return nil
		},
		Condition: func(cond string) (bool, error) {
			name, ok := strings.CutPrefix(cond, "backend:")
			if !ok {
				return false, fmt.Errorf("unknown condition %q", cond)
			}
			return name == backend, nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"capture": capture,
			"killdaemon": func(ts *testscript.TestScript, _ bool, _ []string) {
				ts.Check(l.kill9("agentlabd", "run"))
			},
			"agentlab": func(ts *testscript.TestScript, neg bool, args []string) {
				err := ts.Exec("agentlab", args...)
				switch {
				case err == nil && neg:
					ts.Fatalf("agentlab %v succeeded", args)
				case err != nil && !neg:
					ts.Fatalf("agentlab %v: %v", args, err)
				}
			},
		},
	})
}

// capture VAR REGEXP sets VAR to the first group of REGEXP in the last
// standard output.
func capture(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: capture VAR REGEXP")
	}
	m := regexp.MustCompile(args[1]).FindStringSubmatch(ts.ReadFile("stdout"))
	if len(m) < 2 {
		ts.Fatalf("no match for %s", args[1])
	}
	ts.Setenv(args[0], m[1])
}
