package artifact

import (
	"bufio"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// Bundle is an uploaded git bundle.
type Bundle struct {
	ID     string
	Size   int64  // bytes
	SHA256 string // lower-case hex
}

var bundleIDRE = lazyre.New(`^bundle-[a-z2-9]{26}$`)

func bundleFile(id string) string { return id + ".bundle" }

func notBundle(why string) error {
	return agentlab.Errorf(agentlab.CodeInvalid, "not a usable git bundle: %s", why).WithField("bundle").
		WithHint("create one with: git bundle create FILE HEAD --all")
}

// PutBundle stores a git bundle of a whole repository until a job claims it.
// Codes: invalid (not a bundle, or one that needs commits that it does not
// contain), limit, no_space; an error of r is returned unchanged.
func (s *Service) PutBundle(ctx context.Context, r io.Reader) (Bundle, error) {
	t, err := s.newTemp(s.bundles, "")
	if err != nil {
		return Bundle{}, err
	}
	defer t.discard()
	src := &limited{ctx: ctx, room: s.room, r: r, left: s.limits.BundleBytes}
	checked := &headerCheck{}
	checked.reset(src)
	sum, _, err := t.fill(checked)
	if src.err != nil {
		return Bundle{}, src.err
	}
	if err == nil && !checked.done {
		err = notBundle("its header is incomplete")
	}
	if err != nil {
		return Bundle{}, fault(err, "store a bundle")
	}
	b := Bundle{ID: "bundle-" + agentlab.NewUID(), Size: s.limits.BundleBytes - src.left, SHA256: sum}
	if err := t.moveTo(bundleFile(b.ID)); err != nil {
		return Bundle{}, fault(err, "store a bundle")
	}
	return b, fault(syncDir(s.bundles, "."), "store a bundle")
}

// ClaimBundle assigns an uploaded bundle to a job. Claiming it again for the
// same job succeeds. Code not_found: it does not exist, is too old, or belongs
// to another job.
func (s *Service) ClaimBundle(_ context.Context, bundleID, jobID string) error {
	if err := agentlab.ValidateJobID(jobID); err != nil {
		return err
	}
	gone := agentlab.Errorf(agentlab.CodeNotFound, "no bundle %.60q", bundleID).WithField("bundle_id").
		WithHint("a bundle is stored for %s and can be used by one job; upload it again", s.limits.BundleAge)
	if !bundleIDRE.MatchString(bundleID) {
		return gone
	}
	err := s.bundles.Rename(bundleFile(bundleID), bundleFile(jobID))
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := s.bundles.Lstat(bundleFile(jobID)); err == nil {
			return nil
		}
		return gone
	}
	return fault(err, "claim a bundle")
}

// DeleteBundle removes an uploaded bundle that no job has claimed. Code
// not_found: there is none.
func (s *Service) DeleteBundle(bundleID string) error {
	err := fs.ErrNotExist
	if bundleIDRE.MatchString(bundleID) {
		err = s.bundles.Remove(bundleFile(bundleID))
	}
	if errors.Is(err, fs.ErrNotExist) {
		return agentlab.Errorf(agentlab.CodeNotFound, "no bundle %.60q, or a job uses it", bundleID).WithField("bundle")
	}
	return fault(err, "delete a bundle")
}

// RepoBundle opens the bundle of a job. The attempts of a job share its bundle.
func (s *Service) RepoBundle(ctx context.Context, jobID string) (io.ReadSeekCloser, int64, error) {
	if err := agentlab.ValidateJobID(jobID); err != nil {
		return nil, 0, err
	}
	j, err := s.store.Job(ctx, jobID)
	if err != nil {
		return nil, 0, err
	}
	f, err := openRegular(s.bundles, bundleFile(j.OwnerID()))
	if err != nil {
		return nil, 0, fault(err, "open the repository bundle")
	}
	st, err := f.Stat()
	if err != nil {
		_ = f.Close()
		return nil, 0, fault(err, "open the repository bundle")
	}
	return f, st.Size(), nil
}

// DropBundle removes the bundle of a job after its last use.
func (s *Service) DropBundle(jobID string) error {
	if err := agentlab.ValidateJobID(jobID); err != nil {
		return err
	}
	return removeIf(s.bundles, bundleFile(jobID))
}

func removeIf(root *os.Root, name string) error {
	if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fault(err, "remove %s", name)
	}
	return nil
}

type limited struct {
	ctx  context.Context
	room func() error
	r    io.Reader
	left int64
	err  error
}

func (l *limited) Read(p []byte) (n int, err error) {
	if err = errors.Join(l.ctx.Err(), l.room()); err == nil {
		n, err = l.r.Read(p)
	}
	if l.left -= int64(n); l.left < 0 {
		err = agentlab.Errorf(agentlab.CodeLimit, "the bundle is too large")
	}
	if err != nil && !errors.Is(err, io.EOF) {
		l.err = err
	}
	return n, err
}

// headerCheck passes a git bundle on and fails at the first line of its header
// that makes it unusable: see gitformat-bundle(5).
type headerCheck struct {
	r     *bufio.Reader
	line  []byte // read, checked, not passed on yet
	bytes int
	lines int
	refs  int
	done  bool // the header has ended
}

func (h *headerCheck) reset(r io.Reader) { *h = headerCheck{r: bufio.NewReaderSize(r, 32<<10)} }

const maxBundleHeader = 16 << 20

var bundleRefRE = lazyre.New(`^([0-9a-f]{40}|[0-9a-f]{64}) [^\x00-\x20]+$`)

func (h *headerCheck) Read(p []byte) (int, error) {
	if len(h.line) == 0 && !h.done {
		if err := h.next(); err != nil {
			return 0, err
		}
	}
	if len(h.line) > 0 {
		n := copy(p, h.line)
		h.line = h.line[n:]
		return n, nil
	}
	return h.r.Read(p)
}

func (h *headerCheck) next() error {
	raw, err := h.r.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) || h.bytes > maxBundleHeader {
		return notBundle("its header is too long")
	}
	if err == io.EOF {
		return notBundle("its header is incomplete")
	}
	if err != nil {
		return err
	}
	h.line = append([]byte(nil), raw...)
	h.bytes += len(raw)
	h.lines++
	line := strings.TrimSuffix(string(raw), "\n")
	switch {
	case h.lines == 1:
		if line != "# v2 git bundle" && line != "# v3 git bundle" {
			return notBundle("the bundle signature is missing")
		}
	case line == "":
		h.done = true
		if magic, err := h.r.Peek(4); err != nil || string(magic) != "PACK" {
			return notBundle("it contains no pack")
		}
		if h.refs == 0 {
			return notBundle("it contains no branch")
		}
	case line[0] == '-':
		return notBundle("it requires commits that it does not contain")
	case line[0] == '@':
		if strings.HasPrefix(line, "@filter") {
			return notBundle("it was created from a partial clone")
		}
	case bundleRefRE.MatchString(line):
		h.refs++
	default:
		return notBundle("its header is damaged")
	}
	return nil
}
