package runner

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
)

// What a lost VM left on its disk is collected and no agent runs, whatever became of
// the description of the checkout.
func TestSalvage(t *testing.T) {
	for name, c := range map[string]struct {
		change  string // in the checkout; $HOME is that of the agent
		status  string
		commits int // 0: not checked
		want    string
	}{
		"as the job left it":   {"true", "COMPLETED", 1, ""},
		"no description":       {"rm .git/agentlab-checkout.json", "COMPLETED", 4, "all commits are collected"},
		"garbage":              {"echo '{' > .git/agentlab-checkout.json", "COMPLETED", 4, "all commits are collected"},
		"a commit that is not": {`sed -i 's/"Base": *"[0-9a-f]*"/"Base":"` + strings.Repeat("1", 40) + `"/' .git/agentlab-checkout.json`, "COMPLETED", 4, "all commits are collected"},
		"a pipe":               {"rm .git/agentlab-checkout.json; mkfifo .git/agentlab-checkout.json", "COMPLETED", 4, "all commits are collected"},
		"another path in job":  {"mkdir ../other", "COMPLETED", 1, ""},
		"another note":         {"echo /dev/null > $HOME/.agentlab-checkout", "COMPLETED", 1, ""},
		"no note":              {"rm -f $HOME/.agentlab-checkout; mkfifo $HOME/.agentlab-checkout", "COMPLETED", 1, ""},
		"no repository":        {"rm -rf .git", "COMPLETED", 0, ""},
		"a damaged repository": {"rm -rf .git; echo gitdir: / > .git", "FAILED", 0, "the repository cannot be read"},
		"a damaged commit":     {`f=$(git rev-parse HEAD); chmod -R u+w .git; : > .git/objects/$(printf %.2s $f)/${f#??}`, "FAILED", 0, "the commits cannot be read"},
		"a file":               {`cd ..; rm -rf "$OLDPWD"; touch "$OLDPWD"`, "FAILED", 0, "is not a directory"},
		"nothing":              {`cd ..; rm -rf "$OLDPWD"`, "FAILED", 0, "there is no work on this disk"},
	} {
		t.Run(name, func(t *testing.T) {
			s, _ := prepared(t, "true")
			runShell(t, s.cfg.ClonePath, "echo new > n; git add n; git commit -qm work; echo more >> n; echo fresh > untracked")
			runShell(t, s.cfg.ClonePath, "export HOME="+s.cfg.Home+"; "+c.change)
			job := shellJob("touch ../ran")
			job.Salvage, job.NoPush, job.Branch, job.RepoURL = true, true, "agentlab/job-parent", "http://127.0.0.1:1/gone"
			if name == "another path in job" { // the profile has changed
				job.ClonePath = filepath.Join(filepath.Dir(s.cfg.ClonePath), "other")
			}
			next := newSandbox(t, guestapi.BootstrapResponse{Job: job}, artifact.Limits{})
			next.cfg.ClonePath, next.cfg.Home = s.cfg.ClonePath, s.cfg.Home
			rep := next.finish()
			if rep.Status != c.status || !strings.Contains(rep.Message+next.Log(), c.want) {
				t.Fatalf("%+v, log %q", rep, next.Log())
			}
			if r := rep.Result; c.commits > 0 && (r.Commits != c.commits || r.Uncommitted != 2 || r.Branch != "agentlab/job-parent") {
				t.Errorf("%+v", r)
			}
			files, err := next.Service.List(t.Context(), next.JobID)
			if err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, f := range files {
				names = append(names, f.Path)
			}
			if list := strings.Join(names, " "); c.commits > 0 && (!strings.Contains(list, artBundle) || !strings.Contains(list, artDiff)) || strings.Contains(list, "ran") {
				t.Errorf("artifacts: %s", list)
			}
		})
	}
}
