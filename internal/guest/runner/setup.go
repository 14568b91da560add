package runner

import (
	"context"
	"fmt"
	"os"
	"time"
)

// dirSetup is the directory of the supervisor of a command of setup, in the
// run directory.
const dirSetup = "setup-%d"

// maxSetupLog is the size at which the log is closed for the commands of setup.
const maxSetupLog = maxAgentLog / 4

// setUp runs the commands that prepare the checkout, in their order, each to
// its end. It returns an outcome with a status only if the job ends here. The
// environment of the commands has no secrets.
//
// A command runs like an agent: it continues without the runner, which finds it
// again, and in the same nested sandbox. Together the commands may take half of
// the job's time.
func (r *Runner) setUp(ctx context.Context, rp repo) (outcome, error) {
	if len(rp.Setup) == 0 {
		return outcome{}, nil
	}
	r.control.phase("setup")
	limit := r.setupLimit()
	for i, command := range rp.Setup {
		out, err := r.runSetup(ctx, rp, i, command, limit)
		if err != nil || out.Status != "COMPLETED" {
			return out, err
		}
	}
	return outcome{}, nil
}

// setupLimit returns the uptime at which half of the job's time is over; 0 if it has no
// limit.
func (r *Runner) setupLimit() time.Duration {
	if r.boot.Deadline <= 0 {
		return 0
	}
	return r.boot.At + (r.boot.Deadline-r.boot.At)/2
}

func (r *Runner) runSetup(ctx context.Context, rp repo, i int, command string, limit time.Duration) (outcome, error) {
	name := fmt.Sprintf("setup[%d] %.60q", i, command)
	p := &program{
		overtime: fmt.Sprintf("%s was stopped: setup may take half of the job's time, %s", name, (limit - r.boot.At).Round(time.Second)),
		r:        r, name: name, dir: dir(r.dir.path(fmt.Sprintf(dirSetup, i))), agent: "shell", task: command,
		env: r.programEnv(rp, r.toolVars()), logBytes: maxSetupLog, limit: limit,
	}
	if _, err := os.Lstat(string(p.dir)); err != nil {
		if err := os.Mkdir(string(p.dir), 0o700); err != nil {
			return outcome{}, err
		}
		r.logf("%s", name)
	}
	out, err := p.run(ctx, rp, "setup")
	if ctx.Err() != nil {
		return out, ctx.Err()
	}
	if err != nil {
		out = outcome{Status: "FAILED", Phase: "setup", Message: err.Error()}
	}
	if out.Status != "COMPLETED" {
		r.logf("%s", out.Message)
	}
	return out, nil
}
