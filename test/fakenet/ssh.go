package fakenet

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/crypto/ssh"
)

// sshServer makes the configuration and the public host key line.
func (g *GitHost) sshServer() (*ssh.ServerConfig, string, error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, "", err
	}
	signer, err := ssh.NewSignerFromKey(key)
	if err != nil {
		return nil, "", err
	}
	var allowed []string
	for _, line := range g.cfg.SSHKeys {
		pub, _, _, _, err := ssh.ParseAuthorizedKey([]byte(line))
		if err != nil {
			return nil, "", fmt.Errorf("read an SSH key: %w", err)
		}
		allowed = append(allowed, string(pub.Marshal()))
	}
	cfg := &ssh.ServerConfig{
		PublicKeyCallback: func(_ ssh.ConnMetadata, key ssh.PublicKey) (*ssh.Permissions, error) {
			if len(allowed) > 0 && !slices.Contains(allowed, string(key.Marshal())) {
				return nil, errors.New("unknown key")
			}
			return &ssh.Permissions{}, nil
		},
	}
	cfg.AddHostKey(signer)
	return cfg, strings.TrimSpace(string(ssh.MarshalAuthorizedKey(signer.PublicKey()))), nil
}

// serveSSH serves one connection: sessions that run git-upload-pack or
// git-receive-pack on a repository, and nothing else.
func (g *GitHost) serveSSH(ctx context.Context, c net.Conn, cfg *ssh.ServerConfig) {
	conn, channels, requests, err := ssh.NewServerConn(c, cfg)
	if err != nil {
		return
	}
	defer func() { _ = conn.Close() }()
	go ssh.DiscardRequests(requests)
	for open := range channels {
		if open.ChannelType() != "session" {
			_ = open.Reject(ssh.UnknownChannelType, "only sessions")
			continue
		}
		ch, reqs, err := open.Accept()
		if err != nil {
			return
		}
		g.session(ctx, ch, reqs)
	}
}

func (g *GitHost) session(ctx context.Context, ch ssh.Channel, reqs <-chan *ssh.Request) {
	defer func() { _ = ch.Close() }()
	env := slices.Clone(g.env)
	for req := range reqs {
		switch req.Type {
		case "env":
			var kv struct{ Name, Value string }
			if ssh.Unmarshal(req.Payload, &kv) == nil && kv.Name == "GIT_PROTOCOL" {
				env = append(env, kv.Name+"="+kv.Value)
			}
			_ = req.Reply(true, nil)
		case "exec":
			var run struct{ Command string }
			_ = ssh.Unmarshal(req.Payload, &run)
			cmd, err := g.gitCommand(ctx, run.Command)
			if err != nil {
				_ = req.Reply(false, nil)
				return
			}
			_ = req.Reply(true, nil)
			go ssh.DiscardRequests(reqs)
			cmd.Env = env
			finishSession(ch, cmd)
			return
		default:
			_ = req.Reply(false, nil)
		}
	}
}

func finishSession(ch ssh.Channel, cmd *exec.Cmd) {
	cmd.Stdout, cmd.Stderr = ch, ch.Stderr()
	// Not cmd.Stdin: Wait would then wait for a client that never closes.
	in, err := cmd.StdinPipe()
	code := 255
	if err == nil && cmd.Start() == nil {
		go func() {
			buf := make([]byte, 32<<10)
			for {
				size, err := ch.Read(buf)
				if size > 0 {
					if _, err := in.Write(buf[:size]); err != nil {
						break
					}
				}
				if err != nil {
					break
				}
			}
			_ = in.Close()
		}()
		_ = cmd.Wait()
		code = cmd.ProcessState.ExitCode()
	}
	_, _ = ch.SendRequest("exit-status", false, ssh.Marshal(struct{ Status uint32 }{uint32(code)}))
}

// gitCommand takes "git-upload-pack '/name.git'" apart, as git(1) writes it.
func (g *GitHost) gitCommand(ctx context.Context, line string) (*exec.Cmd, error) {
	verb, arg, _ := strings.Cut(line, " ")
	if verb == "git" {
		verb, arg, _ = strings.Cut(arg, " ")
		verb = "git-" + verb
	}
	if verb != "git-upload-pack" && verb != "git-receive-pack" {
		return nil, fmt.Errorf("%q is not a git service", verb)
	}
	repo := filepath.Join(g.dir, filepath.FromSlash(path.Clean("/"+strings.Trim(arg, "'"))))
	if _, err := os.Stat(filepath.Join(repo, "HEAD")); err != nil {
		return nil, err
	}
	return exec.CommandContext(ctx, g.bin, strings.TrimPrefix(verb, "git-"), repo), nil
}
