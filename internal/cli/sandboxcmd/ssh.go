package sandboxcmd

import (
	"context"
	"crypto"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/crypto/ssh"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/attach"
)

// sshKeySeconds is how long an ephemeral key is valid for new connections;
// existing connections remain.
const sshKeySeconds = 10 * 60

func sshCmd(a *cli.App) *cobra.Command {
	var user string
	var show bool
	cmd := &cobra.Command{
		Use:   "ssh SANDBOX|SESSION [-- SSH-ARG...]",
		Short: "Open an SSH session in a sandbox",
		Long: `Open an SSH connection to a sandbox, or to that of a session. It uses its own key,
verifies the sandbox's host key through the daemon, and connects through the daemon:
no port is opened on this machine. Your SSH configuration, agent and keys are not used.

With --print, print the ssh command instead, for scp, rsync or an editor. Its key
is valid for new connections for ten minutes. The key is in a directory
agentlab-ssh-* for temporary files; a later 'agentlab ssh' removes it.`,
		Example: `  agentlab ssh play
  agentlab ssh play -- -L 3000:localhost:3000
  agentlab ssh play -- 'cd /tmp/repo && git log'`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return work.UsageErrorf("SANDBOX is missing").WithHint("usage: agentlab ssh SANDBOX|SESSION [-- SSH-ARG...]")
			}
			return nil
		},
	}
	cmd.Flags().StringVarP(&user, "user", "u", "", "user (default agent)")
	cmd.Flags().BoolVar(&show, "print", false, "print the ssh command instead of running it")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		sb, err := c.Sandbox(ctx, args[0])
		if err != nil {
			return err
		}
		sweepSSHKeys(os.TempDir(), time.Now())
		dir, err := os.MkdirTemp("", sshDir+"*")
		if err != nil {
			return agentlab.Errorf(agentlab.CodeInternal, "cannot create a temporary directory: %w", err)
		}
		argv, err := sshCommand(ctx, a, c, sb, user, dir)
		if err != nil || !show {
			defer func() { _ = os.RemoveAll(dir) }()
		}
		if err != nil {
			return err
		}
		argv = append(argv, args[1:]...)
		if show {
			return printSSH(a, sb, argv, dir)
		}
		defer attach.NoticeLease(ctx, c, strconv.Itoa(sb.VMID), a.Stderr)()
		return runSSH(ctx, a, argv)
	})
	return cmd
}

// sshDir is the prefix of directories with the key of one session.
const sshDir = "agentlab-ssh-"

// sweepSSHKeys removes the directories of killed sessions and of --print from the
// directory tmp: those of this user whose key is no longer valid. A running
// session does not need its key again.
func sweepSSHKeys(tmp string, now time.Time) {
	entries, err := os.ReadDir(tmp)
	if err != nil {
		return
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), sshDir) || !e.IsDir() {
			continue
		}
		st, err := e.Info()
		if err != nil || now.Sub(st.ModTime()) < (sshKeySeconds+60)*time.Second {
			continue
		}
		if sys, ok := st.Sys().(*syscall.Stat_t); ok && int(sys.Uid) == os.Geteuid() {
			_ = os.RemoveAll(filepath.Join(tmp, e.Name())) // the next session retries
		}
	}
}

func printSSH(a *cli.App, sb api.Sandbox, argv []string, dir string) error {
	return a.Emit(map[string]any{"command": argv, "key_dir": dir, "ip": sb.IP}, func() error {
		quoted := make([]string, len(argv))
		for i, s := range argv {
			quoted[i] = work.ShellQuote(s)
		}
		_, err := fmt.Fprintln(a.Stdout, strings.Join(quoted, " "))
		return err
	})
}

// sshCommand authorizes a new key and returns the ssh command line. It writes its
// files to dir.
func sshCommand(ctx context.Context, a *cli.App, c *client.Client, sb api.Sandbox, user, dir string) ([]string, error) {
	if _, err := exec.LookPath("ssh"); err != nil {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "ssh is not installed").
			WithHint("install it (e.g. with: sudo apt install openssh-client), or use 'agentlab exec -ti %d bash'", sb.VMID)
	}
	public, private, err := newSSHKey()
	if err != nil {
		return nil, err
	}
	target, err := authorizeSSH(ctx, c, strconv.Itoa(sb.VMID), user, public)
	if err != nil {
		return nil, err
	}
	alias := fmt.Sprintf("agentlab-%d", sb.VMID)
	known, err := knownHosts(alias, target.HostKeys)
	if err != nil {
		return nil, err
	}
	key, hosts := filepath.Join(dir, "key"), filepath.Join(dir, "known_hosts")
	if err := os.WriteFile(key, private, 0o600); err != nil {
		return nil, err
	}
	if err := os.WriteFile(hosts, []byte(known), 0o600); err != nil {
		return nil, err
	}
	proxy, err := proxyCommand(a, sb.VMID, target.Port)
	if err != nil {
		return nil, err
	}
	return []string{
		"ssh", "-F", "/dev/null", "-i", key,
		"-o", "IdentitiesOnly=yes", "-o", "IdentityAgent=none", "-o", "ForwardAgent=no",
		"-o", "UserKnownHostsFile=" + hosts, "-o", "GlobalKnownHostsFile=/dev/null",
		"-o", "StrictHostKeyChecking=yes", "-o", "HostKeyAlias=" + alias,
		"-o", "PasswordAuthentication=no", "-o", "LogLevel=ERROR",
		"-o", "ProxyCommand=" + proxy,
		target.User + "@" + alias,
	}, nil
}

// newSSHKey returns a new key: its public part, and the private one as a file for ssh.
func newSSHKey() (ssh.PublicKey, []byte, error) {
	pub, priv, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	public, err := ssh.NewPublicKey(pub)
	if err != nil {
		return nil, nil, err
	}
	private, err := sshPrivateFile(priv)
	return public, private, err
}

// sshPrivateFile returns a private key as a file for ssh.
func sshPrivateFile(key crypto.PrivateKey) ([]byte, error) {
	block, err := ssh.MarshalPrivateKey(key, "agentlab")
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(block), nil
}

// authorizeSSH permits new connections with a key for sshKeySeconds. A user of ""
// means agent.
func authorizeSSH(ctx context.Context, c *client.Client, sandbox, user string, key ssh.PublicKey) (api.SSHTarget, error) {
	return c.SSHKey(ctx, sandbox, api.SSHKey{
		User: user, PublicKey: strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key))), Seconds: sshKeySeconds,
	})
}

// knownHosts formats the host keys of a guest as a known_hosts file. It rejects
// everything but public keys, so that a guest cannot add lines to the file.
func knownHosts(alias string, keys []string) (string, error) {
	var b strings.Builder
	for _, line := range keys {
		key, _, _, _, err := ssh.ParseAuthorizedKey([]byte(line))
		if err != nil {
			return "", agentlab.Errorf(agentlab.CodeUnavailable, "the sandbox returned a malformed host key: %w", err)
		}
		fmt.Fprintf(&b, "%s %s", alias, ssh.MarshalAuthorizedKey(key))
	}
	if b.Len() == 0 {
		return "", agentlab.Errorf(agentlab.CodeUnavailable, "the sandbox returned no host key").
			WithHint("use 'agentlab exec -ti SANDBOX bash' instead")
	}
	return b.String(), nil
}

func proxyCommand(a *cli.App, vmid, port int) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	words, err := a.DaemonFlags()
	if err != nil {
		return "", err
	}
	escape := func(s string) string { return strings.ReplaceAll(work.ShellQuote(s), "%", "%%") }
	cmd := escape(self)
	for _, w := range words {
		cmd += " " + escape(w)
	}
	return fmt.Sprintf("%s proxy %d %d", cmd, vmid, port), nil
}

func runSSH(ctx context.Context, a *cli.App, argv []string) error {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = a.Stdin, a.Stdout, a.Stderr
	// ssh gets the signals of the terminal, but not others.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	err := cmd.Run()
	if ctx.Err() != nil {
		return context.Canceled
	}
	if code := cmd.ProcessState.ExitCode(); code > 0 {
		return work.ExitStatus(code)
	}
	return err
}

// proxyCmd is the ProxyCommand of ssh: it connects standard input and output to a
// TCP port of the guest, through the daemon.
func proxyCmd(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use: "proxy SANDBOX PORT", Short: "Connect standard input and output to a port of a sandbox", Hidden: true,
		Args: cli.ExactArgs("SANDBOX", "PORT"),
		RunE: a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
			port, err := strconv.ParseUint(args[1], 10, 16)
			if err != nil || port == 0 {
				return work.UsageErrorf("%q is not a port", args[1])
			}
			return proxy(ctx, a, c, args[0], uint16(port))
		}),
	}
}

// proxy connects standard input and output to a TCP port of the guest.
func proxy(ctx context.Context, a *cli.App, c *client.Client, sandbox string, port uint16) error {
	conn, err := c.Dial(ctx, sandbox, port)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	go func() {
		_, _ = io.Copy(conn, a.Stdin)
		_ = stream.CloseWrite(conn)
	}()
	_, err = io.Copy(a.Stdout, conn)
	if ctx.Err() != nil { // ssh ends its ProxyCommand with SIGHUP, which is not an error
		return work.ExitStatus(cli.ExitInterrupted)
	}
	return err
}
