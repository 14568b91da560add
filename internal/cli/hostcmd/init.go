package hostcmd

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/hostsetup"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// initFlags are the flags of 'agentlab init'.
type initFlags struct {
	apply, smoke, system, tailscale bool
	profile, site                   string
}

// initCheck is one line of the report.
type initCheck struct {
	api.Finding
	Commands []string `json:"commands,omitempty"` // that --apply would run, or has run
}

// The levels of a check.
const (
	levelOK    = "ok"
	levelWarn  = "warn"
	levelError = "error"
)

// smokeCheck is one line of the smoke test.
type smokeCheck struct {
	Result string `json:"result"` // pass, fail, skip
	Check  string `json:"check"`
	Detail string `json:"detail"`
}

// initReport is what 'agentlab init' prints.
type initReport struct {
	OK      bool         `json:"ok"`
	System  bool         `json:"system"` // the system installation was checked
	Backend string       `json:"backend,omitempty"`
	Checks  []initCheck  `json:"checks"`
	Smoke   []smokeCheck `json:"smoke,omitempty"`
}

func (r *initReport) add(name, level, detail, remedy string) {
	r.Checks = append(r.Checks, initCheck{Finding: api.Finding{Name: name, Level: level, Detail: detail, Remedy: remedy}})
}

func initCmd(a *cli.App) *cobra.Command {
	f := &initFlags{}
	cmd := &cobra.Command{
		Use: "init", Short: "Check whether this machine can run sandboxes, and set it up",
		Long: `Check whether this machine can run sandboxes. Each failed check prints a remedy.
Nothing changes without --apply.

As root on a host with a system installation (a node of Proxmox VE, for example),
also check that installation: programs, units, the bridge for sandboxes, its
firewall, the template. The missing commands are printed; --apply runs them. See
docs/proxmox.md for the complete setup.

The exit code is 1 if a check fails.`,
		Example: "  agentlab init\n  sudo agentlab init --apply\n  agentlab init --smoke-test",
		Args:    cli.ExactArgs(),
	}
	flags := cmd.Flags()
	flags.BoolVar(&f.apply, "apply", false, "print and run the missing commands")
	flags.BoolVar(&f.smoke, "smoke-test", false, "create a sandbox and check its network from inside")
	flags.BoolVar(&f.system, "system", false, "check the system installation (default on a node of Proxmox VE, or if there is one)")
	flags.BoolVar(&f.tailscale, "tailscale", false, "also make this host the tailnet's router to sandboxes")
	flags.StringVar(&f.profile, "profile", "", "profile of the sandbox for --smoke-test")
	flags.StringVar(&f.site, "site", "", "public host that must be reachable in --smoke-test (default example.com)")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return initHost(cmd.Context(), a, f) }
	return cmd
}

func initHost(ctx context.Context, a *cli.App, f *initFlags) error {
	if err := a.LocalOnly(); err != nil {
		return err
	}
	if !f.smoke && (f.profile != "" || f.site != "") {
		return work.UsageErrorf("--profile and --site require --smoke-test")
	}
	kit, err := hostsetup.Unpack("")
	if err != nil {
		return err
	}
	defer kit.Close()
	h := &hostInit{app: a, flags: f, kit: kit}
	if err := h.run(ctx); err != nil {
		return err
	}
	h.report.OK = h.ok()
	err = a.Emit(h.report, func() error { h.print(); return nil })
	if err == nil && !h.report.OK {
		err = work.ExitStatus(cli.ExitFailure)
	}
	return err
}

// hostInit is one run of 'agentlab init'.
type hostInit struct {
	app    *cli.App
	flags  *initFlags
	kit    *hostsetup.Kit
	report initReport
}

// proxmoxNode reports whether this machine is a node of Proxmox VE.
func proxmoxNode() bool {
	st, err := os.Stat("/etc/pve")
	return err == nil && st.IsDir()
}

// wholeMachine reports whether to check the system installation.
func (h *hostInit) wholeMachine() (bool, error) {
	own := os.Getenv("AGENTLAB_HOME") != "" || h.app.Socket != ""
	switch {
	case h.flags.system && own:
		return false, work.UsageErrorf("--system cannot be used with AGENTLAB_HOME or --socket, which select another installation")
	case h.flags.system && os.Geteuid() != 0:
		return false, agentlab.Errorf(agentlab.CodeDenied, "only root can check the system installation").WithHint("run the command with sudo")
	case own || os.Geteuid() != 0:
		return false, nil
	}
	for _, path := range []string{"/etc/systemd/system/agentlabd.service", "/etc/agentlab/config.yaml", "/run/agentlab/agentlabd.sock"} {
		if _, err := os.Stat(path); err == nil {
			return true, nil
		}
	}
	return h.flags.system || proxmoxNode(), nil
}

func (h *hostInit) run(ctx context.Context) error {
	system, err := h.wholeMachine()
	if err != nil {
		return err
	}
	h.report.System, h.report.Checks = system, []initCheck{}
	if !system {
		if h.flags.apply {
			return agentlab.Errorf(agentlab.CodeUnsupported, "nothing to apply: a user's own daemon needs no setup").
				WithHint("to set up the system daemon: sudo agentlab init --system --apply")
		}
		if h.flags.tailscale {
			return agentlab.Errorf(agentlab.CodeUnsupported, "--tailscale requires the system installation").WithHint("run: sudo agentlab init --system --tailscale")
		}
		return h.daemon(ctx, false)
	}
	installed, err := h.script(ctx, "installation", "install_host.sh")
	if err != nil {
		return err
	}
	checks, answered := h.hostChecks(ctx)
	if answered && checks.Bridge || !answered && proxmoxNode() {
		if err := h.bridge(ctx, !answered || !templatesRight(checks)); err != nil {
			return err
		}
	}
	if !installed && !answered {
		h.report.add("daemon", levelError, "not installed, so the backend was not checked", "agentlab init --apply")
		return nil
	}
	return h.daemon(ctx, true)
}

// bridge checks the parts of hosts with a bridge, in the order of their setup: the
// rules are applied before a VM can use the bridge.
func (h *hostInit) bridge(ctx context.Context, template bool) error {
	steps := []struct{ name, script string }{{"bridge", "net/setup_vmbr1.sh"}, {"firewall", "net/apply.sh"}}
	if template {
		steps = append(steps, struct{ name, script string }{"template", "create_template.sh"})
	}
	if h.flags.tailscale {
		steps = append(steps, struct{ name, script string }{"tailscale", "net/setup_tailscale_router.sh"})
	}
	for _, s := range steps {
		if !h.kit.Has(s.script) {
			continue
		}
		if _, err := h.script(ctx, s.name, s.script); err != nil {
			return err
		}
	}
	return nil
}

// templatesRight reports whether the backend has templates and accepts them. They
// need not be those of the script.
func templatesRight(c api.HostChecks) bool {
	found := false
	for _, f := range c.Checks {
		if strings.HasPrefix(f.Name, "template") {
			found = true
			if f.Level == levelError {
				return false
			}
		}
	}
	return found
}

// script runs one script to find what is missing, and with --apply sets it up. It
// reports whether nothing is missing now.
func (h *hostInit) script(ctx context.Context, name, script string, args ...string) (bool, error) {
	dry, err := h.kit.Run(ctx, nil, nil, script, args...)
	if err != nil {
		return false, err
	}
	c := initCheck{Finding: api.Finding{Name: name, Level: levelOK, Detail: "set up"}, Commands: dry.Commands()}
	report := func() { h.report.Checks = append(h.report.Checks, c) }
	failed := func(r hostsetup.Result) (bool, error) {
		c.Level = levelError
		c.Detail, c.Remedy = r.Complaint()
		report()
		return false, nil
	}
	switch {
	case dry.Code != 0:
		return failed(dry)
	case len(c.Commands) == 0:
		report()
		return true, nil
	case !h.flags.apply:
		c.Level, c.Detail, c.Remedy = levelError, "not set up, "+agentlab.Plural(len(c.Commands), "command")+" missing", "agentlab init --apply"
		report()
		return false, nil
	}
	h.app.Progressf("%s: %s missing; running %s --apply", name, agentlab.Plural(len(c.Commands), "command"), script)
	done, err := h.kit.Run(ctx, h.app.Stderr, nil, script, append(args, "--apply")...)
	if err != nil {
		return false, err
	}
	if done.Code != 0 {
		return failed(done)
	}
	// The commands may have revealed that more are missing.
	if dry, err = h.kit.Run(ctx, nil, nil, script, args...); err != nil {
		return false, err
	}
	if dry.Code != 0 {
		return failed(dry)
	}
	if left := dry.Commands(); len(left) > 0 {
		c.Level, c.Detail, c.Remedy = levelError, "still missing after the setup: "+left[0], "agentlab init --apply"
		report()
		return false, nil
	}
	c.Detail = "set up now"
	report()
	return true, nil
}

// socket returns the socket of the selected daemon.
func (h *hostInit) socket() (string, error) {
	if !h.report.System {
		return h.app.SocketPath()
	}
	p, err := config.ResolvePaths(func(string) string { return "" }, true)
	if err != nil {
		return "", err
	}
	return p.Socket(), p.CheckRun()
}

// hostChecks gets the checks of a daemon that is already running.
func (h *hostInit) hostChecks(ctx context.Context) (api.HostChecks, bool) {
	socket, err := h.socket()
	if err != nil || cli.Ping(ctx, socket) != nil {
		return api.HostChecks{}, false
	}
	checks, err := client.New(socket).HostChecks(ctx)
	return checks, err == nil
}

// daemon adds the checks of the daemon, and with --smoke-test runs that. It starts
// the user's daemon if none is running.
func (h *hostInit) daemon(ctx context.Context, system bool) error {
	socket, err := h.socket()
	if err == nil && system {
		err = cli.Ping(ctx, socket)
	} else if err == nil {
		_, err = h.app.Connect(ctx)
	}
	if err != nil {
		remedy := agentlab.HintOf(err)
		if system {
			remedy = "systemctl restart agentlabd; journalctl -u agentlabd -n 20"
		}
		h.report.add("daemon", levelError, err.Error(), remedy)
		return ctx.Err()
	}
	h.report.add("daemon", levelOK, "running on "+socket, "")
	checks, err := client.New(socket).HostChecks(ctx)
	if err != nil {
		h.report.add("backend", levelError, err.Error(), agentlab.HintOf(err))
		return ctx.Err()
	}
	h.report.Backend = checks.Backend
	for _, f := range checks.Checks {
		h.report.Checks = append(h.report.Checks, initCheck{Finding: f})
	}
	if !h.flags.smoke {
		return nil
	}
	if !h.ok() {
		h.app.Progressf("skipping the smoke test until the failed checks are fixed")
		return nil
	}
	return h.smokeTest(ctx, socket)
}

// smokeTest runs net/smoke_test.sh with this program.
func (h *hostInit) smokeTest(ctx context.Context, socket string) error {
	args := []string{"--tabs"}
	if h.flags.profile != "" {
		args = append(args, "--profile", h.flags.profile)
	}
	if h.flags.site != "" {
		args = append(args, "--site", h.flags.site)
	}
	h.app.Progressf("smoke test: creating a sandbox for it")
	if strings.ContainsAny(socket, " \t\n") {
		return work.UsageErrorf("the smoke test cannot use a socket with spaces in its path: %q", socket)
	}
	abs, err := filepath.Abs(socket)
	if err != nil {
		return err
	}
	r, err := h.kit.Run(ctx, nil, []string{hostsetup.EnvOptions + "=--socket " + abs}, "net/smoke_test.sh", args...)
	if err != nil {
		return err
	}
	for line := range strings.Lines(r.Output) {
		if parts := strings.SplitN(strings.TrimRight(line, "\n"), "\t", 3); len(parts) == 3 {
			h.report.Smoke = append(h.report.Smoke, smokeCheck{Result: parts[0], Check: parts[1], Detail: parts[2]})
		}
	}
	if len(h.report.Smoke) == 0 {
		what, remedy := r.Complaint()
		return agentlab.Errorf(agentlab.CodeInternal, "the smoke test printed no results: %s", what).WithHint("%s", remedy)
	}
	return nil
}

// ok reports whether no check failed.
func (h *hostInit) ok() bool {
	return !slices.ContainsFunc(h.report.Checks, func(c initCheck) bool { return c.Level == levelError }) &&
		!slices.ContainsFunc(h.report.Smoke, func(s smokeCheck) bool { return s.Result == "fail" })
}

func (h *hostInit) print() {
	w := h.app.Stdout
	count := map[string]int{}
	for _, c := range h.report.Checks {
		count[c.Level]++
		fmt.Fprintf(w, "%-5s  %-14s %s\n", c.Level, agentlab.WithoutControls(c.Name), agentlab.WithoutControls(c.Detail))
		if c.Level == levelError && !h.flags.apply {
			for _, cmd := range c.Commands {
				fmt.Fprintf(w, "         + %s\n", agentlab.WithoutControls(cmd))
			}
		}
		if c.Remedy != "" {
			fmt.Fprintf(w, "         → %s\n", agentlab.WithoutControls(c.Remedy))
		}
	}
	for _, s := range h.report.Smoke {
		count[s.Result]++
		fmt.Fprintf(w, "%-5s  %-14s %s\n", agentlab.WithoutControls(s.Result), agentlab.WithoutControls(s.Check), agentlab.WithoutControls(s.Detail))
	}
	fmt.Fprintf(w, "%d ok, %s, %s", count[levelOK], agentlab.Plural(count[levelWarn], "warning"), agentlab.Plural(count[levelError], "error"))
	if len(h.report.Smoke) > 0 {
		fmt.Fprintf(w, "; smoke test: %d passed, %d failed, %d skipped", count["pass"], count["fail"], count["skip"])
	}
	fmt.Fprintln(w)
}
