package attach

import (
	"context"
	"io"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/guestrun"
)

// CheckMultiplexer checks the value of --terminal.
func CheckMultiplexer(name string) error {
	if name != "" && !slices.Contains(agentlab.Terminals, name) {
		return work.UsageErrorf("unknown terminal multiplexer %q", name).WithHint("use one of %s", strings.Join(agentlab.Terminals, ", "))
	}
	return nil
}

// MultiplexerChoice returns the multiplexer for the terminals of a session: name, the one
// of the flag, or else the one of the profile unless the session has another one. It
// returns nil if neither names one.
func MultiplexerChoice(ctx context.Context, c *client.Client, s api.Session, name string) (*guestapi.SessionTerminal, error) {
	if name != "" {
		return &guestapi.SessionTerminal{Name: name}, nil
	}
	p, err := c.Profile(ctx, s.Profile)
	switch {
	case agentlab.CodeOf(err) == agentlab.CodeNotFound: // the profile of an old session
		return nil, nil
	case err != nil || p.Terminal == "":
		return nil, err
	}
	return &guestapi.SessionTerminal{Name: p.Terminal, Default: true}, nil
}

// ChooseMultiplexer has the guest use a multiplexer, which it remembers on the workspace.
// nil changes nothing.
func ChooseMultiplexer(ctx context.Context, c *client.Client, s api.Session, sandbox string, choice *guestapi.SessionTerminal) error {
	if choice == nil {
		return nil
	}
	command := []string{"agentlab-agent", "terminal"}
	if choice.Default {
		command = append(command, "--default")
	}
	var got guestapi.TerminalChoice
	if err := guestrun.Document(ctx, c, sandbox, guestapi.ExecRequest{Command: append(command, choice.Name)}, &got, io.Discard); err != nil {
		return err
	}
	return CheckMultiplexerOf(s, got)
}

// CheckMultiplexerOf returns an error if a guest does not use the multiplexer that was
// chosen for a session.
func CheckMultiplexerOf(s api.Session, got guestapi.TerminalChoice) error {
	switch {
	case !slices.Contains(agentlab.Terminals, got.Name) || got.Running != "" && !slices.Contains(agentlab.Terminals, got.Running):
		return guestrun.Invalid("unknown multiplexer")
	case got.Missing:
		return agentlab.Errorf(agentlab.CodeUnsupported, "the image of the sandbox does not have %s", got.Name).
			WithHint("use another one: --terminal %s; or add it to the image, see docs/images.md", otherMultiplexer(got.Name))
	case got.Running != "":
		return agentlab.Errorf(agentlab.CodeConflict, "session %s has terminals in %s, which %s would hide", s.Name, got.Running, got.Name).
			WithHint("end them first, with their programs: agentlab stop %s; or leave out --terminal", s.Name)
	}
	return nil
}

func otherMultiplexer(name string) string {
	if name == agentlab.TerminalTmux {
		return agentlab.TerminalZellij
	}
	return agentlab.TerminalTmux
}

// webShown limits the time until the daemon serves the port of a new web server.
const webShown = 15 * time.Second

var (
	webSessionName = regexp.MustCompile(`^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$`)
	webLoginToken  = regexp.MustCompile(`^[A-Za-z0-9_-]{8,128}$`)
)

// Web is the output of 'agentlab attach --web' under --json.
type Web struct {
	URL   string `json:"url"`
	Token string `json:"token"` // for the login
}

// StartWeb starts the web server of the terminals of a session, and returns the
// URL of a terminal with the token for the login.
func StartWeb(ctx context.Context, c *client.Client, s api.Session, sandbox string, open guestapi.ExecRequest) (got Web, err error) {
	open.TTY = false
	open.Command = slices.Insert(open.Command, 2, "--web")
	var w guestapi.TerminalWeb
	if err := guestrun.Document(ctx, c, sandbox, open, &w, io.Discard); err != nil {
		return got, err
	}
	if w.Port == 0 {
		return got, agentlab.Errorf(agentlab.CodeUnsupported, "the terminals of session %s are in tmux, which has no web server", s.Name).
			WithHint("use Zellij: agentlab stop %s; agentlab start --terminal zellij", s.Name)
	}
	if !webSessionName.MatchString(w.Session) || !webLoginToken.MatchString(w.Token) {
		return got, guestrun.Invalid("session %.100q of its web server", w.Session)
	}
	url, err := waitPort(ctx, c, sandbox, int(w.Port))
	if err != nil {
		return got, err
	}
	return Web{URL: strings.TrimSuffix(url, "/") + "/" + w.Session, Token: w.Token}, nil
}

// waitPort waits until the daemon serves a port of a sandbox, and returns its URL.
func waitPort(ctx context.Context, c *client.Client, sandbox string, port int) (string, error) {
	for began := time.Now(); ; {
		list, err := c.Ports(ctx, sandbox)
		if err != nil {
			return "", err
		}
		for _, p := range list.Items {
			if p.Port == port && p.URL != "" {
				return p.URL, nil
			}
		}
		if time.Since(began) > webShown {
			return "", agentlab.Errorf(agentlab.CodeTimeout, "port %d of the sandbox is not served on this machine", port).
				WithHint("see the reason: agentlab port list; or forward it: agentlab port forward %s %d", sandbox, port)
		}
		if err := work.SleepOr(ctx, 200*time.Millisecond); err != nil {
			return "", err
		}
	}
}
