package cli

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/hostsetup"
)

// initFlags are the flags of 'agentlab init'.
type initFlags struct {
	apply, smoke, system, tailscale bool
	profile, site                   string
}

// initCheck is one line of the report.
type initCheck struct {
	Name     string   `json:"name"`
	Level    string   `json:"level"` // ok, warn, error
	Detail   string   `json:"detail"`
	Remedy   string   `json:"remedy,omitempty"`
	Commands []string `json:"commands,omitempty"` // what --apply would run, or has run
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
	System  bool         `json:"system"` // the machine-wide installation was looked at
	Backend string       `json:"backend,omitempty"`
	Checks  []initCheck  `json:"checks"`
	Smoke   []smokeCheck `json:"smoke,omitempty"`
}

func (r *initReport) add(c initCheck) { r.Checks = append(r.Checks, c) }

func (a *App) initCmd() *cobra.Command {
	f := &initFlags{}
	cmd := &cobra.Command{
		Use: "init", Short: "Check whether this machine is ready for sandboxes, and set it up",
		Long: `Check whether this machine is ready for sandboxes. Nothing is changed without
--apply; each check that is not ok says what to do.

As root on a host that serves everybody (a node of Proxmox VE, say) the
installation is looked at too: programs, units, the bridge of sandboxes, its
firewall, the template. --apply shows the commands that are missing and runs
them; 'agentlab init' shows them alone. docs/proxmox.md tells the whole way.

The exit code is 1 when a check fails.`,
		Example: "  agentlab init\n  sudo agentlab init --apply\n  agentlab init --smoke-test",
		Args:    exactArgs(),
	}
	flags := cmd.Flags()
	flags.BoolVar(&f.apply, "apply", false, "show and run the commands that are missing")
	flags.BoolVar(&f.smoke, "smoke-test", false, "make a sandbox and try from inside what its network lets through")
	flags.BoolVar(&f.system, "system", false, "install for the whole machine (default on a node of Proxmox VE, or where it is installed)")
	flags.BoolVar(&f.tailscale, "tailscale", false, "also make this host the tailnet's way to sandboxes")
	flags.StringVar(&f.profile, "profile", "", "profile of the sandbox of --smoke-test")
	flags.StringVar(&f.site, "site", "", "public host that --smoke-test must reach (default example.com)")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return a.init(cmd.Context(), f) }
	return cmd
}

func (a *App) init(ctx context.Context, f *initFlags) error {
	if err := a.onlyHere(); err != nil {
		return err
	}
	if !f.smoke && (f.profile != "" || f.site != "") {
		return usageErrorf("--profile and --site are for --smoke-test")
	}
	kit, err := hostsetup.Unpack("")
	if err != nil {
		return err
	}
	defer kit.Close() //nolint:errcheck // a copy in a temporary folder
	h := &hostInit{app: a, flags: f, kit: kit}
	if err := h.run(ctx); err != nil {
		return err
	}
	h.report.OK = h.ok()
	if a.json {
		err = a.printJSON(h.report)
	} else {
		h.print()
	}
	if err == nil && !h.report.OK {
		err = statusError(exitFailure)
	}
	return err
}

// hostInit is one run of 'agentlab init'.
type hostInit struct {
	app    *App
	flags  *initFlags
	kit    *hostsetup.Kit
	report initReport
}

// proxmoxNode tells whether this machine is a node of Proxmox VE.
func proxmoxNode() bool {
	st, err := os.Stat("/etc/pve")
	return err == nil && st.IsDir()
}

// wholeMachine tells whether the installation that serves everybody is meant.
func (h *hostInit) wholeMachine() (bool, error) {
	own := os.Getenv("AGENTLAB_HOME") != "" || h.app.socket != ""
	switch {
	case h.flags.system && own:
		return false, usageErrorf("--system is the installation of the whole machine, which AGENTLAB_HOME and --socket are not")
	case h.flags.system && os.Geteuid() != 0:
		return false, agentlab.Errorf(agentlab.CodeDenied, "the installation of the whole machine is root's to look at").WithHint("run it with sudo")
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
			return agentlab.Errorf(agentlab.CodeUnsupported, "there is nothing to apply: the daemon of your own needs no set-up").
				WithHint("for the whole machine: sudo agentlab init --system --apply")
		}
		if h.flags.tailscale {
			return agentlab.Errorf(agentlab.CodeUnsupported, "--tailscale is for the installation of the whole machine").WithHint("sudo agentlab init --system --tailscale")
		}
		return h.daemon(ctx, false)
	}
	installed, err := h.script(ctx, "installation", "install_host.sh")
	if err != nil {
		return err
	}
	checks, answered := h.ask(ctx)
	if answered && checks.Bridge || !answered && proxmoxNode() {
		if err := h.bridge(ctx, !answered || !templatesRight(checks)); err != nil {
			return err
		}
	}
	if !installed && !answered {
		h.report.add(initCheck{Name: "daemon", Level: levelError, Detail: "it is not installed, so the backend was not looked at", Remedy: "agentlab init --apply"})
		return nil
	}
	return h.daemon(ctx, true)
}

// bridge looks at what hosts with a bridge need, in the order in which it is
// made: rules are in force before anything can be on the bridge.
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

// templatesRight tells whether the backend has templates and nothing to say
// against them: they need not be those that the script makes.
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

// script asks one script what is missing, and with --apply has it done. It
// tells whether nothing is missing now.
func (h *hostInit) script(ctx context.Context, name, script string, args ...string) (bool, error) {
	dry, err := h.kit.Run(ctx, nil, nil, script, args...)
	if err != nil {
		return false, err
	}
	c := initCheck{Name: name, Level: levelOK, Detail: "as it should be", Commands: dry.Commands()}
	failed := func(r hostsetup.Result) (bool, error) {
		c.Level = levelError
		c.Detail, c.Remedy = r.Complaint()
		h.report.add(c)
		return false, nil
	}
	switch {
	case dry.Code != 0:
		return failed(dry)
	case len(c.Commands) == 0:
		h.report.add(c)
		return true, nil
	case !h.flags.apply:
		c.Level, c.Detail, c.Remedy = levelError, fmt.Sprintf("missing, %d commands", len(c.Commands)), "agentlab init --apply"
		h.report.add(c)
		return false, nil
	}
	h.app.progressf("%s: %d commands are missing; %s --apply runs them", name, len(c.Commands), script)
	done, err := h.kit.Run(ctx, h.app.Stderr, nil, script, append(args, "--apply")...)
	if err != nil {
		return false, err
	}
	if done.Code != 0 {
		return failed(done)
	}
	// What was to be done may have shown that more is.
	if dry, err = h.kit.Run(ctx, nil, nil, script, args...); err != nil {
		return false, err
	}
	if dry.Code != 0 {
		return failed(dry)
	}
	if left := dry.Commands(); len(left) > 0 {
		c.Level, c.Detail, c.Remedy = levelError, "still missing after it was set up: "+left[0], "agentlab init --apply"
		h.report.add(c)
		return false, nil
	}
	c.Detail = "set up now"
	h.report.add(c)
	return true, nil
}

// socket is that of the daemon that is meant.
func (h *hostInit) socket() (string, error) {
	if !h.report.System {
		return h.app.socketPath()
	}
	p, err := config.ResolvePaths(func(string) string { return "" }, true)
	if err != nil {
		return "", err
	}
	return p.Socket(), p.CheckRun()
}

// ask asks a daemon that runs already.
func (h *hostInit) ask(ctx context.Context) (api.HostChecks, bool) {
	socket, err := h.socket()
	if err != nil || ping(ctx, socket) != nil {
		return api.HostChecks{}, false
	}
	checks, err := client.New(socket).HostChecks(ctx)
	return checks, err == nil
}

// daemon adds what the daemon finds, and makes the smoke test when that was
// asked for. The user's own daemon is started when none answers.
func (h *hostInit) daemon(ctx context.Context, system bool) error {
	socket, err := h.socket()
	if err == nil && system {
		err = ping(ctx, socket)
	} else if err == nil {
		_, err = h.app.connect(ctx)
	}
	if err != nil {
		c := initCheck{Name: "daemon", Level: levelError, Detail: err.Error(), Remedy: agentlab.HintOf(err)}
		if system {
			c.Remedy = "systemctl restart agentlabd; journalctl -u agentlabd -n 20"
		}
		h.report.add(c)
		return ctx.Err()
	}
	h.report.add(initCheck{Name: "daemon", Level: levelOK, Detail: "it answers at " + socket})
	checks, err := client.New(socket).HostChecks(ctx)
	if err != nil {
		h.report.add(initCheck{Name: "backend", Level: levelError, Detail: err.Error(), Remedy: agentlab.HintOf(err)})
		return ctx.Err()
	}
	h.report.Backend = checks.Backend
	for _, f := range checks.Checks {
		h.report.add(initCheck{Name: f.Name, Level: f.Level, Detail: f.Detail, Remedy: f.Remedy})
	}
	if !h.flags.smoke {
		return nil
	}
	if !h.ok() {
		h.app.progressf("the smoke test is left out: first what is missing")
		return nil
	}
	return h.smokeTest(ctx, socket)
}

// smokeTest runs net/smoke_test.sh with this very program.
func (h *hostInit) smokeTest(ctx context.Context, socket string) error {
	args := []string{"--tabs"}
	if h.flags.profile != "" {
		args = append(args, "--profile", h.flags.profile)
	}
	if h.flags.site != "" {
		args = append(args, "--site", h.flags.site)
	}
	h.app.progressf("smoke test: a sandbox is made for it")
	if strings.ContainsAny(socket, " \t\n") {
		return usageErrorf("the smoke test cannot use a socket with blanks in its path: %q", socket)
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
		return agentlab.Errorf(agentlab.CodeInternal, "the smoke test said nothing: %s", what).WithHint("%s", remedy)
	}
	return nil
}

// ok tells whether nothing is wrong.
func (h *hostInit) ok() bool {
	for _, c := range h.report.Checks {
		if c.Level == levelError {
			return false
		}
	}
	for _, s := range h.report.Smoke {
		if s.Result == "fail" {
			return false
		}
	}
	return true
}

func (h *hostInit) print() {
	w := h.app.Stdout
	count := map[string]int{}
	for _, c := range h.report.Checks {
		count[c.Level]++
		fmt.Fprintf(w, "%-5s  %-14s %s\n", c.Level, plain(c.Name), plain(c.Detail))
		if c.Level == levelError && !h.flags.apply {
			for _, cmd := range c.Commands {
				fmt.Fprintf(w, "         + %s\n", plain(cmd))
			}
		}
		if c.Remedy != "" {
			fmt.Fprintf(w, "         → %s\n", plain(c.Remedy))
		}
	}
	for _, s := range h.report.Smoke {
		count[s.Result]++
		fmt.Fprintf(w, "%-5s  %-14s %s\n", plain(s.Result), plain(s.Check), plain(s.Detail))
	}
	fmt.Fprintf(w, "%d ok, %d to look at, %d missing", count[levelOK], count[levelWarn], count[levelError])
	if len(h.report.Smoke) > 0 {
		fmt.Fprintf(w, "; smoke test: %d passed, %d failed, %d skipped", count["pass"], count["fail"], count["skip"])
	}
	fmt.Fprintln(w)
}
