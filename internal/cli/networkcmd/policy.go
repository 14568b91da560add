package networkcmd

import (
	"cmp"
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
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
)

func policyCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "policy", Short: "Show, check and reload network policies",
		Long: `Show, check and reload network policies.

The network section of a profile sets the policy: mode (nat, allowlist, off),
allow, deny, ports and limits. Rules are names (github.com, *.github.com) or
addresses (140.82.112.0/20), optionally with a port (github.com:22,
1.2.3.4:53/udp). In profiles, preset:NAME and file:PATH include lists of rules.`,
	}
	cmd.AddCommand(policyShowCmd(a), policyCheckCmd(a), policyExplainCmd(a), policyReloadCmd(a), policyPresetsCmd(a))
	return cmd
}

// policyOf selects the policy of a profile or sandbox.
type policyOf struct{ profile, sandbox string }

func (of *policyOf) flags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&of.profile, "profile", "", "use the policy of this profile")
	cmd.Flags().StringVar(&of.sandbox, "sandbox", "", "use the policy of this sandbox (VMID or name)")
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

func policyShowCmd(a *cli.App) *cobra.Command {
	of := &policyOf{}
	cmd := cli.Query(a, "show --profile PROFILE|--sandbox SANDBOX", "List the rules of a policy and their sources", cli.ExactArgs(),
		func(ctx context.Context, c *client.Client, _ []string) (api.Policy, error) { return of.get(ctx, c) }, func(p api.Policy) error { return showPolicy(a, p) })
	of.flags(cmd)
	return cmd
}

func showPolicy(a *cli.App, p api.Policy) error {
	if err := printPrivate(a, p.Private); err != nil {
		return err
	}
	fmt.Fprintf(a.Stdout, "mode: %s\n", p.Mode)
	if len(p.Ports) > 0 {
		fmt.Fprintf(a.Stdout, "ports: %s\n", strings.Join(p.Ports, ", "))
	}
	if err := printRules(a, "", p.Allow, p.Deny); err != nil {
		return err
	}
	for i, l := range p.Layers {
		ports := ""
		if len(l.Ports) > 0 {
			ports = ", ports: " + strings.Join(l.Ports, ", ")
		}
		fmt.Fprintf(a.Stdout, "narrowed by layer %d: mode: %s%s\n", i+1, l.Mode, ports)
		if err := printRules(a, "  ", l.Allow, l.Deny); err != nil {
			return err
		}
	}
	if p.Pending {
		a.Progressf("note: this policy is not applied yet")
	}
	return nil
}

func printRules(a *cli.App, indent string, allow, deny []api.PolicyRule) error {
	if len(allow)+len(deny) == 0 {
		return nil
	}
	t := cli.NewTable(a.Stdout, indent+"VERDICT", "RULE", "SOURCE")
	for _, r := range deny {
		t.Row(indent+"deny", r.Rule, cli.OrDash(r.Source))
	}
	for _, r := range allow {
		t.Row(indent+"allow", r.Rule, cli.OrDash(r.Source))
	}
	return t.Flush()
}

func policyCheckCmd(a *cli.App) *cobra.Command {
	of := &policyOf{}
	cmd := &cobra.Command{
		Use:   "check TARGET --profile PROFILE|--sandbox SANDBOX",
		Short: "Check whether a policy allows a target",
		Long: `Check whether a policy allows a target, and by which rule. The exit code is 0 if
the target is allowed, 1 if it is denied, 2 if it is invalid. A target is
HOST:PORT, HOST:PORT/udp, [IPv6]:PORT, HOST/icmp, or HOST for port 443. The
command does not resolve names or open connections.`,
		Example: "  agentlab policy check github.com:443 --profile yolo-restricted\n  agentlab policy check 1.1.1.1:53/udp --sandbox my-sandbox",
		Args:    cli.ExactArgs("TARGET"),
		RunE: a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
			return policyCheck(ctx, a, c, of, args[0], func(r api.PolicyCheck) {
				fmt.Fprintf(a.Stdout, "%s: %s by rule %s%s: %s\n", r.Target, verdict(r.Allow), r.Rule, from(r.Source), r.Means)
			})
		}),
	}
	of.flags(cmd)
	return cmd
}

// policyCheck prints a check. The exit code for a denied target is 1.
func policyCheck(ctx context.Context, a *cli.App, c *client.Client, of *policyOf, target string, show func(api.PolicyCheck)) error {
	r, err := of.check(ctx, c, target)
	if err != nil {
		return err
	}
	if err := a.Emit(r, func() error { show(r); return nil }); err != nil {
		return err
	}
	if !r.Allow {
		return work.ExitStatus(cli.ExitFailure)
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

func policyExplainCmd(a *cli.App) *cobra.Command {
	of := &policyOf{}
	cmd := &cobra.Command{
		Use:   "explain [TARGET] --profile PROFILE|--sandbox SANDBOX",
		Short: "Explain a policy, or trace the decision for a target",
		Args:  cobra.MaximumNArgs(1),
		RunE: a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
			if len(args) == 1 {
				return policyCheck(ctx, a, c, of, args[0], func(r api.PolicyCheck) { explainCheck(a, r) })
			}
			p, err := of.get(ctx, c)
			if err != nil {
				return err
			}
			return a.Emit(p, func() error { explainPolicy(a.Stdout, p); return nil })
		}),
	}
	of.flags(cmd)
	return cmd
}

func explainCheck(a *cli.App, r api.PolicyCheck) {
	what := map[string]string{"dns": "resolve the name", "connect": "connect", "name": "present the name (TLS or HTTP)"}
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
	say("Always: private, tailnet, link-local, metadata, loopback and multicast addresses, other sandboxes and the host are denied.")
	say("Always: only AgentLab resolves names (port 53 of other servers is denied), and answers with such addresses are withheld.")
	for _, t := range p.Private {
		say("PRIVATE, opened by the operator: TCP to %s is allowed although it is private (%s; %s).", net.JoinHostPort(t.Host, strconv.Itoa(t.Port)), agentlab.WithoutControls(t.Reason), privateSource(t.Source))
	}
	if p.UpstreamProxy && p.Mode != agentlab.NetworkOff {
		say("The internet is reached through the operator's upstream proxy, which supports only TCP to IPv4 addresses: rule proxy.unsupported denies UDP, ICMP and IPv6, before all rules below.")
	}
	explainMode(say, p.Mode, p.Allow, p.Deny, p.Ports)
	if p.Limits.BandwidthMbps > 0 {
		say("At most %d Mbit/s each way.", p.Limits.BandwidthMbps)
	}
	if p.Limits.Flows > 0 {
		say("At most %d open connections.", p.Limits.Flows)
	}
	if p.Limits.DNSPerSecond > 0 {
		say("At most %d DNS queries per second.", p.Limits.DNSPerSecond)
	}
	for _, l := range p.Layers {
		say("Targets must also be allowed by this layer:")
		explainMode(func(format string, args ...any) { say("  "+format, args...) }, l.Mode, l.Allow, l.Deny, l.Ports)
	}
}

func explainMode(say func(string, ...any), mode string, allow, deny []api.PolicyRule, ports []string) {
	if len(deny) > 0 {
		say("Denied, before all rules below: %s.", ruleSources(deny))
	}
	switch mode {
	case "off":
		say("Mode off: only the controller is reachable.")
	case "allowlist":
		if len(ports) == 0 {
			ports = []string{"80", "443", "22"}
		}
		say("Mode allowlist: only these targets are allowed; other names are not resolved: %s.", ruleSources(allow))
		say("A rule without a port allows ports %s. A rule without /udp means TCP, so QUIC is denied unless a rule allows it.", strings.Join(ports, ", "))
		say("A connection that is allowed by name must present that name (TLS or HTTP), except on port 22 and on ports in the rule itself.")
	default:
		say("Mode nat: the public internet is allowed.")
		if len(ports) > 0 {
			say("Only on ports %s.", strings.Join(ports, ", "))
		}
		if len(deny) > 0 {
			say("A name that is denied is not resolved, and connections that present it are denied; a connection to its address that presents no name is not recognized.")
		}
		if unread := unreadPorts(deny); len(unread) > 0 {
			say("UDP to port %s (QUIC, HTTP/3) is denied, because denied names are not visible in it; clients fall back to TCP.", strings.Join(unread, " and port "))
		}
	}
}

// unreadPorts returns those of the ports 80 and 443 on which deny rules for names
// cause UDP to be denied.
func unreadPorts(deny []api.PolicyRule) []string {
	var out []string
	for _, port := range []uint64{80, 443} {
		if slices.ContainsFunc(deny, func(r api.PolicyRule) bool { return deniesName(r.Rule, port) }) {
			out = append(out, strconv.FormatUint(port, 10))
		}
	}
	return out
}

// deniesName reports whether a rule is for a name and applies to TCP on port.
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

// ruleSources summarizes rules: rules of the profile by their text, rules of lists
// by the list.
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

func policyReloadCmd(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use: "reload [SANDBOX...]", Short: "Apply the current policies of profiles to running sandboxes",
		Long: `Apply the current policies of profiles to running sandboxes: to the given
sandboxes, or to all whose policy has changed. Connections that the new policy
denies are closed. Restrictions that a repository added remain.`,
		RunE: a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
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
			return printReloaded(a, list)
		}),
	}
}

func printReloaded(a *cli.App, list api.List[api.PolicyReload]) error {
	err := a.Emit(list, func() error {
		t := cli.NewTable(a.Stdout, "VMID", "NAME", "PROFILE", "POLICY")
		for _, r := range list.Items {
			what := "unchanged"
			switch {
			case r.Problem != "":
				what = "PROBLEM: " + r.Problem
			case r.Pending:
				what = "changed, applied when the sandbox runs"
			case r.Changed:
				what = "changed, applied"
			}
			t.Row(r.VMID, agentlab.WithoutControls(r.Name), r.Profile, what)
		}
		return t.Flush()
	})
	if err != nil {
		return err
	}
	if slices.ContainsFunc(list.Items, func(r api.PolicyReload) bool { return r.Problem != "" }) {
		return work.ExitStatus(cli.ExitFailure)
	}
	return nil
}

func policyPresetsCmd(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use: "presets [NAME]", Short: "List the rule lists for preset:NAME in profiles, or the rules of one", Args: cobra.MaximumNArgs(1),
		RunE: a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
			list, err := c.PolicyPresets(ctx)
			if err != nil {
				return err
			}
			if len(args) == 1 {
				return printPreset(a, list, args[0])
			}
			return a.Emit(list, func() error {
				t := cli.NewTable(a.Stdout, "NAME", "RULES", "ABOUT")
				for _, p := range list.Items {
					t.Row(p.Name, len(p.Rules), p.About)
				}
				return t.Flush()
			})
		}),
	}
}

func printPreset(a *cli.App, list api.List[api.PolicyPreset], name string) error {
	i := slices.IndexFunc(list.Items, func(p api.PolicyPreset) bool { return p.Name == name })
	if i < 0 {
		return agentlab.Errorf(agentlab.CodeNotFound, "no preset %q", name).WithHint("list them: agentlab policy presets")
	}
	p := list.Items[i]
	return a.Emit(p, func() error {
		_, err := fmt.Fprintf(a.Stdout, "# %s\n%s\n", p.About, strings.Join(p.Rules, "\n"))
		return err
	})
}

// printPrivate lists the private targets of a policy, the only exceptions to the
// rules that always apply.
func printPrivate(a *cli.App, list []api.PolicyPrivate) error {
	if len(list) == 0 {
		return nil
	}
	fmt.Fprintf(a.Stdout, "WARNING: this policy opens %s to the sandbox:\n", agentlab.Plural(len(list), "private target"))
	t := cli.NewTable(a.Stdout, "  PRIVATE", "REASON", "SOURCE")
	for _, p := range list {
		t.Row("  "+net.JoinHostPort(p.Host, strconv.Itoa(p.Port)), agentlab.WithoutControls(p.Reason), privateSource(p.Source))
	}
	return t.Flush()
}

func privateSource(s string) string { return cmp.Or(s, "profile") }
