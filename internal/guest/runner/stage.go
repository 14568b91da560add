package runner

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guest/agentcmd"
	"github.com/agentlab-vm/agentlab/internal/guest/msgcmd"
	"github.com/agentlab-vm/agentlab/internal/hostos"
	"github.com/agentlab-vm/agentlab/internal/redact"
)

// isEnvName reports whether s is a valid name of a shell variable.
func isEnvName(s string) bool {
	for i, c := range []byte(s) {
		letter := c == '_' || c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z'
		if !letter && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return s != ""
}

// readBootstrap reads the bootstrap document.
func readBootstrap(name string) (guestapi.Bootstrap, error) {
	var b guestapi.Bootstrap
	p, err := os.ReadFile(name)
	if err == nil {
		err = json.Unmarshal(p, &b)
	}
	if err == nil && (b.Token == "" || b.Controller == "") {
		err = errors.New("token or controller is missing")
	}
	if err != nil {
		return b, fmt.Errorf("the bootstrap document %s cannot be used: %w", name, err)
	}
	return b, nil
}

// bootstrap returns the response of the only fetch of this sandbox: the one in
// the run directory, or a new one, for which fresh is true.
func (r *Runner) bootstrap(ctx context.Context) (fresh bool, err error) {
	doc, err := readBootstrap(r.cfg.Bootstrap)
	if err != nil {
		return false, err
	}
	r.api = newAPI(doc.Controller, r.cfg.Timing)
	staged, err := r.dir.load(fileResponse, &r.resp)
	if err != nil {
		return false, err
	}
	if !staged {
		if doc, err = r.fetch(ctx, doc); err != nil {
			return false, err
		}
		b := boot{At: hostos.SinceBoot(), Began: time.Now().UTC()}
		if r.resp.Job != nil && r.resp.Job.Seconds > 0 {
			b.Deadline = b.At + time.Duration(r.resp.Job.Seconds)*time.Second
		}
		// The token is used: a crash between here and the next line loses the
		// job.
		if err := errors.Join(r.dir.save(fileBoot, b), r.dir.save(fileResponse, r.resp)); err != nil {
			return false, err
		}
	}
	if _, err := r.dir.load(fileBoot, &r.boot); err != nil {
		return false, err
	}
	r.api.token = r.resp.Runner.Token
	r.secrets = secretsOf(doc, r.resp)
	known := slices.Clone(r.secrets) // the judge's are fewer
	r.red = sync.OnceValue(func() *redact.Redactor { return redact.New(known...) })
	r.job = r.resp.Job
	return !staged, nil
}

// fetch exchanges the token of doc. If the controller does not accept it, the
// answer to an earlier request may have been lost. Then the controller sends
// another token, for which fetch waits for some time.
func (r *Runner) fetch(ctx context.Context, doc guestapi.Bootstrap) (guestapi.Bootstrap, error) {
	for {
		r.api.base = strings.TrimSuffix(doc.Controller, "/")
		req := guestapi.BootstrapRequest{Token: doc.Token, VMID: doc.VMID}
		err := r.api.retry(ctx, 0, func() error {
			return r.api.call(ctx, callTimeout, http.MethodPost, guestapi.PathBootstrap, req, &r.resp)
		})
		if !denied(err) {
			return doc, err
		}
		next := doc
		for began := time.Now(); next.Token == doc.Token; {
			if time.Since(began) > r.cfg.Timing.Denied || !sleep(ctx, r.cfg.Timing.LogBatch) {
				return doc, err
			}
			var rerr error
			if next, rerr = readBootstrap(r.cfg.Bootstrap); rerr != nil {
				return doc, rerr
			}
		}
		doc = next
	}
}

// secretsOf returns every secret value of this sandbox.
func secretsOf(doc guestapi.Bootstrap, resp guestapi.BootstrapResponse) []string {
	out := []string{doc.Token, resp.Runner.Token, resp.Messages.Token}
	for name, v := range resp.Env {
		if !slices.Contains(redact.OpenVariables, name) {
			out = append(append(out, v), redact.SettingsSecrets(v)...)
		}
	}
	if resp.Git != nil {
		out = append(out, resp.Git.Token, resp.Git.SSHPrivateKey)
	}
	for _, v := range resp.SSHKeys {
		out = append(out, v)
	}
	for _, t := range []*guestapi.ArtifactTarget{resp.Artifact, resp.ArtifactStore} {
		if t != nil {
			out = append(out, t.Token)
		}
	}
	return append(out, redact.SettingsSecrets(resp.ClaudeSettingsJSON)...)
}

// stage writes the secrets in the formats that programs need, all of them
// below the run directory.
func (r *Runner) stage() error {
	if err := shellEnvironment(r.cfg.Home, r.dir.path(fileEnv), r.dir.path(dirMessages)); err != nil {
		r.log.Warn("ssh sessions do not have the environment of the secrets, and shells do not find agentlab-msg", "err", err)
	}
	vars := r.agentVars()
	var env strings.Builder
	fmt.Fprintf(&env, "export PATH=\"$PATH\":%s\n", agentcmd.ShellQuote(r.dir.path(dirMessages)))
	for _, k := range slices.Sorted(maps.Keys(vars)) {
		fmt.Fprintf(&env, "export %s=%s\n", k, agentcmd.ShellQuote(vars[k]))
	}
	return errors.Join(
		os.WriteFile(r.dir.path(fileEnv), []byte(env.String()), 0o600),
		stageGit(r.dir, r.resp.Git),
		r.stageMessages(),
		agentcmd.Prepare(r.cfg.Home, string(r.dir), r.resp.ClaudeSettingsJSON, r.resp.Env),
		agentcmd.PrepareSSH(r.cfg.Home, string(r.dir), r.resp.SSHKeys, r.dir.path(fileKnownHosts)),
		r.gitIdentity(),
	)
}

// stageMessages installs agentlab-msg, unless the controller is too old for it.
func (r *Runner) stageMessages() error {
	if r.resp.Messages.Token == "" {
		return nil
	}
	cfg := msgcmd.Config{Controller: r.api.base, Token: r.resp.Messages.Token}
	return errors.Join(msgcmd.Install(r.dir.path(dirMessages), r.cfg.Exe, cfg), agentcmd.Instruct(r.cfg.Home, string(r.dir)))
}

// maxShellFile is the maximum size of a shell's file that shellEnvironment
// changes.
const maxShellFile = 1 << 20

// shellEnvironment makes the shells of ssh sessions read the environment of the
// secrets. (Commands and terminals of guest control get it from guestd.) Other
// shells, including those of an agent, do not: some agents hide keys from the
// commands that they run. All shells search the directory programs, because login
// shells reset the search path. The file belongs to the agent, which may have
// changed it in any way; if it cannot be changed, it is left unchanged.
func shellEnvironment(home, env, programs string) error {
	line := fmt.Sprintf("[ -z \"${SSH_CONNECTION-}\" ] || [ ! -r %[1]s ] || . %[1]s # agentlab\n"+
		"case \":${PATH-}:\" in *:%[2]s:*) ;; *) PATH=\"${PATH:+$PATH:}\"%[2]s; export PATH ;; esac # agentlab\n",
		agentcmd.ShellQuote(env), agentcmd.ShellQuote(programs))
	name := filepath.Join(home, ".bashrc")
	if to, err := filepath.EvalSymlinks(name); err == nil {
		name = to
	}
	st, err := os.Lstat(name)
	if err == nil && (!st.Mode().IsRegular() || st.Size() > maxShellFile) {
		return fmt.Errorf("%s is not a file of a shell", name)
	}
	old, err := os.ReadFile(name)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if strings.Contains(string(old), line) {
		return nil
	}
	tmp := name + ".agentlab-new"
	if err := os.WriteFile(tmp, append([]byte(line), old...), 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, name)
}

// gitIdentity configures a name and the credential for the agent's own git, if
// the image does not configure git itself.
func (r *Runner) gitIdentity() error {
	var b strings.Builder
	fmt.Fprintf(&b, "# written by agentlab for this sandbox\n[user]\n\tname = %s\n\temail = %s\n[init]\n\tdefaultBranch = main\n", guestapi.AgentName, guestapi.AgentEmail)
	if g := r.resp.Git; g != nil {
		if g.Token != "" && r.job != nil {
			if scope, err := credentialScope(r.job, g); err == nil && scope != "" {
				fmt.Fprintf(&b, "[credential %q]\n\thelper = %q\n", scope, credentialHelper(r.dir))
			}
		}
		if g.SSHPrivateKey != "" {
			fmt.Fprintf(&b, "[core]\n\tsshCommand = %q\n", sshCommand(r.dir, r.dir.path(fileSSHKey)))
		}
	}
	f, err := os.OpenFile(filepath.Join(r.cfg.Home, ".gitconfig"), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	_, err = f.WriteString(b.String())
	return errors.Join(err, f.Close())
}

// logf adds a line of the runner to the agent's log, while no agent writes to it.
func (r *Runner) logf(format string, args ...any) {
	line := r.redactor().String(fmt.Sprintf("[agentlab] "+format, args...))
	r.log.Info(line)
	f, err := os.OpenFile(r.dir.path(fileLog), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err == nil {
		_, err = fmt.Fprintln(f, line)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		r.log.Error("a line of the log is lost", "err", err)
	}
}
