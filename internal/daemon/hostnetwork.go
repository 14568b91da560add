package daemon

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/backend/registry"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/egress/nft"
	"github.com/agentlab-vm/agentlab/internal/hostnet"
)

// hostNetwork adapts the network of this host to the control API.
type hostNetwork struct {
	settings config.HostNetwork
	*hostnet.Local
}

func newHostNetwork(settings config.Config, dir string, log *slog.Logger) *hostNetwork {
	return &hostNetwork{settings: settings.HostNetwork, Local: hostnet.New(hostnet.Config{
		Network: func() (nft.Config, error) { return hostnet.Rules(settings) },
		Dir:     dir, Logger: log,
	})}
}

// Apply implements server.HostNetwork.
func (h *hostNetwork) Apply(ctx context.Context) (api.HostNetwork, error) {
	return h.told(h.Local.Apply(ctx))
}

// Remove implements server.HostNetwork.
func (h *hostNetwork) Remove(ctx context.Context) (api.HostNetwork, error) {
	return h.told(h.Local.Remove(ctx))
}

// Status implements server.HostNetwork.
func (h *hostNetwork) Status(ctx context.Context) (api.HostNetwork, error) {
	return h.told(h.Local.Status(ctx))
}

func (h *hostNetwork) told(st hostnet.Status, err error) (api.HostNetwork, error) {
	if err != nil {
		return api.HostNetwork{}, err
	}
	return api.HostNetwork{
		Applied: st.Applied(), Tables: nonNil(st.Tables), Drift: nonNil(st.Drift), Ports: nonNil(st.Ports), Sandboxes: st.Sandboxes,
		Bridge: h.settings.Bridge, Subnet: h.settings.Subnet, Subnet6: h.settings.Subnet6, Serving: st.Serving,
	}, nil
}

// nonNil returns the list, which JSON writes as [] when it is empty.
func nonNil(list []string) []string {
	if list == nil {
		return []string{}
	}
	return list
}

// Run enforces policies on the bridge until ctx ends.
func (h *hostNetwork) Run(ctx context.Context) error {
	return h.Local.Run(ctx, os.Geteuid() == 0)
}

const networkUsage = `agentlabd network keeps the rules of a bridge that sandboxes are on, without a
daemon: for the unit that applies them when the host boots.

Usage:
  agentlabd network render                print the rules as 'nft -f' reads them
  agentlabd network apply [--dry-run]     put them in force, in one step; again
                                          changes nothing. With --dry-run only
                                          ask the kernel whether it takes them
  agentlabd network remove                take them away
  agentlabd network status                tell whether they are in force as they
                                          should be; exit code 1 when not
  agentlabd network settings              print bridge and networks, for scripts
  agentlabd network agent                 be the network of this node for the
                                          daemon of another, which runs this by
                                          ssh (key ssh of a node)

Options of each: --home DIR | --system    whose config.yaml (key host_network)
`

// networkCommand runs 'agentlabd network …' and returns the exit code.
func networkCommand(args []string, b registry.List, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("agentlabd network", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	dry := fs.Bool("dry-run", false, "")
	o := runOptions{backends: b}
	fs.StringVar(&o.home, "home", "", "")
	fs.BoolVar(&o.system, "system", false, "")
	verb := ""
	if len(args) > 0 {
		verb, args = args[0], args[1:]
	}
	known := map[string]func(context.Context, *nft.Manager, io.Writer) error{
		"render": renderNetwork, "apply": applyNetwork, "remove": removeNetwork, "status": networkStatus,
	}
	if err := fs.Parse(args); err != nil || known[verb] == nil && verb != "settings" && verb != "agent" || fs.NArg() > 0 || *dry && verb != "apply" || o.system && o.home != "" {
		fmt.Fprint(stderr, networkUsage)
		return 2
	}
	if verb == "settings" {
		return printError(stderr, o.networkSettings(stdout), 1)
	}
	if verb == "agent" {
		return printError(stderr, untilSignal(func(ctx context.Context) error { return o.networkAgent(ctx, stdout, stderr) }), 1)
	}
	do := known[verb]
	if *dry {
		do = checkNetwork
	}
	return printError(stderr, untilSignal(func(ctx context.Context) error {
		m, err := o.networkManager(ctx)
		if err != nil {
			return err
		}
		return do(ctx, m, stdout)
	}), 1)
}

// networkAgent serves the daemon of another node on standard input and output
// until that ends. The daemon sends the configuration of the bridge.
func (o runOptions) networkAgent(ctx context.Context, stdout, stderr io.Writer) error {
	paths, err := config.ResolvePaths(o.getenv(), o.system)
	if err != nil {
		return err
	}
	return hostnet.ServeAgent(ctx, os.Stdin, stdout, hostnet.Config{
		Dir: networkDir(paths), Logger: slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
}

// networkDir returns the directory of the records of the bridge's sandboxes.
func networkDir(paths config.Paths) string { return filepath.Join(paths.State, "network") }

// bridge reads the configuration of the bridge from config.yaml.
func (o runOptions) bridge() (nft.Config, error) {
	paths, err := config.ResolvePaths(o.getenv(), o.system)
	if err != nil {
		return nft.Config{}, err
	}
	settings, err := o.backends.Load(paths.ConfigFile())
	if err != nil {
		return nft.Config{}, err
	}
	if settings.UpstreamProxy.URL != "" {
		return nft.Config{}, agentlab.Errorf(agentlab.CodeUnsupported, "the kernel routes what sandboxes on a bridge send, which no proxy can carry").
			WithField("upstream_proxy.url").WithHint("remove upstream_proxy from %s, or do without the bridge", paths.ConfigFile())
	}
	return hostnet.Rules(settings)
}

func (o runOptions) networkManager(ctx context.Context) (*nft.Manager, error) {
	c, err := o.bridge()
	if err != nil {
		return nil, err
	}
	return nft.New(ctx, nft.Options{Config: c})
}

func renderNetwork(_ context.Context, m *nft.Manager, w io.Writer) error {
	text, err := m.Render()
	if err != nil {
		return err
	}
	_, err = io.WriteString(w, text)
	return err
}

func checkNetwork(ctx context.Context, m *nft.Manager, w io.Writer) error {
	if err := m.Check(ctx); err != nil {
		return err
	}
	_, err := fmt.Fprintln(w, "the kernel takes the rules; nothing was changed")
	return err
}

// applyNetwork does not reload rules that are correct: a daemon may have added
// sandboxes to them, which a reload would block until the daemon notices it.
func applyNetwork(ctx context.Context, m *nft.Manager, w io.Writer) error {
	st, err := m.Status(ctx)
	if err != nil {
		return err
	}
	if st.Applied() && len(st.Drift) == 0 {
		if err := m.Prepare(); err != nil {
			return err
		}
		_, err := fmt.Fprintln(w, "the rules are in force already")
		return err
	}
	if err := m.Apply(ctx); err != nil {
		return err
	}
	_, err = fmt.Fprintln(w, "the rules are in force")
	return err
}

func removeNetwork(ctx context.Context, m *nft.Manager, w io.Writer) error {
	if err := m.Remove(ctx); err != nil {
		return err
	}
	_, err := fmt.Fprintln(w, "the rules are gone")
	return err
}

func networkStatus(ctx context.Context, m *nft.Manager, w io.Writer) error {
	st, err := m.Status(ctx)
	if err != nil {
		return err
	}
	switch {
	case len(st.Tables) == 0:
		return agentlab.Errorf(agentlab.CodeNotFound, "no rules are in force").WithHint("agentlabd network apply")
	case !st.Applied():
		return agentlab.Errorf(agentlab.CodeConflict, "only the tables %s are loaded", strings.Join(st.Tables, ", ")).WithHint("agentlabd network apply")
	case len(st.Drift) > 0:
		return errors.New("the rules were changed: " + strings.Join(st.Drift, "; "))
	}
	_, err = fmt.Fprintln(w, "the rules are in force")
	return err
}
