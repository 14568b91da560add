package hostnet

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/egress/nft"
)

const usage = `agentlabd network manages the firewall rules of a bridge for sandboxes without
a daemon, for the systemd unit that applies them at boot.

Usage:
  agentlabd network render                print the rules in the format of 'nft -f'
  agentlabd network apply [--dry-run]     load the rules atomically, if they are
                                          not loaded yet. With --dry-run only
                                          check that the kernel accepts them
  agentlabd network remove                remove the rules
  agentlabd network status                check that the rules are loaded
                                          and unchanged; exit code 1 if not
  agentlabd network settings              print bridge and networks, for scripts
  agentlabd network agent                 serve the network of this node to the
                                          daemon of another node, which runs this by
                                          ssh (key ssh of a node)

Options of each: --home DIR | --system    the installation whose config.yaml is
                                          read (key host_network)
`

// Command runs 'agentlabd network …'. load reads a config.yaml.
func Command(ctx context.Context, args []string, load func(path string) (config.Config, error), stdout, stderr io.Writer) error {
	fs := flag.NewFlagSet("agentlabd network", flag.ContinueOnError)
	dry := fs.Bool("dry-run", false, "")
	verb := ""
	if len(args) > 0 {
		verb, args = args[0], args[1:]
	}
	known := map[string]func(context.Context, *nft.Manager, io.Writer) error{
		"render": render, "apply": apply, "remove": removeRules, "status": printStatus,
	}
	home, err := config.ParseHome(fs, args)
	if err != nil || known[verb] == nil && verb != "settings" && verb != "agent" || fs.NArg() > 0 || *dry && verb != "apply" {
		return config.Usage(usage)
	}
	paths, err := home.Paths()
	if err != nil {
		return err
	}
	if verb == "agent" { // the daemon sends the configuration of the bridge
		return ServeAgent(ctx, os.Stdin, stdout, Config{
			Dir: paths.Network(), Logger: slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
		})
	}
	c, err := bridge(paths, load)
	if err != nil {
		return err
	}
	if verb == "settings" {
		return printSettings(c, stdout)
	}
	do := known[verb]
	if *dry {
		do = check
	}
	m, err := nft.New(ctx, nft.Options{Config: c})
	if err != nil {
		return err
	}
	return do(ctx, m, stdout)
}

// bridge reads the configuration of the bridge from config.yaml.
func bridge(paths config.Paths, load func(path string) (config.Config, error)) (nft.Config, error) {
	settings, err := load(paths.ConfigFile())
	if err != nil {
		return nft.Config{}, err
	}
	if settings.UpstreamProxy.URL != "" {
		return nft.Config{}, agentlab.Errorf(agentlab.CodeUnsupported, "the kernel routes the packets of sandboxes on a bridge, so a proxy cannot be used").
			WithField("upstream_proxy.url").WithHint("remove upstream_proxy from %s, or do not use a bridge", paths.ConfigFile())
	}
	return Rules(settings)
}

// printSettings prints the bridge of config.yaml as KEY=VALUE lines for shell
// scripts. Names of interfaces are checked, so no value contains blanks or
// quotes. The value of a missing network is empty.
func printSettings(c nft.Config, w io.Writer) error {
	host := func(a netip.Addr, n netip.Prefix) string {
		if !a.IsValid() {
			return ""
		}
		return netip.PrefixFrom(a, n.Bits()).String()
	}
	subnet6 := ""
	if c.Subnet6.IsValid() {
		subnet6 = c.Subnet6.String()
	}
	for _, line := range [][2]string{
		{"bridge", c.Bridge}, {"subnet", c.Subnet4.String()}, {"gateway", host(c.Gateway4, c.Subnet4)},
		{"subnet6", subnet6}, {"gateway6", host(c.Gateway6, c.Subnet6)}, {"uplink", c.Uplink}, {"tailscale", c.Tailscale},
	} {
		if _, err := fmt.Fprintf(w, "%s=%s\n", line[0], line[1]); err != nil {
			return err
		}
	}
	return nil
}

func render(_ context.Context, m *nft.Manager, w io.Writer) error {
	text, err := m.Render()
	if err != nil {
		return err
	}
	_, err = io.WriteString(w, text)
	return err
}

func check(ctx context.Context, m *nft.Manager, w io.Writer) error {
	if err := m.Check(ctx); err != nil {
		return err
	}
	_, err := fmt.Fprintln(w, "the kernel accepts the rules; nothing was changed")
	return err
}

// apply does not reload rules that are correct: a daemon may have added
// sandboxes to them, which a reload would block until the daemon notices it.
func apply(ctx context.Context, m *nft.Manager, w io.Writer) error {
	st, err := m.Status(ctx)
	if err != nil {
		return err
	}
	if st.Applied() && len(st.Drift) == 0 {
		if err := m.Prepare(); err != nil {
			return err
		}
		_, err := fmt.Fprintln(w, "the rules are already active")
		return err
	}
	if err := m.Apply(ctx); err != nil {
		return err
	}
	_, err = fmt.Fprintln(w, "the rules are active")
	return err
}

func removeRules(ctx context.Context, m *nft.Manager, w io.Writer) error {
	if err := m.Remove(ctx); err != nil {
		return err
	}
	_, err := fmt.Fprintln(w, "rules removed")
	return err
}

func printStatus(ctx context.Context, m *nft.Manager, w io.Writer) error {
	st, err := m.Status(ctx)
	if err != nil {
		return err
	}
	switch {
	case len(st.Tables) == 0:
		return agentlab.Errorf(agentlab.CodeNotFound, "no rules are active").WithHint("agentlabd network apply")
	case !st.Applied():
		return agentlab.Errorf(agentlab.CodeConflict, "only the tables %s are loaded", strings.Join(st.Tables, ", ")).WithHint("agentlabd network apply")
	case len(st.Drift) > 0:
		return errors.New("the rules were changed: " + strings.Join(st.Drift, "; "))
	}
	_, err = fmt.Fprintln(w, "the rules are active")
	return err
}
