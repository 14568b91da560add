package secret

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/strictyaml"
)

// decryptSops reads a bundle with the program sops. Where sops has no
// age key otherwise, it may use the vault's own.
func (v *Vault) decryptSops(ctx context.Context, path string) ([]byte, error) {
	if _, err := readPrivate(path, maxSealed, 0o022); err != nil { // a user who can change it can choose the program that is run
		return nil, err
	}
	program, err := exec.LookPath("sops")
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeUnsupported, "%s is encrypted with sops, which is not installed", path).
			WithHint("install sops in a directory of the PATH of agentlabd")
	}
	var env []string
	if _, set := os.LookupEnv("SOPS_AGE_KEY_FILE"); !set && os.Getenv("SOPS_AGE_KEY") == "" {
		env = append(env, "SOPS_AGE_KEY_FILE="+v.identityPath())
	}
	ctx, cancel := context.WithTimeout(ctx, refTimeout)
	defer cancel()
	text, bad := run(ctx, program, []string{"--decrypt", "--input-type", "yaml", "--output-type", "yaml", path}, env, strictyaml.MaxBytes)
	if bad != nil {
		return nil, agentlab.Errorf(bad.Code, "%s cannot be decrypted: %s", path, bad.Message).
			WithHint("run it as the user that runs agentlabd: sops --decrypt %s", filepath.Clean(path))
	}
	return []byte(text), nil
}
