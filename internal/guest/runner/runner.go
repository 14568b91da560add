package runner

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guest/agentcmd"
	"github.com/agentlab-vm/agentlab/internal/guest/slice"
	"github.com/agentlab-vm/agentlab/internal/projectfile"
	"github.com/agentlab-vm/agentlab/internal/redact"
	"github.com/agentlab-vm/agentlab/internal/version"
)

// Runner runs the job of one sandbox.
type Runner struct {
	cfg Config
	dir dir
	log *slog.Logger

	api         *api
	resp        guestapi.BootstrapResponse
	job         *guestapi.Job // nil: a sandbox without a job
	boot        boot
	secrets     []string
	red         func() *redact.Redactor // of secrets; made when it is needed first; nil before the bootstrap
	git         *git
	control     *control
	storeFailed bool // the external artifact store did not accept a copy
	closers     []io.Closer

	killsMu sync.Mutex
	kills   int // that are in the log
}

// New returns a Runner.
func New(cfg Config) (*Runner, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	return &Runner{cfg: cfg, dir: dir(cfg.RunDir), log: cfg.Logger}, nil
}

// Run does the job, or the rest that an earlier run left. It returns nil when
// nothing is left to do in this boot: the final report was accepted, or the
// controller does not know this sandbox. After an error, Run may be called again
// by a new process, and continues.
func (r *Runner) Run(ctx context.Context) error {
	defer r.close()
	if err := r.dir.open(); err != nil {
		return err
	}
	if r.dir.has(fileFinal) && !r.dir.has(fileResponse) {
		return r.dir.wipe() // an earlier run was killed during the wipe
	}
	fresh, err := r.bootstrap(ctx)
	if denied(err) {
		r.log.Error("the controller rejects the bootstrap token: it was already used, has expired, or is not for this sandbox")
		return nil
	}
	if err != nil {
		return err
	}
	if err := r.stage(); err != nil {
		return fmt.Errorf("secrets cannot be staged: %w", err)
	}
	r.cfg.Staged()
	if r.job == nil {
		if err := r.prepareWorkspace(); err != nil {
			r.log.Error("package managers have no caches on the workspace", "err", err)
		}
		if err := r.trust(ctx); err != nil {
			return err
		}
		r.useCache(ctx)
		r.log.Info("there is no job; secrets are staged")
		return nil
	}
	return r.runJob(ctx, fresh)
}

// redactor returns nil, which redacts nothing, before the bootstrap.
func (r *Runner) redactor() *redact.Redactor {
	if r.red == nil {
		return nil
	}
	return r.red()
}

func (r *Runner) close() {
	for _, c := range r.closers {
		_ = c.Close()
	}
	if r.api != nil {
		r.api.http.CloseIdleConnections()
	}
}

func (r *Runner) runJob(ctx context.Context, fresh bool) error {
	if !r.dir.has(fileKills) {
		if err := r.dir.save(fileKills, slice.ReadKills(r.cfg.Cgroups)); err != nil {
			return err
		}
	}
	r.control = newControl(r, r.boot.Deadline)
	var stop stopRequest
	if ok, err := r.dir.load(fileStop, &stop); err != nil {
		return err
	} else if ok {
		r.control.requestStop(stop)
	}
	ship := &shipper{r: r, offset: -1}
	if fresh {
		ship.offset = 0
	}
	background, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { r.control.run(background) })
	shipping, unship := context.WithCancel(ctx)
	var shipped sync.WaitGroup
	shipped.Go(func() { ship.run(shipping) })
	defer func() {
		unship()
		cancel()
		shipped.Wait()
		wg.Wait()
	}()
	out, rp, err := r.work(ctx)
	if err != nil {
		return err
	}
	if r.control.abandoned() {
		return r.finishSandbox(rp, false)
	}
	final, err := r.finish(ctx, out, rp, func() error {
		unship()
		shipped.Wait()
		return ship.finish(ctx)
	})
	if err != nil {
		return err
	}
	cancel()
	wg.Wait() // no report may follow the final one
	return r.reportFinal(ctx, final, rp)
}

// work clones and runs the agent. It returns an error only if another run may
// succeed; a failed job has an outcome.
func (r *Runner) work(ctx context.Context) (out outcome, rp repo, err error) {
	if _, err := r.dir.load(fileRepo, &rp); err != nil {
		return out, rp, err
	}
	if ok, err := r.dir.load(fileOutcome, &out); ok || err != nil {
		return out, rp, err
	}
	if r.git, err = newGit(r.dir, r.job, r.resp.Git); err != nil {
		out = outcome{Status: "FAILED", Phase: "clone", Message: err.Error()}
	} else if out, err = r.cloneAndRun(ctx, &rp); err != nil {
		return out, rp, err
	}
	if out.Ended.IsZero() {
		out.Ended = time.Now().UTC()
	}
	return out, rp, r.dir.save(fileOutcome, out)
}

func (r *Runner) cloneAndRun(ctx context.Context, rp *repo) (outcome, error) {
	if rp.Path == "" {
		if out, err := r.clone(ctx, rp); err != nil || out.Status != "" {
			return out, err
		}
	}
	if r.job.Salvage {
		return outcome{Status: "COMPLETED", Phase: "collect"}, nil
	}
	if out, err := r.startContainer(ctx, *rp); err != nil || out.Status != "" {
		return out, err
	}
	if out, err := r.setUp(ctx, *rp); err != nil || out.Status != "" {
		return out, err
	}
	if out, err := r.startServices(ctx, *rp); err != nil || out.Status != "" {
		return out, err
	}
	if r.job.Agent == agentlab.AgentNone && !r.job.Prepare {
		return outcome{Status: "COMPLETED", Phase: "clone"}, nil
	}
	if err := r.dropCredential(*rp); err != nil {
		return outcome{}, err
	}
	if r.job.Prepare {
		if err := leaveCheckout(*rp); err != nil {
			return r.failed("setup", err), nil
		}
		return outcome{Status: "COMPLETED", Phase: "setup"}, nil
	}
	defer r.startCheckpoints(ctx, *rp)()
	r.control.phase("agent")
	out, err := r.runAgent(ctx, *rp)
	if err != nil && ctx.Err() == nil {
		return r.failed("agent", err), nil
	}
	if err != nil || out.Status != "COMPLETED" || r.job.Judge == "" {
		return out, err
	}
	return r.judge(ctx, *rp, out)
}

// failed is the outcome of a job that failed in a phase.
func (r *Runner) failed(phase string, err error) outcome {
	r.logf("%v", err)
	return outcome{Status: "FAILED", Phase: phase, Message: err.Error()}
}

// clone makes the checkout, and stores what is known about it. With an outcome the
// work is over.
func (r *Runner) clone(ctx context.Context, rp *repo) (outcome, error) {
	if err := errors.Join(r.prepareWorkspace(), r.trust(ctx)); ctx.Err() != nil {
		return outcome{}, ctx.Err()
	} else if err != nil {
		return r.failed("clone", err), nil
	}
	r.useCache(ctx)
	if !r.job.Salvage && (r.job.RepoURL != "" || r.job.Bundled) {
		r.control.phase("clone")
	}
	r.git.progress = r.control.progress
	got, err := r.stoppableCheckout(ctx)
	r.git.progress = nil
	if ctx.Err() != nil {
		return outcome{}, ctx.Err()
	}
	if stop := r.control.stopRequest(); stop.Status != "" {
		return stopOutcome(outcome{Phase: "clone"}, stop), nil
	}
	if err != nil {
		return r.failed("clone", err), nil
	}
	if r.job.Salvage {
		*rp = got
		return outcome{}, r.dir.save(fileRepo, got)
	}
	p, err := r.checkProject(got)
	if err == nil {
		err = r.checkImage(p.Image)
	}
	if err == nil {
		err = r.narrowNetwork(ctx, p.Network)
	}
	if ctx.Err() != nil {
		return outcome{}, ctx.Err()
	}
	if err != nil {
		return r.failed("clone", err), nil
	}
	if !r.job.NoSetup && r.job.Prepared == "" && !r.job.Reuse {
		got.Setup = p.Setup.Run
	}
	if !r.job.NoSetup {
		got.Services = p.Services
	}
	if err := leaveCheckout(got); err != nil {
		return r.failed("clone", err), nil
	}
	r.notePath(got)
	*rp = got
	return outcome{}, r.dir.save(fileRepo, got)
}

// stoppableCheckout is checkout, which a stop interrupts.
func (r *Runner) stoppableCheckout(ctx context.Context) (repo, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan struct{})
	defer close(done)
	go func() {
		select {
		case <-r.control.stopped:
			cancel()
		case <-done:
		}
	}()
	return r.checkout(ctx)
}

// checkProject reads the project file before the agent starts: so that an
// error in it is reported before the agent's work.
func (r *Runner) checkProject(rp repo) (projectfile.File, error) {
	if rp.None {
		return projectfile.File{}, nil
	}
	root, err := os.OpenRoot(rp.Path)
	if err != nil {
		return projectfile.File{}, err
	}
	defer func() { _ = root.Close() }()
	return readProject(root)
}

// checkImage returns an error if the repository names another image than that of the
// sandbox, which the user did not choose for the job. The controller cannot know the
// name before the repository is cloned.
func (r *Runner) checkImage(want string) error {
	if have := r.job.Image; want != "" && have != "" && want != have && !r.job.ImageChosen {
		return fmt.Errorf("%s asks for the image %s, and this sandbox has %s: add --image %[2]s, or --image %[3]s to run it nevertheless", projectFile, want, have)
	}
	return nil
}

// finish collects and uploads, and returns the final report.
func (r *Runner) finish(ctx context.Context, out outcome, rp repo, flushLog func() error) (guestapi.Report, error) {
	var final guestapi.Report
	if ok, err := r.dir.load(fileFinal, &final); ok || err != nil {
		return final, err
	}
	tmp, err := os.MkdirTemp(r.cfg.TmpDir, tmpResult)
	if err != nil {
		return final, err
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	if r.git == nil {
		if r.git, err = newGit(r.dir, r.job, r.resp.Git); err != nil {
			return final, err
		}
	}
	r.control.phase("collect")
	var c *collected
	if r.job.Prepare { // the changes are those of setup, for the jobs in the copies
		c = &collected{Result: guestapi.Result{BaseCommit: rp.Base}}
		c.Result.Dirty = out.Status != "COMPLETED" || r.isDirty(ctx, rp, tmp)
	} else {
		err := r.reclaim(ctx, rp)
		if c = r.collect(ctx, rp, tmp); err != nil {
			c.warn("files that the user of the dev container has made may be missing: %v", err)
		}
	}
	if out.Status != "CANCELLED" {
		r.push(ctx, rp, tmp, c)
	}
	if ctx.Err() != nil {
		return final, ctx.Err()
	}
	if c.Lost && r.job.Salvage && out.Status == "COMPLETED" {
		out.Status, out.Phase = "FAILED", "collect"
	}
	r.control.phase("upload")
	for _, w := range c.Warnings {
		r.logf("%s", w)
	}
	if err := flushLog(); err != nil && !denied(err) {
		c.warn("the end of the log could not be sent: %v", err)
	}
	r.addLog(c)
	uploadErr := r.uploadAll(ctx, c)
	if uploadErr != nil && out.Status == "COMPLETED" {
		out.Status, out.Phase, out.Message = "FAILED", "upload", uploadErr.Error()
	}
	if ctx.Err() != nil {
		return final, ctx.Err()
	}
	if uploadErr != nil || !r.stored(rp, c) {
		if err := r.dir.save(fileUnsent, true); err != nil {
			return final, err
		}
	}
	final = r.finalReport(out, c)
	r.uploadReport(ctx, r.jobReport(final, out), c)
	return final, r.dir.save(fileFinal, final)
}

// stored reports whether the controller has the work in the repository, or without one
// all outputs.
func (r *Runner) stored(rp repo, c *collected) bool {
	switch result := agentlab.JobResult(c.Result); {
	case !r.uploads():
		return true
	case rp.None:
		return !slices.ContainsFunc(c.Files, func(u upload) bool { return u.Size < 0 })
	case !result.HasWork():
		return result.Known()
	}
	return slices.ContainsFunc(c.Files, func(u upload) bool { return u.Path == artBundle && u.Size >= 0 })
}

// addLog adds the log directly after the work itself.
func (r *Runner) addLog(c *collected) {
	st, err := os.Stat(r.dir.path(fileLog))
	if err != nil || st.Size() == 0 {
		return
	}
	log := upload{Path: artLog, file: r.dir.path(fileLog)}
	n := 0
	for n < len(c.Files) && c.Files[n].vital {
		n++
	}
	c.Files = append(c.Files[:n:n], append([]upload{log}, c.Files[n:]...)...)
}

const maxMessage = 900 // bytes

func (r *Runner) finalReport(out outcome, c *collected) guestapi.Report {
	msg := out.Message
	if len(c.Warnings) > 0 {
		if msg != "" {
			msg += "; "
		}
		msg += strings.Join(c.Warnings, "; ")
	}
	msg = agentlab.Cut(r.redactor().String(msg), maxMessage)
	result := c.Result
	result.JudgeExit, result.Score = out.Judge.Exit, out.Judge.Score
	return guestapi.Report{Status: out.Status, Phase: "done", Message: msg, ExitCode: out.ExitCode, Result: &result, Kills: r.noteKills(), KeyRejected: out.KeyRejected}
}

func (r *Runner) jobReport(final guestapi.Report, out outcome) jobReport {
	var logBytes int64
	if st, err := os.Stat(r.dir.path(fileLog)); err == nil {
		logBytes = st.Size()
	}
	return jobReport{
		JobID: r.job.ID, Agent: r.job.Agent, Status: final.Status, Phase: out.Phase, Message: final.Message, ExitCode: final.ExitCode,
		StartedAt: r.boot.Began, AgentEnded: out.Ended, RepoURL: r.job.RepoURL, Ref: r.job.Ref, LogBytes: logBytes,
		RunnerBuild: version.String(), Artifacts: []reportFile{},
	}
}

// reportFinal sends the final report and then removes secrets and checkout.
func (r *Runner) reportFinal(ctx context.Context, final guestapi.Report, rp repo) error {
	err := r.api.retry(ctx, 0, func() error {
		return r.api.call(ctx, callTimeout, http.MethodPost, guestapi.PathReport, final, nil)
	})
	if err != nil && !denied(err) && transient(err) {
		return err
	}
	if err != nil {
		r.log.Error("the controller does not accept the final report", "err", r.redactor().String(err.Error()))
	}
	r.log.Info("the job has ended", "status", final.Status)
	return r.finishSandbox(rp, err == nil && !r.dir.has(fileUnsent))
}

// finishSandbox deletes secrets, and the checkout if its work is stored and the sandbox
// is not kept: otherwise the controller may keep the disk for the work. A sandbox that
// was only prepared is handed over instead.
func (r *Runner) finishSandbox(rp repo, stored bool) error {
	if rp.Path != "" {
		r.sweepTmp(rp.Path)
	}
	if r.job.Agent == agentlab.AgentNone && !r.job.Prepare {
		return r.publishSecrets(rp)
	}
	if rp.Path != "" && rp.Made && stored && !r.job.Keepalive && !r.job.Prepare {
		if err := os.RemoveAll(rp.Path); err != nil { // files of root stay; the VM is deleted anyway
			r.log.Warn("the checkout is not removed whole", "err", err)
		}
	}
	return Wipe(r.cfg.RunDir, r.cfg.Home)
}

// publishSecrets leaves the sandbox as one that never had a job: its secrets are
// staged for its users, and the runner's own token is deleted. From the first
// step on, a runner that starts again finds no job.
func (r *Runner) publishSecrets(rp repo) error {
	resp := r.resp
	resp.Job, resp.Artifact, resp.Runner = nil, nil, guestapi.RunnerTarget{}
	errs := []error{r.dir.save(fileResponse, resp)}
	for _, name := range []string{fileRepo, fileStop, fileOutcome, fileUnsent, fileFinal, fileLog, fileWorkdirLock} {
		if err := os.Remove(r.dir.path(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	for i := range rp.Setup {
		errs = append(errs, os.RemoveAll(r.dir.path(fmt.Sprintf(dirSetup, i))))
	}
	for _, name := range []string{dirServices, dirContainer, fileContainer} {
		errs = append(errs, os.RemoveAll(r.dir.path(name)))
	}
	return errors.Join(errs...)
}

// Wipe removes all secrets of a sandbox: the content of the run directory and
// the links to it in home.
func Wipe(runDir, home string) error {
	return errors.Join(agentcmd.Unprepare(home, runDir), dir(runDir).wipe())
}
