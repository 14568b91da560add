package store

import (
	"context"

	"github.com/agentlab-vm/agentlab"
)

var artifacts = newTable("artifacts", []string{"job_id", "path"}, func(a *agentlab.Artifact) []field {
	return []field{
		{"job_id", &a.JobID},
		{"path", &a.Path},
		{"size", &a.Size},
		{"sha256", &a.SHA256},
		{"mime", &a.MIME},
		{"created_at", timeCol{&a.CreatedAt}},
	}
}, checkArtifact)

func checkArtifact(a *agentlab.Artifact) error {
	switch {
	case a.JobID == "" || a.Path == "":
		return invalid("path", "an artifact requires a job and a path")
	case a.Size < 0:
		return invalid("size", "%d is negative", a.Size)
	case !isSHA256(a.SHA256):
		return invalid("sha256", "not a SHA-256 checksum in lower-case hexadecimal")
	case a.CreatedAt.IsZero():
		return invalid("created_at", "it is missing")
	}
	return nil
}

// PutArtifact stores an artifact; one with the same job and path is replaced.
// CreatedAt is set if zero, and an event with JobID "" gets the job's ID. Code
// conflict if there is no such job.
func (s *Store) PutArtifact(ctx context.Context, a agentlab.Artifact, evs ...agentlab.Event) error {
	return s.write(ctx, func(w *tx) error {
		if a.CreatedAt.IsZero() {
			a.CreatedAt = w.now
		}
		if err := w.exec("DELETE FROM artifacts WHERE job_id = ? AND path = ?", a.JobID, a.Path); err != nil {
			return err
		}
		if err := artifacts.insert(w, &a); err != nil {
			return err
		}
		return w.emit(fillTarget(evs, 0, a.JobID))
	})
}

const artifactList = "WHERE job_id = ? ORDER BY path"

// Artifacts lists the artifacts of a job by path.
func (s *Store) Artifacts(ctx context.Context, jobID string) ([]agentlab.Artifact, error) {
	return artifacts.query(ctx, s.r, artifactList, jobID)
}

// Artifact returns one artifact, or not_found.
func (s *Store) Artifact(ctx context.Context, jobID, path string) (agentlab.Artifact, error) {
	a, ok, err := artifacts.one(ctx, s.r, "WHERE job_id = ? AND path = ?", jobID, path)
	if err == nil && !ok {
		err = agentlab.Errorf(agentlab.CodeNotFound, "%s has no artifact %q", jobID, path).
			WithHint("see 'agentlab job artifacts %s'", jobID)
	}
	return a, err
}

// DeleteArtifacts deletes the records of the artifacts of a job with the paths;
// without paths, of all.
func (s *Store) DeleteArtifacts(ctx context.Context, jobID string, paths ...string) error {
	return s.write(ctx, func(w *tx) error {
		if len(paths) == 0 {
			return w.exec("DELETE FROM artifacts WHERE job_id = ?", jobID)
		}
		for _, p := range paths {
			if err := w.exec("DELETE FROM artifacts WHERE job_id = ? AND path = ?", jobID, p); err != nil {
				return err
			}
		}
		return nil
	})
}

// ArtifactBytes returns the total size of the artifacts of a job.
func (s *Store) ArtifactBytes(ctx context.Context, jobID string) (int64, error) {
	var n int64
	err := s.r.QueryRowContext(ctx, "SELECT coalesce(sum(size), 0) FROM artifacts WHERE job_id = ?", jobID).Scan(&n)
	return n, fault(err)
}
