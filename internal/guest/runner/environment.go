package runner

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/guest/agentcmd"
	"github.com/agentlab-vm/agentlab/internal/guest/devenv"
)

// Files about the environment of the repository, in the run directory.
const (
	dirServices   = "services"       // of the supervisor
	dirContainer  = "devcontainer"   // of the supervisor
	fileContainer = "container.json" // agentcmd.Environment
	fileReason    = "reason"         // why a program failed, in the directory of its supervisor
	maxReason     = 2 << 10
)

// startContainer starts the dev container of the checkout, in which all further programs
// of the job run. It returns an outcome with a status only if the job ends here.
func (r *Runner) startContainer(ctx context.Context, rp repo) (outcome, error) {
	mode := cmp.Or(r.job.Devcontainer, agentlab.DevcontainerAuto)
	if rp.None || mode == agentlab.DevcontainerOff || mode == agentlab.DevcontainerAuto && devenv.ConfigHash(rp.Path) == "" {
		return outcome{}, nil
	}
	mounts := []string{devenv.RunDir, rp.Path}
	if r.onWorkspace(rp.Path) {
		mounts[1] = r.cfg.Workspace
	}
	args := []string{"devcontainer", "--dir", rp.Path, "--mode", mode, "--mounts", strings.Join(mounts, ":"), "--state", r.dir.path(fileContainer)}
	if r.job.Inner != nil {
		args = append(args, "--refuse", "the profile asks for behavior.inner_sandbox, which a dev container does not have")
	}
	out, err := r.runEnvironment(ctx, rp, "dev container", dirContainer, args...)
	if err != nil || out.Status != "" {
		return out, err
	}
	var e agentcmd.Environment
	if _, err := r.dir.load(fileContainer, &e); err != nil {
		return r.failed("setup", err), nil
	}
	if e.Notice != "" {
		r.logf("%s", agentlab.OneLine(e.Notice, maxReason))
	}
	return outcome{}, nil
}

// reclaim makes what agents in a dev container have written in the checkout accessible.
func (r *Runner) reclaim(ctx context.Context, rp repo) error {
	var e agentcmd.Environment
	if ok, err := r.dir.load(fileContainer, &e); !ok || err != nil {
		return err
	}
	return e.Container.Reclaim(ctx, rp.Path)
}

// startServices starts the services of the checkout and waits until they are healthy. It
// returns an outcome with a status only if the job ends here.
func (r *Runner) startServices(ctx context.Context, rp repo) (outcome, error) {
	if rp.Services == "" {
		return outcome{}, nil
	}
	name := fmt.Sprintf("services %q", rp.Services)
	if r.job.Inner != nil { // containers of the repository could act as the runner
		return r.failed("setup", errors.New(name+": the profile asks for behavior.inner_sandbox, which services do not have: use another profile, or --no-setup")), nil
	}
	return r.runEnvironment(ctx, rp, name, dirServices, "services", "--dir", rp.Path, "--file", rp.Services)
}

// runEnvironment runs a command of agentlab-agent in the VM, like a command of setup.
func (r *Runner) runEnvironment(ctx context.Context, rp repo, name, at string, args ...string) (outcome, error) {
	r.control.phase("setup")
	p := &program{r: r, name: name, dir: dir(r.dir.path(at)), agent: "shell", env: r.programEnv(rp, r.toolVars()), logBytes: maxSetupLog, limit: r.setupLimit(), vm: true}
	p.overtime = name + " was stopped: half of the job's time is over"
	words := []string{"exec", "-a", "agentlab-agent", agentcmd.ShellQuote(r.cfg.Exe)}
	for _, arg := range append(args, "--reason", p.dir.path(fileReason)) {
		words = append(words, agentcmd.ShellQuote(arg))
	}
	p.task = strings.Join(words, " ")
	if err := os.Mkdir(string(p.dir), 0o700); err == nil {
		r.logf("%s", name)
	} else if !errors.Is(err, fs.ErrExist) {
		return outcome{}, err
	}
	out, err := p.run(ctx, rp, "setup")
	switch {
	case ctx.Err() != nil:
		return out, ctx.Err()
	case err != nil:
		return r.failed("setup", err), nil
	case out.Status == "COMPLETED":
		return outcome{}, nil
	case out.ExitCode != nil && out.Status == "FAILED":
		if why := p.reason(); why != "" {
			out.Message = name + ": " + why
		}
	}
	r.logf("%s", out.Message)
	return out, nil
}

// reason returns why the program failed, as it wrote it; "" if it did not.
func (p *program) reason() string {
	root, err := os.OpenRoot(string(p.dir))
	if err != nil {
		return ""
	}
	defer func() { _ = root.Close() }()
	text, err := readSmall(root, fileReason, maxReason)
	return cmp.Or(agentlab.OneLine(string(text), maxReason), errText(err))
}

func errText(err error) string {
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	return err.Error()
}
