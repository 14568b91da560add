package pve

import (
	"slices"
	"strings"
	"sync"
)

// endedTasks are the last tasks that pvesh has waited for and that succeeded.
//
// pvesh runs the worker of a task in the foreground, and copies its log to the
// output. It prints an error for a task that failed, that was killed, and that has
// warnings, but not for one that succeeded (pve-common, RESTEnvironment.pm,
// tee_worker). So nothing printed as an error means success, and the node does not
// have to be asked for the result, which would start one more pvesh.
type endedTasks struct {
	mu  sync.Mutex
	all []endedTask // the oldest first
}

type endedTask struct {
	upid UPID
	log  []string
}

// maxEnded is how many tasks are remembered: many more than calls at once.
const maxEnded = 4 * maxWrites

// note remembers the task of a call that printed out, and nothing as an error. data is
// the last line of out, which is a UPID in quotes if the call has started a task.
func (e *endedTasks) note(data, out []byte) {
	upid, err := ParseUPID(strings.Trim(string(data), `"`))
	if err != nil {
		return
	}
	var log []string
	for line := range strings.Lines(string(out)) {
		if !isProgress(line) {
			log = append(log, strings.TrimRight(line, "\n"))
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.all = append(e.all, endedTask{upid, log[:len(log)-1]})
	if len(e.all) > maxEnded {
		e.all = slices.Delete(e.all, 0, 1)
	}
}

// Ended implements Transport.
func (s *shell) Ended(task UPID) (log []string, ok bool) {
	s.ended.mu.Lock()
	defer s.ended.mu.Unlock()
	if i := slices.IndexFunc(s.ended.all, func(t endedTask) bool { return t.upid == task }); i >= 0 {
		return s.ended.all[i].log, true
	}
	return nil, false
}
