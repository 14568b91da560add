package daemon

import (
	"context"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/server"
)

// jobView is the job service as the control API sees it. It refuses: no job
// service is wired yet.
type jobView struct{}

var errNoJobs = agentlab.Errorf(agentlab.CodeUnsupported, "this build runs no jobs")

func (jobView) Create(context.Context, server.JobRequest) (agentlab.Job, error) {
	return agentlab.Job{}, errNoJobs
}

func (jobView) Get(context.Context, string) (agentlab.Job, error) { return agentlab.Job{}, errNoJobs }

func (jobView) List(context.Context, server.JobFilter) ([]agentlab.Job, error) { return nil, errNoJobs }

func (jobView) Cancel(context.Context, string) (agentlab.Job, error) {
	return agentlab.Job{}, errNoJobs
}
