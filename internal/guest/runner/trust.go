package runner

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

const (
	trustDir    = "/usr/local/share/ca-certificates"
	trustBundle = "/etc/ssl/certs/ca-certificates.crt"
	// trustTimeout limits the update of the trust store, which takes seconds
	// under emulation.
	trustTimeout = 10 * time.Minute
)

// trustVars lists the variables for programs that do not use the system's
// trust store by default.
var trustVars = []string{"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS"}

// trust adds the operator's certificates to the system's trust store, before
// anything is fetched. It is idempotent.
func (r *Runner) trust(ctx context.Context) error {
	if len(r.resp.CACertificates) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, trustTimeout)
	defer cancel()
	dir := filepath.Join(string(r.dir), "ca-certificates")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	install := []string{"install", "-D", "-m", "0644", "-t", trustDir}
	for i, text := range r.resp.CACertificates {
		file := filepath.Join(dir, fmt.Sprintf("agentlab-%d.crt", i+1)) // one certificate per file, as the store requires
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			return err
		}
		install = append(install, file)
	}
	for _, args := range [][]string{install, {"update-ca-certificates"}} {
		if out, err := asRoot(ctx, args...); err != nil {
			return fmt.Errorf("ca_certificates: %s failed, so the agent is not started: %w: %s", args[0], err, bytes.TrimSpace(out))
		}
	}
	return nil
}

// asRoot runs a command as root, which the runner is not.
func asRoot(ctx context.Context, args ...string) ([]byte, error) {
	if os.Geteuid() != 0 {
		args = append([]string{"sudo", "-n"}, args...)
	}
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C"}
	return cmd.CombinedOutput()
}

// agentVars returns the variables that the agent gets in addition: those of
// the secrets bundle, and toolVars.
func (r *Runner) agentVars() map[string]string {
	out := r.toolVars()
	for k, v := range r.resp.Env {
		if isEnvName(k) && !strings.Contains(v, "\x00") {
			out[k] = v
		}
	}
	return out
}

// toolVars returns the variables for the trust store and the caches.
func (r *Runner) toolVars() map[string]string {
	out := r.cacheVars()
	if len(r.resp.CACertificates) > 0 {
		for _, name := range trustVars {
			out[name] = trustBundle
		}
	}
	return out
}
