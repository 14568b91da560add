package networkcmd

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// verifyTTL is the lease, in minutes, of a sandbox that is created for a
// verification. It limits its life if this program is killed.
const verifyTTL = 30

type verifyFlags struct {
	sandbox, profile, site string
	all                    bool
}

func verifyCmd(a *cli.App) *cobra.Command {
	f := &verifyFlags{}
	cmd := &cobra.Command{
		Use: "verify", Short: "Check the network of a sandbox from inside",
		Long: `Check the network of a sandbox from inside: private networks, tailnets, metadata
services, the host, other sandboxes, other DNS servers, DNS answers with private
addresses, spoofed and malformed packets, and the internet as far as the profile
allows it. Without --sandbox, a sandbox is created for the checks and destroyed.

Each check is printed with the rule that it tests. The exit code is 1 if a check
fails. Checks of allowed traffic use the real internet: a name that the policy
allows (or --site), and a public DNS service that must not be reachable. If that
name does not resolve or respond from the host itself, the checks that need it
are skipped: the report says "not fully checked", and the exit code is 0.

The sandbox's agent-runner sends the probes as root. If a hostile program has
used the sandbox, trust only the records of the backend.`,
		Example: "  agentlab verify\n  agentlab verify --profile yolo-restricted --json\n  agentlab verify --sandbox my-sandbox --site github.com",
		Args:    cli.ExactArgs(),
	}
	flags := cmd.Flags()
	flags.StringVar(&f.sandbox, "sandbox", "", "check this running sandbox (VMID or name)")
	flags.StringVar(&f.profile, "profile", "", "profile of the sandbox to create")
	flags.StringVar(&f.site, "site", "", "public host name that must be reachable (default: from the policy)")
	flags.BoolVar(&f.all, "all", false, "also print the checks that passed")
	cmd.MarkFlagsMutuallyExclusive("sandbox", "profile")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, _ []string) error { return verify(ctx, a, c, f) })
	return cmd
}

func verify(ctx context.Context, a *cli.App, c *client.Client, f *verifyFlags) error {
	sandbox := f.sandbox
	if sandbox == "" {
		sb, err := c.CreateSandbox(ctx, api.SandboxCreate{Profile: f.profile, TTLMinutes: verifyTTL})
		if err != nil {
			return err
		}
		sandbox = fmt.Sprint(sb.VMID)
		defer func() { endVerified(ctx, a, c, sandbox) }()
		if _, err := work.WaitSandbox(ctx, a, c, sb, 0, work.IsUp); err != nil {
			return err
		}
	}
	a.Progressf("checking the network from inside sandbox %s", sandbox)
	rep, err := c.VerifySandbox(ctx, sandbox, api.VerifyRequest{Site: f.site})
	if err != nil {
		return err
	}
	if err := a.Emit(rep, func() error { return printVerify(a, rep, f.all) }); err != nil {
		return err
	}
	if !rep.OK {
		return work.ExitStatus(cli.ExitFailure)
	}
	return nil
}

// endVerified destroys the sandbox of a verification, also after an interrupt.
// Without an interrupt it waits for the end.
func endVerified(ctx context.Context, a *cli.App, c *client.Client, sandbox string) {
	request, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	r := work.RequestChange(request, c, sandbox, true, c.DestroySandbox)
	err := r.Err
	if err == nil && ctx.Err() == nil {
		_, err = work.WaitSandbox(ctx, a, c, r.Sb, r.After, work.IsDestroyed)
	}
	if err != nil && ctx.Err() == nil {
		a.Progressf("sandbox %s may still exist: %v\n  → agentlab sandbox destroy %s", sandbox, err, sandbox)
	}
}

func printVerify(a *cli.App, r api.VerifyReport, all bool) error {
	t := cli.NewTable(a.Stdout, "STATUS", "CHECK", "RULE", "SHOWS")
	rows := 0
	for _, c := range r.Checks {
		if !all && c.Status == "pass" {
			continue
		}
		rows++
		shows := c.Shows
		if c.Status != "pass" {
			shows += ": " + c.Detail
		}
		t.Row(c.Status, c.ID, cli.OrDash(c.Rule), shows)
	}
	if rows > 0 {
		if err := t.Flush(); err != nil {
			return err
		}
	}
	fmt.Fprintf(a.Stdout, "sandbox %s (%d), profile %s, network mode %s: %d passed, %d failed, %d skipped\n",
		agentlab.WithoutControls(r.Name), r.VMID, agentlab.WithoutControls(r.Profile), r.Mode, r.Passed, r.Failed, r.Skipped)
	if r.Skipped > 0 {
		fmt.Fprintf(a.Stdout, "not fully checked: %d skipped\n", r.Skipped)
		for _, s := range r.SkipReasons {
			fmt.Fprintf(a.Stdout, "  %d: %s\n", s.Count, agentlab.WithoutControls(s.Reason))
		}
	}
	if !r.Records {
		a.Progressf("the backend keeps no egress records: a denied request was recognized only by the missing response")
	}
	if r.Failed > 0 {
		a.Progressf("the network of this sandbox does not match its policy")
	}
	return nil
}
