package sandboxcmd

import (
	"bytes"
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/crypto/ssh"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// sshSuffix follows the name of a session or sandbox in OpenSSH's configuration.
const sshSuffix = ".agentlab"

// maxSSHConfig is the maximum size of the user's own configuration of OpenSSH, in bytes.
const maxSSHConfig = 1 << 20

// sshFiles are the files of 'agentlab ssh-config' for OpenSSH, of one user.
type sshFiles struct {
	dir  string // of AgentLab
	user string // the user's own configuration
}

func newSSHFiles() (sshFiles, error) {
	p, err := config.ResolvePaths(os.Getenv, false)
	if err != nil {
		return sshFiles{}, err
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return sshFiles{}, agentlab.Errorf(agentlab.CodeInvalid, "no home directory: %w", err)
	}
	return sshFiles{dir: filepath.Join(p.Config, "ssh"), user: filepath.Join(home, ".ssh", "config")}, nil
}

func (f sshFiles) config() string             { return filepath.Join(f.dir, "config") }
func (f sshFiles) key() string                { return filepath.Join(f.dir, "identity") }
func (f sshFiles) oldKey() string             { return filepath.Join(f.dir, "key") } // of earlier versions
func (f sshFiles) hosts() string              { return filepath.Join(f.dir, "known_hosts") }
func (f sshFiles) hostsOf(host string) string { return filepath.Join(f.hosts(), host) }

// include is what the user's configuration has for ours. It is at the beginning: the
// first value of an option counts, and options below a Host are only for that.
func (f sshFiles) include() string {
	return "# Sandboxes of AgentLab; remove it with: agentlab ssh-config --uninstall\nInclude " + sshQuote(f.config()) + "\n\n"
}

// sshQuote quotes an argument in a configuration of OpenSSH.
func sshQuote(s string) string { return `"` + s + `"` }

func sshConfigCmd(a *cli.App) *cobra.Command {
	var install, uninstall bool
	cmd := &cobra.Command{
		Use: "ssh-config", Short: "Configure OpenSSH for the names of sandboxes", Args: cli.ExactArgs(),
		Long: `Print a configuration of OpenSSH with which ssh, scp, rsync and editors reach every
session and sandbox as NAME` + sshSuffix + `. Each connection goes through the daemon, which
authorizes a key of AgentLab for it and gives the host key. No port is opened, and your
keys and agent are not used. A connection is refused if ~/.ssh/config has forwards or
SendEnv for it, as below Host *. See docs/editors.md.

With --install, write it to a file and add an Include of that file to ~/.ssh/config, after
a question. With --uninstall, remove both.`,
		Example: `  agentlab ssh-config --install
  ssh app.agentlab
  rsync -a app.agentlab:/workspace/dist/ dist/`,
	}
	cmd.Flags().BoolVar(&install, "install", false, "add the configuration to ~/.ssh/config")
	cmd.Flags().BoolVar(&uninstall, "uninstall", false, "remove the configuration from ~/.ssh/config")
	cmd.MarkFlagsMutuallyExclusive("install", "uninstall")
	var yes bool
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask for confirmation")
	cmd.RunE = func(*cobra.Command, []string) error {
		f, err := newSSHFiles()
		switch {
		case err != nil:
			return err
		case uninstall:
			return uninstallSSH(a, f)
		case install:
			if err := installSSH(a, f, yes); err != nil {
				return err
			}
			return a.Done(map[string]string{"config": f.config(), "include": f.user}, "names of sandboxes work in OpenSSH: ssh NAME%s", sshSuffix)
		}
		text, err := sshConfig(a, f)
		if err != nil {
			return err
		}
		if err := f.makeKey(); err != nil {
			return err
		}
		return a.Emit(map[string]string{"config": text}, func() error { _, err := fmt.Fprint(a.Stdout, text); return err })
	}
	return cmd
}

// sshKeyType is the only type of key that the configuration permits. OpenSSH adds the keys
// and certificates that the user has for all hosts to ours: it offers none of another type,
// so that a sandbox does not even see the public ones. Few people have keys of this type.
const sshKeyType = "ecdsa-sha2-nistp384"

// sshConfig returns the configuration. It sets everything with which a value of the user
// for all hosts could give the guest access to this machine: the first value counts. For
// options that OpenSSH adds up instead, see checkSSHOptions and sshKeyType.
func sshConfig(a *cli.App, f sshFiles) (string, error) {
	proxy, err := sshProxy(a)
	if err != nil {
		return "", err
	}
	if strings.ContainsAny(f.dir, "\"\n\\%$") || strings.ContainsAny(proxy, "\n") {
		return "", agentlab.Errorf(agentlab.CodeInvalid, "OpenSSH cannot use the directory %q", f.dir).WithHint("set AGENTLAB_HOME or XDG_CONFIG_HOME to another directory")
	}
	// %n is in single quotes of a shell: a name with such a quote, as in the URL of a
	// web page, must not match (CVE-2023-51385).
	return fmt.Sprintf(`# Sandboxes of AgentLab. Written by 'agentlab ssh-config', which replaces changes.
Host *%s "!*'*"
	User agent
	ProxyCommand %s '%%n'
	IdentityFile %s
	UserKnownHostsFile %s
	GlobalKnownHostsFile /dev/null
	StrictHostKeyChecking yes
	VerifyHostKeyDNS no
	UpdateHostKeys no
	CheckHostIP no
	IdentitiesOnly yes
	IdentityAgent none
	AddKeysToAgent no
	PubkeyAuthentication yes
	PubkeyAcceptedKeyTypes %s
	PKCS11Provider none
	PreferredAuthentications publickey
	PasswordAuthentication no
	KbdInteractiveAuthentication no
	HostbasedAuthentication no
	GSSAPIAuthentication no
	ForwardAgent no
	ForwardX11 no
	Tunnel no
	PermitLocalCommand no
	RemoteCommand none
	SetEnv AGENTLAB=1
	ControlMaster no
	ControlPath none
`, sshSuffix, proxy, sshQuote(f.key()), sshQuote(f.hostsOf("%n")), sshKeyType), nil
}

// sshProxy returns the start of the ProxyCommand, a command of a shell: it selects the
// daemon that this command uses, and starts it if this command would.
func sshProxy(a *cli.App) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	words := []string{self}
	if a.ExplicitDaemon() {
		flags, err := a.DaemonFlags()
		if err != nil {
			return "", err
		}
		if a.Socket == "" && a.TokenFile == "" {
			file := os.Getenv("AGENTLAB_TOKEN_FILE")
			if file == "" {
				return "", work.UsageErrorf("the token of a remote daemon must be in a file").WithHint("use --token-file or AGENTLAB_TOKEN_FILE: other programs do not have your environment")
			}
			if file, err = filepath.Abs(file); err != nil {
				return "", err
			}
			flags = append(flags, "--token-file", file)
		}
		words = append(words, flags...)
	}
	for _, name := range []string{"AGENTLAB_PIN", "AGENTLAB_CA_FILE", "AGENTLAB_HOME"} {
		if v := os.Getenv(name); v != "" {
			words = append([]string{name + "=" + v}, words...)
		}
	}
	words = append([]string{"env"}, words...)
	for i, w := range words {
		words[i] = strings.ReplaceAll(work.ShellQuote(w), "%", "%%")
	}
	return strings.Join(append(words, "ssh-proxy"), " "), nil
}

// installSSH writes the configuration, and includes it in the user's own after a question.
func installSSH(a *cli.App, f sshFiles, yes bool) error {
	text, err := sshConfig(a, f)
	if err != nil {
		return err
	}
	own, err := readOwnSSH(f.user)
	if err != nil {
		return err
	}
	included := bytes.Contains(own.text, []byte(f.include()))
	if !included && !yes && !a.Confirm("Add "+sshQuote("Include "+f.config())+" to "+f.user+"?") {
		return work.UsageErrorf("%s was not changed: not confirmed", f.user).WithHint("confirm it with: agentlab ssh-config --install --yes")
	}
	if err := f.makeKey(); err != nil {
		return err
	}
	if err := durable.Replace(f.config(), []byte(text), durable.Content); err != nil {
		return err
	}
	if err := os.Remove(f.oldKey()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if included {
		return nil
	}
	return own.write(append([]byte(f.include()), own.text...))
}

func uninstallSSH(a *cli.App, f sshFiles) error {
	own, err := readOwnSSH(f.user)
	if err != nil {
		return err
	}
	if rest := bytes.Replace(own.text, []byte(f.include()), nil, 1); len(rest) != len(own.text) {
		if err := own.write(rest); err != nil {
			return err
		}
	}
	if err := os.RemoveAll(f.dir); err != nil {
		return err
	}
	return a.Done(map[string]string{"include": f.user}, "the configuration of OpenSSH is as before")
}

// installed reports whether the user's configuration includes ours.
func (f sshFiles) installed() bool {
	own, err := readOwnSSH(f.user)
	_, serr := os.Stat(f.config())
	return err == nil && serr == nil && bytes.Contains(own.text, []byte(f.include()))
}

// ownSSH is the user's configuration of OpenSSH. A link, as to a repository of
// dotfiles, stays one.
type ownSSH struct {
	path string
	text []byte
}

func readOwnSSH(path string) (ownSSH, error) {
	target, err := filepath.EvalSymlinks(path)
	if errors.Is(err, fs.ErrNotExist) {
		return ownSSH{path: path}, nil
	}
	if err != nil {
		return ownSSH{}, err
	}
	text, err := cli.ReadFile(target, maxSSHConfig)
	return ownSSH{target, []byte(text)}, err
}

func (o ownSSH) write(text []byte) error {
	if err := os.MkdirAll(filepath.Dir(o.path), 0o700); err != nil {
		return err
	}
	return durable.Replace(o.path, text, durable.Content)
}

// makeKey creates the key, unless it exists. A key that was made by halves has no name.
func (f sshFiles) makeKey() error {
	if err := os.MkdirAll(f.hosts(), 0o700); err != nil {
		return err
	}
	if _, err := os.Lstat(f.key()); err == nil {
		return nil
	}
	key, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	if err != nil {
		return err
	}
	private, err := sshPrivateFile(key)
	if err != nil {
		return err
	}
	if err := durable.Create(f.key(), private); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// publicKey returns the public part of the key.
func (f sshFiles) publicKey() (ssh.PublicKey, error) {
	text, err := cli.ReadPrivate(f.key())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "the configuration of OpenSSH for sandboxes is that of an earlier version").WithHint("agentlab ssh-config --install")
	}
	if err != nil {
		return nil, err
	}
	signer, err := ssh.ParsePrivateKey([]byte(text))
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%s is not a key: %w", f.key(), err).WithHint("delete it, then: agentlab ssh-config --install")
	}
	return signer.PublicKey(), nil
}

// trust replaces the known hosts of one name. Connections may do this at the same time.
func (f sshFiles) trust(host, known string) error {
	tmp, err := durable.Temp(f.hosts(), "host-*", []byte(known))
	if err != nil {
		return err
	}
	return os.Rename(tmp, f.hostsOf(host))
}

// sshProxyCmd is the ProxyCommand of ssh-config. It authorizes the key, writes the host
// key of the sandbox, and then connects: ssh reads the host key after that.
func sshProxyCmd(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use: "ssh-proxy NAME" + sshSuffix, Short: "Connect standard input and output to the SSH server of a sandbox", Hidden: true,
		Args: cli.ExactArgs("NAME" + sshSuffix),
		RunE: a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
			name := strings.TrimSuffix(args[0], sshSuffix)
			if name == "" || strings.ContainsAny(args[0], "/\\") || strings.HasPrefix(args[0], ".") {
				return work.UsageErrorf("%q is not a name of a sandbox", args[0])
			}
			if err := checkSSHOptions(ctx, args[0], parentArgs()); err != nil {
				return err
			}
			f, err := newSSHFiles()
			if err != nil {
				return err
			}
			key, err := f.publicKey()
			if err != nil {
				return err
			}
			target, err := authorizeSSH(ctx, c, name, "", key)
			if err != nil {
				return err
			}
			known, err := knownHosts(args[0], target.HostKeys)
			if err != nil {
				return err
			}
			if err := f.trust(args[0], known); err != nil {
				return err
			}
			return proxy(ctx, a, c, name, uint16(cmp.Or(target.Port, 22)))
		}),
	}
}
