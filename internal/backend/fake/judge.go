package fake

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// judge runs the job's judge: "exit N" and "number X" are its lines. A line of
// the task "judge LINE" replaces it, so that attempts differ.
func (r *runner) judge(ctx context.Context, j *guestapi.Job) (guestapi.Result, error) {
	command := j.Judge
	for line := range strings.Lines(j.Task) {
		if own, ok := strings.CutPrefix(strings.TrimSpace(line), "judge "); ok {
			command = own
		}
	}
	exit, out := 0, guestapi.Result{}
	for line := range strings.SplitSeq(command, ";") {
		word, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch word {
		case "exit":
			exit, _ = strconv.Atoi(rest)
		case "number":
			n, _ := strconv.ParseFloat(rest, 64)
			out.Score = &n
		case "hang":
			<-ctx.Done()
		case "sleep":
			d, _ := time.ParseDuration(rest)
			_ = sleep(ctx, d)
		}
	}
	if ctx.Err() == nil {
		out.JudgeExit = &exit
	}
	return out, r.ctx.Err()
}
