package cli

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
)

func (a *App) policyCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "policy", Short: "See what sandboxes may reach, and bring changed policies into force",
		Long: `See what sandboxes may reach, and bring changed policies into force.

A profile's network section chooses the policy: mode (nat, allowlist, off),
allow, deny, ports and limits. Rules are names (github.com, *.github.com),
addresses (140.82.112.0/20), both with a port (github.com:22, 1.2.3.4:53/udp),
and in profiles preset:NAME and file:PATH for lists of them.`,
	}
	cmd.AddCommand(a.policyShowCmd(), a.policyCheckCmd(), a.policyExplainCmd(), a.policyReloadCmd(), a.policyPresetsCmd())
	return cmd
}

// policyOf says whose policy a command is about.
type policyOf struct{ profile, sandbox string }

func (of *policyOf) flags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&of.profile, "profile", "", "the policy of this profile")
	cmd.Flags().StringVar(&of.sandbox, "sandbox", "", "the policy of this sandbox (VMID or name)")
	cmd.MarkFlagsMutuallyExclusive("profile", "sandbox")
	cmd.MarkFlagsOneRequired("profile", "sandbox")
}

func (of *policyOf) get(ctx context.Context, c *client.Client) (api.Policy, error) {
	if of.sandbox != "" {
		return c.SandboxPolicy(ctx, of.sandbox)
	}
	return c.ProfilePolicy(ctx, of.profile)
}

func (of *policyOf) check(ctx context.Context, c *client.Client, target string) (api.PolicyCheck, error) {
	if of.sandbox != "" {
		return c.CheckSandboxPolicy(ctx, of.sandbox, target)
	}
	return c.CheckProfilePolicy(ctx, of.profile, target)
}

func (a *App) policyShowCmd() *cobra.Command {
	of := &policyOf{}
	cmd := &cobra.Command{
		Use: "show --profile PROFILE|--sandbox SANDBOX", Short: "List the rules of a policy, with where each comes from", Args: exactArgs(),
		RunE: a.run(func(ctx context.Context, c *client.Client, _ []string) error {
			p, err := of.get(ctx, c)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(p)
			}
			if err := a.printPrivate(p.Private); err != nil {
				return err
			}
			fmt.Fprintf(a.Stdout, "mode: %s\n", p.Mode)
			if len(p.Ports) > 0 {
				fmt.Fprintf(a.Stdout, "ports: %s\n", strings.Join(p.Ports, ", "))
			}
			if err := a.printRules("", p.Allow, p.Deny); err != nil {
				return err
			}
			for i, l := range p.Layers {
				ports := ""
				if len(l.Ports) > 0 {
					ports = ", ports: " + strings.Join(l.Ports, ", ")
				}
				fmt.Fprintf(a.Stdout, "narrowed by layer %d: mode: %s%s\n", i+1, l.Mode, ports)
				if err := a.printRules("  ", l.Allow, l.Deny); err != nil {
					return err
				}
			}
			if p.Pending {
				a.progressf("note: this policy is not in force yet")
			}
			return nil
		}),
	}
	of.flags(cmd)
	return cmd
}

func (a *App) printRules(indent string, allow, deny []api.PolicyRule) error {
	if len(allow)+len(deny) == 0 {
		return nil
	}
	t := newTable(a.Stdout, indent+"VERDICT", "RULE", "SOURCE")
	for _, r := range deny {
		t.row(indent+"deny", r.Rule, dash(r.Source))
	}
	for _, r := range allow {
		t.row(indent+"allow", r.Rule, dash(r.Source))
	}
	return t.flush()
}

func (a *App) policyCheckCmd() *cobra.Command {
	of := &policyOf{}
	cmd := &cobra.Command{
		Use:   "check TARGET --profile PROFILE|--sandbox SANDBOX",
		Short: "Tell whether a target is allowed, and by which rule (exit code 1 when it is not)",
		Long: `Tell whether a target is allowed, and by which rule; the exit code is 1 when
it is not, and 2 when the target is not understood. A target is HOST:PORT,
HOST:PORT/udp, [IPv6]:PORT, HOST/icmp, or a HOST alone, which means port 443.
Nothing is resolved or dialled.`,
		Example: "  agentlab policy check github.com:443 --profile yolo-restricted\n  agentlab policy check 1.1.1.1:53/udp --sandbox my-sandbox",
		Args:    exactArgs("TARGET"),
		RunE: a.run(func(ctx context.Context, c *client.Client, args []string) error {
			return a.policyCheck(ctx, c, of, args[0], func(r api.PolicyCheck) {
				fmt.Fprintf(a.Stdout, "%s: %s by rule %s%s: %s\n", r.Target, verdict(r.Allow), r.Rule, from(r.Source), r.Means)
			})
		}),
	}
	of.flags(cmd)
	return cmd
}

// policyCheck prints a check; what is denied ends with exit code 1.
func (a *App) policyCheck(ctx context.Context, c *client.Client, of *policyOf, target string, show func(api.PolicyCheck)) error {
	r, err := of.check(ctx, c, target)
	if err != nil {
		return usageOf(err, "target")
	}
	if a.json {
		if err := a.printJSON(r); err != nil {
			return err
		}
	} else {
		show(r)
	}
	if !r.Allow {
		return statusError(exitFailure)
	}
	return nil
}

func verdict(allow bool) string {
	if allow {
		return "allowed"
	}
	return "denied"
}

func from(source string) string {
	if source == "" {
		return ""
	}
	return " (" + source + ")"
}

func (a *App) policyExplainCmd() *cobra.Command {
	of := &policyOf{}
	cmd := &cobra.Command{
		Use:   "explain [TARGET] --profile PROFILE|--sandbox SANDBOX",
		Short: "Say in words what a policy means, or step by step what becomes of a target",
		Args:  cobra.MaximumNArgs(1),
		RunE: a.run(func(ctx context.Context, c *client.Client, args []string) error {
			if len(args) == 1 {
				return a.policyCheck(ctx, c, of, args[0], a.explainCheck)
			}
			p, err := of.get(ctx, c)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(p)
			}
			explainPolicy(a.Stdout, p)
			return nil
		}),
	}
	of.flags(cmd)
	return cmd
}

func (a *App) explainCheck(r api.PolicyCheck) {
	what := map[string]string{"dns": "resolve its name", "connect": "connect", "name": "show its name"}
	fmt.Fprintf(a.Stdout, "%s\n", r.Target)
	for i, s := range r.Steps {
		fmt.Fprintf(a.Stdout, "  %d. %s: %s by rule %s%s\n     %s\n", i+1, what[s.What], verdict(s.Allow), s.Rule, from(s.Source), s.Means)
	}
	for _, n := range r.Notes {
		fmt.Fprintf(a.Stdout, "  note: %s\n", n)
	}
	fmt.Fprintf(a.Stdout, "%s\n", verdict(r.Allow))
}

func explainPolicy(w io.Writer, p api.Policy) {
	say := func(format string, args ...any) { fmt.Fprintf(w, format+"\n", args...) }
	say("Always: private, tailnet, link-local, metadata, loopback and multicast addresses, other sandboxes and the host are refused.")
	say("Always: names are resolved by AgentLab alone (port 53 of other servers is refused), and answers with such addresses are withheld.")
	for _, t := range p.Private {
		say("PRIVATE, opened by the operator: TCP to %s is reached although it is private (%s; %s).", net.JoinHostPort(t.Host, strconv.Itoa(t.Port)), plain(t.Reason), privateSource(t.Source))
	}
	if p.UpstreamProxy && p.Mode != agentlab.NetworkOff {
		say("The internet is reached through the operator's upstream proxy, which carries only TCP to IPv4 addresses: UDP, ICMP and IPv6 are refused by rule proxy.unsupported, whatever follows.")
	}
	explainMode(say, p.Mode, p.Allow, p.Deny, p.Ports)
	if p.Limits.BandwidthMbps > 0 {
		say("At most %d Mbit/s each way.", p.Limits.BandwidthMbps)
	}
	if p.Limits.Flows > 0 {
		say("At most %d open connections.", p.Limits.Flows)
	}
	if p.Limits.DNSPerSecond > 0 {
		say("At most %d DNS questions a second.", p.Limits.DNSPerSecond)
	}
	for _, l := range p.Layers {
		say("What is allowed above must be allowed by this layer too:")
		explainMode(func(format string, args ...any) { say("  "+format, args...) }, l.Mode, l.Allow, l.Deny, l.Ports)
	}
}

func explainMode(say func(string, ...any), mode string, allow, deny []api.PolicyRule, ports []string) {
	if len(deny) > 0 {
		say("Denied, whatever follows: %s.", ruleSources(deny))
	}
	switch mode {
	case "off":
		say("Mode off: nothing but the controller is reached.")
	case "allowlist":
		if len(ports) == 0 {
			ports = []string{"80", "443", "22"}
		}
		say("Mode allowlist: only these are reached, the others' names are not even resolved: %s.", ruleSources(allow))
		say("A rule without a port allows %s. What is not said to be /udp is TCP, so QUIC is refused unless a rule names it.", strings.Join(ports, ", "))
		say("A connection that is allowed by a name must show that name (TLS or HTTP), except on port 22 and on ports that the rule itself names.")
	default:
		say("Mode nat: the public internet is reached.")
		if len(ports) > 0 {
			say("Only on ports %s.", strings.Join(ports, ", "))
		}
		if len(deny) > 0 {
			say("A host that is denied by name is not resolved and not reached under that name; a connection to its address that names no host is not recognised.")
		}
		if unread := unreadPorts(deny); len(unread) > 0 {
			say("UDP to port %s (QUIC, HTTP/3) is refused, for a denied name cannot be seen in it; clients go on with TCP.", strings.Join(unread, " and "))
		}
	}
}

// unreadPorts are the ports, of those where names are usual, on which deny
// rules about names make UDP be refused.
func unreadPorts(deny []api.PolicyRule) []string {
	var out []string
	for _, port := range []uint64{80, 443} {
		if slices.ContainsFunc(deny, func(r api.PolicyRule) bool { return deniesName(r.Rule, port) }) {
			out = append(out, strconv.FormatUint(port, 10))
		}
	}
	return out
}

// deniesName tells whether a rule is about a name, and TCP on that port.
func deniesName(rule string, port uint64) bool {
	rule, tcp := strings.CutSuffix(rule, "/tcp")
	host, ports, ranged := strings.Cut(rule, ":")
	if strings.HasSuffix(rule, "/udp") || strings.HasSuffix(rule, "/icmp") || strings.Count(rule, ":") > 1 {
		return false // not TCP, or IPv6
	}
	if _, err := netip.ParseAddr(host); err == nil || strings.Contains(host, "/") {
		return false
	}
	if !ranged {
		return !tcp
	}
	lo, hi, two := strings.Cut(ports, "-")
	if !two {
		hi = lo
	}
	l, err1 := strconv.ParseUint(lo, 10, 16)
	h, err2 := strconv.ParseUint(hi, 10, 16)
	return err1 == nil && err2 == nil && l <= port && port <= h
}

// ruleSources sums rules up: those of the profile itself by their text, those
// of lists by the list.
func ruleSources(rules []api.PolicyRule) string {
	if len(rules) == 0 {
		return "nothing"
	}
	var out []string
	count := map[string]int{}
	for _, r := range rules {
		if r.Source == "" || strings.Contains(r.Source, " ") {
			out = append(out, r.Rule)
			continue
		}
		if count[r.Source]++; count[r.Source] == 1 {
			out = append(out, r.Source)
		}
	}
	for i, s := range out {
		if n := count[s]; n > 0 {
			out[i] = fmt.Sprintf("%s (%d rules)", s, n)
		}
	}
	return strings.Join(out, ", ")
}

func (a *App) policyReloadCmd() *cobra.Command {
	return &cobra.Command{
		Use: "reload [SANDBOX...]", Short: "Give sandboxes the policies that their profiles have now, and cut what those forbid",
		Long: `Give sandboxes the policies that their profiles have now: the named ones, or
all whose profile's policy has changed. Connections that the new policy forbids
are cut. What a repository has narrowed stays narrowed.`,
		RunE: a.run(func(ctx context.Context, c *client.Client, args []string) error {
			list := api.List[api.PolicyReload]{Items: []api.PolicyReload{}}
			var err error
			if len(args) == 0 {
				list, err = c.ReloadPolicies(ctx)
			}
			for _, name := range args {
				var r api.PolicyReload
				if r, err = c.ReloadSandboxPolicy(ctx, name); err != nil {
					break
				}
				list.Items = append(list.Items, r)
			}
			if err != nil {
				return err
			}
			return a.printReloaded(list)
		}),
	}
}

func (a *App) printReloaded(list api.List[api.PolicyReload]) error {
	if a.json {
		if err := a.printJSON(list); err != nil {
			return err
		}
	} else {
		t := newTable(a.Stdout, "VMID", "NAME", "PROFILE", "POLICY")
		for _, r := range list.Items {
			what := "unchanged"
			switch {
			case r.Problem != "":
				what = "PROBLEM: " + r.Problem
			case r.Pending:
				what = "changed, in force when it runs"
			case r.Changed:
				what = "changed, in force"
			}
			t.row(r.VMID, plain(r.Name), r.Profile, what)
		}
		if err := t.flush(); err != nil {
			return err
		}
	}
	if slices.ContainsFunc(list.Items, func(r api.PolicyReload) bool { return r.Problem != "" }) {
		return statusError(exitFailure)
	}
	return nil
}

func (a *App) policyPresetsCmd() *cobra.Command {
	return &cobra.Command{
		Use: "presets [NAME]", Short: "List the lists of hosts that profiles may name as preset:NAME, or what one holds", Args: cobra.MaximumNArgs(1),
		RunE: a.run(func(ctx context.Context, c *client.Client, args []string) error {
			list, err := c.PolicyPresets(ctx)
			if err != nil {
				return err
			}
			if len(args) == 1 {
				return a.printPreset(list, args[0])
			}
			if a.json {
				return a.printJSON(list)
			}
			t := newTable(a.Stdout, "NAME", "RULES", "ABOUT")
			for _, p := range list.Items {
				t.row(p.Name, len(p.Rules), p.About)
			}
			return t.flush()
		}),
	}
}

func (a *App) printPreset(list api.List[api.PolicyPreset], name string) error {
	i := slices.IndexFunc(list.Items, func(p api.PolicyPreset) bool { return p.Name == name })
	if i < 0 {
		return agentlab.Errorf(agentlab.CodeNotFound, "there is no preset %q", name).WithHint("see 'agentlab policy presets'")
	}
	p := list.Items[i]
	if a.json {
		return a.printJSON(p)
	}
	fmt.Fprintf(a.Stdout, "# %s\n%s\n", p.About, strings.Join(p.Rules, "\n"))
	return nil
}
