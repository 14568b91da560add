package config

import (
	"os"
	"os/exec"
	"path/filepath"

	"github.com/agentlab-vm/agentlab"
)

// FindProgram returns the absolute path of another program of AgentLab: the
// one in the directory of this program, otherwise the one in PATH.
func FindProgram(name string) (string, error) {
	if self, err := os.Executable(); err == nil {
		if target, err := filepath.EvalSymlinks(self); err == nil {
			self = target
		}
		beside := filepath.Join(filepath.Dir(self), name)
		if st, err := os.Stat(beside); err == nil && st.Mode().IsRegular() {
			return beside, nil
		}
	}
	path, err := exec.LookPath(name)
	if err == nil {
		path, err = filepath.Abs(path)
	}
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeUnavailable, "%s is not installed", name).
			WithHint("install it in the directory of %s or in a directory of PATH", filepath.Base(os.Args[0]))
	}
	return path, nil
}
