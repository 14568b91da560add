package job

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/version"
)

// A job whose repository has commands under setup uses the snapshot that an earlier job
// made after them, if it depends on the same. Otherwise another job, with Prepares,
// clones the repository and runs the commands, as for attempts (fork.go); its sandbox is
// saved, the job continues a copy of it, and the snapshot stays for later jobs. It was
// saved before any secret was delivered. Job.Fork says how far this is; whenever it
// cannot go on, it becomes "", and the job does everything itself.
//
// A snapshot is used by jobs of the branch whose job made it. Only that of a commit of
// the default branch is used by others, so no branch can change the environment of
// another one, or of the default branch.

// planSetup plans how a job without attempts uses the snapshots after setup. sb and prof
// are the sandbox and the profile that checkJob has returned.
func (s *Service) planSetup(ctx context.Context, p *planned, r agentlab.JobRequest, sb agentlab.Sandbox, prof agentlab.Profile) (err error) {
	j := &p.job
	if r.Setup == nil || j.NoSetup {
		return nil
	}
	if err := r.Setup.Validate(); err != nil {
		return err
	}
	why := ""
	if err := s.cfg.Snapshots.CanKeepSetups(sb.Backend); err != nil {
		why = err.Error()
	}
	switch { // with a workspace, its results are there
	case !j.Bundled, r.Sandbox != nil, p.sandbox.Workspace != nil:
		return agentlab.Errorf(agentlab.CodeInvalid, "only a job on a sent repository, in a sandbox of its own without a workspace, uses snapshots after setup").WithField("setup")
	case why != "":
		j.Setup.Note = agentlab.Reason(why)
		return nil
	}
	shared := agentlab.SetupEntry{Repo: r.Setup.Repo}
	own := agentlab.SetupEntry{Repo: r.Setup.Repo, Ref: r.Setup.Ref}
	if r.Setup.Default {
		own = shared
	}
	for _, e := range []*agentlab.SetupEntry{&shared, &own} {
		if e.Key, err = setupKey(*r.Setup, *e, j.Devcontainer, sb, prof); err != nil {
			return err
		}
	}
	snap, found, err := s.cfg.Snapshots.FindSetup(ctx, sb.Backend, sb.Image, own.Key, shared.Key)
	switch {
	case err != nil:
		return err
	case found:
		j.Fork, j.Setup = snap.UID, agentlab.JobSetup{Entry: snap.Setup, Reused: true}
	default:
		prep := j.Preparation(sb.Image)
		prep.ID = agentlab.NewJobID()
		j.Fork, j.Setup, p.preparation = agentlab.ForkPreparing, agentlab.JobSetup{Entry: own}, &prep
	}
	return nil
}

// setupKey returns the hash of all that two jobs must share to use the same entry,
// except the build of the image, which the snapshot has.
func setupKey(src agentlab.SetupSource, e agentlab.SetupEntry, devcontainer string, sb agentlab.Sandbox, prof agentlab.Profile) (string, error) {
	text, err := json.Marshal([]any{
		version.String(), src.Owner, e.Repo, e.Ref == "", e.Ref, src.Sum, devcontainer, prof.Name, prof.YAML, sb.Image, sb.Backend, sb.Resources, sb.Options, sb.Network,
	})
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:]), err
}

// keepable returns the entry of the snapshot of a prepared sandbox; zero if only its own
// job can use it: a checkout with changes cannot be updated to another commit.
func keepable(j, prep agentlab.Job) agentlab.SetupEntry {
	if prep.Result.Dirty {
		return agentlab.SetupEntry{}
	}
	return j.Setup.Entry
}

// isFailedCopy reports whether the sandbox of a job that has not started is a copy after
// setup that does not start, for example because it was saved by another QEMU.
func (s *Service) isFailedCopy(j agentlab.Job, sb agentlab.Sandbox) bool {
	return j.Status == agentlab.JobQueued && j.Setup.Entry.Key != "" && sb.From.Snapshot != "" && sb.From.Snapshot == j.Fork &&
		(sb.State == agentlab.SandboxFailed || sb.State == agentlab.SandboxDestroyed && sb.Reason != "")
}

// leaveCopy makes a job whose copy has failed run the commands itself, in a new sandbox.
func (s *Service) leaveCopy(ctx context.Context, j agentlab.Job, sb agentlab.Sandbox) error {
	if err := s.dropFork(ctx, j.ID, "the copy of the prepared sandbox failed: "+sb.Reason); err != nil {
		return err
	}
	_, err := s.cfg.Store.UpdateJob(ctx, j.ID, func(now *agentlab.Job) ([]agentlab.Event, error) {
		if now.Status == agentlab.JobQueued && now.SandboxVMID == sb.VMID {
			now.SandboxVMID = 0
		}
		return nil, nil
	})
	s.loop.Wake(j.ID)
	return err
}

// releaseOwn deletes the snapshot that only this job can use, when its sandbox exists.
func (s *Service) releaseOwn(ctx context.Context, j agentlab.Job, sb agentlab.Sandbox) error {
	if sb.State == agentlab.SandboxRequested || sb.State == agentlab.SandboxProvisioning {
		return nil
	}
	return s.dropOwn(ctx, j)
}

// dropOwn deletes the snapshot that only this job can use, if there is one, and that of an
// earlier job with which this one has failed: the reason may be in it.
func (s *Service) dropOwn(ctx context.Context, j agentlab.Job) error {
	if j.Setup.Entry.Key == "" || j.Snapshot() == "" {
		return nil
	}
	snap, err := s.cfg.Store.Snapshot(ctx, j.Snapshot())
	switch {
	case agentlab.CodeOf(err) == agentlab.CodeNotFound || err == nil && snap.Setup.Key != "" && (!j.Setup.Reused || j.Status != agentlab.JobFailed):
		return nil
	case err != nil:
		return err
	}
	return s.cfg.Snapshots.DropFork(ctx, snap.UID)
}
