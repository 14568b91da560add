package runner

import (
	"encoding/json"
	"errors"
	"fmt"
)

// preparedFact describes a checkout that a job with Prepare left for jobs in
// copies of its sandbox. It is in the .git directory, because everything in the
// run directory is deleted.
const (
	preparedFact    = "agentlab-prepared.json"
	maxPreparedFact = 4 << 20
)

// leavePrepared stores what the runner in a copy of this sandbox needs. The Git
// credential is already deleted: a copy may be made as soon as the controller has
// the final report.
func leavePrepared(rp repo) error {
	g, err := openGitDir(rp.Path)
	if err != nil {
		return err
	}
	defer g.close()
	text, err := json.Marshal(rp)
	if err != nil {
		return err
	}
	_ = g.root.Remove(preparedFact) // of the repository, or of a run that was killed here
	return g.root.WriteFile(preparedFact, text, 0o600)
}

// takePrepared returns the checkout that a job with Prepare left in the sandbox
// that this one continues. Commands of the repository ran in it, so it is
// checked: it must be at the commit that the job's controller knows.
func (r *Runner) takePrepared(want repo) (repo, error) {
	bad := func(format string, args ...any) (repo, error) {
		return want, fmt.Errorf("the prepared checkout %s cannot be used: %w", want.Path, fmt.Errorf(format, args...))
	}
	g, err := openGitDir(want.Path)
	if err != nil {
		return bad("%w", err)
	}
	defer g.close()
	p, err := readSmall(g.root, preparedFact, maxPreparedFact)
	if err != nil {
		return bad("%w", err)
	}
	var got repo
	if err := json.Unmarshal(p, &got); err != nil {
		return bad("%s is damaged: %w", preparedFact, err)
	}
	branch, head, err := g.head()
	if err != nil {
		return bad("%w", err)
	}
	switch {
	case got.Path != want.Path || got.Branch != want.Branch || got.None || got.Lender != "":
		return bad("it belongs to another job")
	case got.Base != r.job.Prepared || head != r.job.Prepared:
		return bad("it is not at commit %.12s", r.job.Prepared)
	case branch != want.Branch:
		return bad("its branch is not %s", want.Branch)
	}
	heads, err := g.heads()
	if err != nil {
		return bad("%w", err)
	}
	for name, commit := range got.Heads {
		if heads[name] != commit {
			return bad("its branch %.80s has moved", name)
		}
	}
	got.Setup, got.Made = nil, true // the commands have run
	return got, nil
}

// errNotPrepared is the error of a job with Prepare and without a repository.
var errNotPrepared = errors.New("there is no repository to prepare")
