package runner

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"slices"
	"strconv"

	"github.com/agentlab-vm/agentlab/internal/guest/agentcmd"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// judgement is what the command that judges an attempt found.
type judgement struct {
	Exit  *int     // exit code; nil if the command did not run to its end
	Score *float64 // number on the last line of output; nil if there is none
}

const (
	dirJudge  = "judge"           // of the supervisor, in the run directory
	fileScore = "judge-from.json" // where its output begins in the log

	// judgeLog is the space in the log that the agent cannot use.
	judgeLog = 1 << 20
)

// judge runs the job's judge in the checkout, after the agent completed. Its
// environment has no secrets. Its exit code is no failure of the job.
func (r *Runner) judge(ctx context.Context, rp repo, out outcome) (outcome, error) {
	r.control.phase("judge")
	from, err := r.judgeFrom()
	if err != nil {
		return out, err
	}
	p := &program{
		r: r, name: "the judge", dir: dir(r.dir.path(dirJudge)), agent: "shell", task: r.job.Judge,
		env: r.programEnv(rp, r.toolVars()), logBytes: maxAgentLog + judgeLog,
	}
	if err := os.Mkdir(string(p.dir), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return out, err
	}
	end, err := p.run(ctx, rp, "judge")
	switch {
	case ctx.Err() != nil:
		return out, ctx.Err()
	case err != nil:
		r.logf("%v", err)
		out.Status, out.Phase, out.Message = "FAILED", "judge", err.Error()
	case end.Status == "CANCELLED" || end.Status == "TIMEOUT" || end.ExitCode == nil:
		out.Status, out.Phase, out.Message = end.Status, "judge", end.Message
	default:
		out.Judge.Exit = end.ExitCode
		if out.Judge.Score, err = r.readScore(from); err != nil {
			return out, err
		}
	}
	return out, nil
}

// judgeFrom returns where the output of the judge begins in the log. It is
// stored before the judge starts.
func (r *Runner) judgeFrom() (from int64, err error) {
	if ok, err := r.dir.load(fileScore, &from); ok || err != nil {
		return from, err
	}
	r.logf("judge: %.200q", r.job.Judge)
	st, err := os.Stat(r.dir.path(fileLog))
	if err != nil {
		return 0, err
	}
	return st.Size(), r.dir.save(fileScore, st.Size())
}

// maxScoreLine is how much of the end of the log is read. It is longer than a
// number that parseScore accepts.
const maxScoreLine = 256

// readScore returns the number on the last line of the log from an offset on,
// or nil.
func (r *Runner) readScore(from int64) (*float64, error) {
	f, err := os.Open(r.dir.path(fileLog))
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	at := max(from, st.Size()-maxScoreLine)
	tail := make([]byte, max(st.Size()-at, 0))
	if _, err := io.ReadFull(io.NewSectionReader(f, at, int64(len(tail))), tail); err != nil {
		return nil, fmt.Errorf("the log cannot be read: %w", err)
	}
	tail = bytes.TrimRight(tail, " \t\r\n")
	return parseScore(string(bytes.TrimSpace(tail[bytes.LastIndexByte(tail, '\n')+1:]))), nil
}

// maxScore is the maximum length of a number.
const maxScore = 200

var scoreRE = lazyre.New(`^[+-]?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?$`)

// parseScore returns a decimal number, or nil. NaN and infinity are no numbers.
func parseScore(s string) *float64 {
	if len(s) > maxScore || !scoreRE.MatchString(s) {
		return nil
	}
	v, err := strconv.ParseFloat(s, 64)
	if err != nil || math.IsInf(v, 0) || math.IsNaN(v) {
		return nil
	}
	return &v
}

// dropCredential deletes the Git credential of a job that is not pushed, before
// its agent starts. Nothing after the clone and setup needs it. (An agent that is
// root in its sandbox may still find it in memory.)
func (r *Runner) dropCredential(rp repo) error {
	if !r.job.NoPush || r.resp.Git == nil {
		return nil
	}
	var errs []error
	for i := range rp.Setup { // the plans have the secrets, to redact them
		errs = append(errs, os.Remove(dir(r.dir.path(fmt.Sprintf(dirSetup, i))).path(agentcmd.PlanFile)))
	}
	for _, name := range []string{dirServices, dirContainer} {
		errs = append(errs, os.Remove(dir(r.dir.path(name)).path(agentcmd.PlanFile)))
	}
	for _, name := range []string{fileGitCred, fileSSHKey} {
		errs = append(errs, os.Remove(r.dir.path(name)))
	}
	for _, err := range errs {
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	resp := r.resp
	resp.Git = nil
	if err := r.dir.save(fileResponse, resp); err != nil {
		return err
	}
	git := r.resp.Git
	r.resp = resp
	r.secrets = slices.DeleteFunc(r.secrets, func(s string) bool { return s == git.Token || s == git.SSHPrivateKey })
	return nil
}
