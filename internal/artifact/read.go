package artifact

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// List returns the artifacts of a job.
func (s *Service) List(ctx context.Context, jobID string) ([]agentlab.Artifact, error) {
	return s.store.Artifacts(ctx, jobID)
}

// Open opens an artifact. Code not_found: there is none with that path.
func (s *Service) Open(ctx context.Context, jobID, p string) (agentlab.Artifact, io.ReadCloser, error) {
	a, err := s.store.Artifact(ctx, jobID, p)
	if err != nil {
		return a, nil, err
	}
	f, err := s.openFile(a)
	if err != nil {
		return a, nil, err
	}
	return a, f, nil
}

// openFile opens the file of a row, which must be a regular file.
func (s *Service) openFile(a agentlab.Artifact) (*os.File, error) {
	if err := errors.Join(agentlab.ValidateJobID(a.JobID), agentlab.ValidateArtifactPath(a.Path)); err != nil {
		return nil, err
	}
	f, err := openRegular(s.files, a.JobID+"/"+a.Path)
	return f, fault(err, "open the artifact %s", a.Path)
}

func openRegular(root *os.Root, name string) (*os.File, error) {
	f, err := root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		_ = f.Close()
		return nil, errors.Join(err, fs.ErrNotExist)
	}
	return f, nil
}

// WriteTarGz writes all artifacts of a job as a tar.gz, below a directory with
// the job's ID. If the guest uploaded no agent log, the controller's copy is
// added. An artifact that is deleted in the meantime is omitted.
func (s *Service) WriteTarGz(ctx context.Context, jobID string, w io.Writer) error {
	if err := agentlab.ValidateJobID(jobID); err != nil {
		return err
	}
	rows, err := s.store.Artifacts(ctx, jobID)
	if err != nil {
		return err
	}
	zw := gzip.NewWriter(w)
	tw := tar.NewWriter(zw)
	hasLog := false
	for _, a := range rows {
		hasLog = hasLog || a.Path == agentlab.ArtifactLog
		f, err := s.openFile(a)
		if agentlab.CodeOf(err) == agentlab.CodeNotFound {
			continue
		}
		if err == nil {
			err = addFile(ctx, tw, f, jobID+"/"+a.Path, a.CreatedAt)
		}
		if err != nil {
			return err
		}
	}
	if !hasLog {
		if err := s.addLog(ctx, tw, jobID); err != nil {
			return err
		}
	}
	if err := tw.Close(); err != nil {
		return err
	}
	return zw.Close()
}

// Bundle is WriteTarGz as a reader, which must be closed.
func (s *Service) Bundle(ctx context.Context, jobID string) (io.ReadCloser, error) {
	if _, err := s.store.Artifacts(ctx, jobID); err != nil {
		return nil, err
	}
	r, w := io.Pipe()
	go func() { w.CloseWithError(s.WriteTarGz(ctx, jobID, w)) }()
	return r, nil
}

func (s *Service) addLog(ctx context.Context, tw *tar.Writer, jobID string) error {
	f, err := openRegular(s.logs, logFile(jobID))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fault(err, "open the agent log")
	}
	return addFile(ctx, tw, f, jobID+"/"+agentlab.ArtifactLog, s.clock())
}

// addFile adds as many bytes as the file has at the start, even if it grows.
func addFile(ctx context.Context, tw *tar.Writer, f *os.File, name string, t time.Time) error {
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil {
		return fault(err, "read %s", name)
	}
	h := &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: st.Size(), ModTime: t.UTC().Truncate(time.Second)}
	if err := tw.WriteHeader(h); err != nil {
		return err
	}
	_, err = io.Copy(tw, ctxReader{ctx, io.LimitReader(f, st.Size())})
	return err
}

type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

func (c ctxReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}
