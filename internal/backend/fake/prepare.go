package fake

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// SetSetup sets the commands under setup of all repositories, in the language of
// tasks.
func (h *Host) SetSetup(lines string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.setup = lines
}

// A job with Prepare leaves a file with the commit that it checked out.
const (
	preparedFile = "/repo/prepared"
	fakeCommit   = "0123456789abcdef0123456789abcdef01234567"
)

// clone fetches the repository, or finds the prepared one.
func (r *runner) clone(j *guestapi.Job) error {
	if j.Reuse {
		found := ""
		r.g.in.files(func(disk map[string]string) { found = disk[preparedFile] })
		if found == "" {
			return errors.New("there is no prepared checkout")
		}
		return nil
	}
	if j.Prepared != "" {
		found := ""
		r.g.in.files(func(disk map[string]string) { found = disk[preparedFile] })
		if found != j.Prepared {
			return fmt.Errorf("the prepared commit is %q, not %q", found, j.Prepared)
		}
		return nil
	}
	if !j.Bundled {
		return nil
	}
	_, err := r.repo()
	return err
}

// script returns the lines that a job runs: those under setup of the repository,
// unless they have run, and those of its task.
func (r *runner) script(j *guestapi.Job) (lines []string) {
	if j.Salvage { // what is on the disk
		r.g.in.files(func(disk map[string]string) {
			for _, name := range slices.Sorted(maps.Keys(disk)) {
				if work, ok := strings.CutPrefix(name, "/repo/"); ok {
					lines = append(lines, "artifact "+work+" "+disk[name])
				}
			}
		})
		return lines
	}
	if (j.RepoURL != "" || j.Bundled) && !j.NoSetup && j.Prepared == "" && !j.Reuse {
		r.g.in.h.mu.Lock()
		lines = strings.Split(r.g.in.h.setup, "\n")
		r.g.in.h.mu.Unlock()
	}
	if !j.Prepare {
		lines = append(lines, strings.Split(j.Task, "\n")...)
	}
	return lines
}

// write writes a file in the checkout: its name and its text.
func (r *runner) write(args string) {
	name, text, _ := strings.Cut(args, " ")
	r.g.in.files(func(disk map[string]string) { disk["/repo/"+name] = text })
}

// workPhase is the phase in which the script of a job runs.
func workPhase(j *guestapi.Job) string {
	switch {
	case j.Prepare:
		return "setup"
	case j.Salvage:
		return "collect"
	}
	return "agent"
}

// leavePrepared ends a job with Prepare.
func (r *runner) leavePrepared() guestapi.Result {
	dirty := false
	r.g.in.files(func(disk map[string]string) {
		for name := range disk {
			dirty = dirty || strings.HasPrefix(name, "/repo/") && name != preparedFile
		}
		disk[preparedFile] = fakeCommit
	})
	return guestapi.Result{BaseCommit: fakeCommit, Dirty: dirty}
}

func (s *runnerRecord) env(name string) string {
	if s == nil {
		return ""
	}
	return name + "=" + s.Boot.Env[name]
}
