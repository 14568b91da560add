package hostcmd

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
)

func dnsCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "dns", Short: "Manage names of sandboxes below sandbox.local",
		Long: `Manage names of sandboxes below sandbox.local. Browsers find the ports of sandboxes
below sandbox.localhost without any set-up. The other names are for programs that do
not resolve names below localhost: the daemon answers for them on a loopback port, and
the resolver of this machine asks it.`,
		Example: `  agentlab dns install
  agentlab dns install --print | ssh root@localhost sh`,
	}
	cmd.AddCommand(
		dnsChangeCmd(a, "install", "Make the resolver of this machine find names below sandbox.local", true),
		dnsChangeCmd(a, "uninstall", "Undo 'agentlab dns install'", false),
	)
	return cmd
}

func dnsChangeCmd(a *cli.App, name, short string, install bool) *cobra.Command {
	var show bool
	cmd := &cobra.Command{
		Use: name, Short: short, Args: cli.ExactArgs(),
		Long: short + `. The configuration is for systemd-resolved on Linux, and below
/etc/resolver on macOS. It takes root: without it, the command runs sudo.`,
		Example: "  agentlab dns " + name,
	}
	cmd.Flags().BoolVar(&show, "print", false, "print the shell script for root instead of running it")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, _ []string) error {
		dns, err := c.DNS(ctx)
		if err == nil && install {
			dns, err = c.SetDNS(ctx, true)
		}
		if err != nil {
			return err
		}
		script := uninstallDNS(runtime.GOOS)
		if install {
			at, perr := netip.ParseAddrPort(dns.Address)
			if perr != nil {
				return agentlab.Errorf(agentlab.CodeInternal, "the daemon returned the address %q", dns.Address)
			}
			script = installDNS(runtime.GOOS, at)
		}
		if show {
			_, err := fmt.Fprint(a.Stdout, script)
			return err
		}
		if err := asRoot(ctx, a, script); err != nil {
			return agentlab.Errorf(agentlab.CodeUnavailable, "the resolver was not configured: %w", err).
				WithHint("see what it takes: agentlab dns %s --print", name)
		}
		if !install {
			if dns, err = c.SetDNS(ctx, false); err != nil {
				return err
			}
			return a.Done(dns, "names below %s are no longer resolved", dns.Domain)
		}
		return a.Done(dns, "names below %s are resolved by the daemon at %s", dns.Domain, dns.Address)
	})
	return cmd
}

// asRoot runs a shell script as root.
func asRoot(ctx context.Context, a *cli.App, script string) error {
	argv := []string{"sh", "-c", script}
	if os.Geteuid() != 0 {
		if a.NoInput {
			argv = append([]string{"sudo", "--non-interactive", "--"}, argv...)
		} else {
			argv = append([]string{"sudo", "--"}, argv...)
		}
	}
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = a.Stdin, a.Stderr, a.Stderr
	return cmd.Run()
}

// dnsLink is the name of the network device that has the configuration on Linux, and of
// the unit that makes it. systemd-resolved accepts a server for one domain only on a
// link, and not on the loopback device; a server for all links would also get queries
// for other names.
const dnsLink = "agentlab-dns"

// installDNS returns the script that makes a system ask the responder.
func installDNS(system string, at netip.AddrPort) string {
	if system == "darwin" {
		return fmt.Sprintf(`set -eu
mkdir -p /etc/resolver
printf 'nameserver %%s\nport %%s\n' %s %d > /etc/resolver/sandbox.local
`, at.Addr(), at.Port())
	}
	return strings.NewReplacer("LINK", dnsLink, "SERVER", at.String()).Replace(`set -eu
if ! systemctl is-active --quiet systemd-resolved.service; then
	echo "systemd-resolved does not run on this machine" >&2
	exit 1
fi
cat > /etc/systemd/system/LINK.service <<'EOF'
[Unit]
Description=Names of AgentLab sandboxes below sandbox.local
After=systemd-resolved.service
PartOf=systemd-resolved.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=ip link add LINK type dummy
ExecStart=ip address add 192.0.2.53/32 dev LINK
ExecStart=ip link set LINK up
ExecStart=resolvectl dns LINK SERVER
ExecStart=resolvectl domain LINK ~sandbox.local
ExecStart=resolvectl default-route LINK no
ExecStart=resolvectl llmnr LINK no
ExecStart=resolvectl mdns LINK no
ExecStopPost=-ip link delete LINK

[Install]
WantedBy=multi-user.target
EOF
systemctl daemon-reload
systemctl enable --quiet LINK.service
systemctl restart LINK.service
resolvectl flush-caches
`)
}

// uninstallDNS returns the script that undoes installDNS. It succeeds if nothing is
// installed.
func uninstallDNS(system string) string {
	if system == "darwin" {
		return "rm -f /etc/resolver/sandbox.local\n"
	}
	return strings.ReplaceAll(`set -eu
if [ -e /etc/systemd/system/LINK.service ]; then
	systemctl disable --quiet --now LINK.service
	rm -f /etc/systemd/system/LINK.service
	systemctl daemon-reload
	resolvectl flush-caches
fi
`, "LINK", dnsLink)
}
