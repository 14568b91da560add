package image

import (
	"context"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// readyLimit is the timeout of the checks of this machine.
const readyLimit = 20 * time.Second

// Readiness describes whether an image exists or can be built.
type Readiness struct {
	Built     bool    // an image of the current recipe exists
	Obstacles []error // reasons why its build would fail on this machine, each with a hint
}

// Readiness reports whether Ensure would build ref and why that would fail. It
// builds nothing. Ensure builds only shipped images; the error is for any
// other image that cannot be found.
func (s *Store) Readiness(ctx context.Context, ref string) (Readiness, error) {
	r, built, err := s.find(ref)
	if err != nil || r == nil {
		return Readiness{Built: built}, err
	}
	ctx, cancel := context.WithTimeout(ctx, readyLimit)
	defer cancel()
	if err := os.MkdirAll(s.root, 0o755); err != nil {
		return Readiness{}, classify("making the image store", err, "")
	}
	return Readiness{Built: built, Obstacles: r.obstacles(ctx, s.root)}, nil
}

// find reports whether an image of the current recipe exists, and returns the
// recipe from which Ensure would build it, nil if it would not.
func (s *Store) find(ref string) (r *Recipe, built bool, err error) {
	name, digest, err := ParseRef(ref)
	if err != nil {
		return nil, false, err
	}
	if digest != "" || !slices.Contains(ShippedNames(), name) {
		_, err := s.resolve(name, digest)
		return nil, err == nil, err
	}
	if r, err = Shipped(name); err != nil {
		return nil, false, err
	}
	_, built = s.fresh(r.Name, r.Key())
	return r, built, nil
}

// IsPart reports whether the image ref must be built, and its recipe extends the one of
// the image part. An image of an older recipe counts as built: its layers make the next
// build short.
func (s *Store) IsPart(part, ref string) bool {
	r, _, err := s.find(ref)
	if err != nil || r == nil {
		return false
	}
	if _, err := s.resolve(r.Name, ""); err == nil {
		return false
	}
	for p := r.parent; p != nil; p = p.parent {
		if p.Name == part {
			return true
		}
	}
	return false
}

// Bootable is a Store as a backend boots from it: missing images are built.
type Bootable struct{ *Store }

// Check returns an error if there is no image of that name, or if it is missing
// and cannot be built on this machine.
func (s Bootable) Check(name string) error {
	_, built, err := s.find(name)
	if built && err == nil { // the checks of this machine start programs
		return nil
	}
	ready, err := s.Readiness(context.Background(), name)
	if err == nil {
		err = ready.Err()
	}
	if err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound && agentlab.CodeOf(err) != agentlab.CodeInvalid {
		return agentlab.Errorf(agentlab.CodeOf(err), "image %s is not built, and cannot be: %w", name, err).WithHint("%s", agentlab.HintOf(err))
	}
	return err
}

// DiskBytes returns the virtual size of the root disk of an image, in bytes; 0 if it
// is not built.
func (s Bootable) DiskBytes(name string) int64 {
	img, err := s.Resolve(context.Background(), name)
	if err != nil {
		return 0
	}
	return img.SizeBytes
}

// Ensure builds the image if it is missing and returns its reference.
func (s Bootable) Ensure(ctx context.Context, name string, progress func(string)) (string, error) {
	img, err := s.Store.Ensure(ctx, name, progress)
	if err != nil {
		return "", err
	}
	return img.Ref(), nil
}

// Current returns the reference that Ensure would return, and builds nothing:
// not_found if the image must be built first.
func (s Bootable) Current(ctx context.Context, ref string) (string, error) {
	_, built, err := s.find(ref)
	switch {
	case err != nil:
		return "", err
	case !built:
		return "", s.notFound(ref)
	}
	img, err := s.Resolve(ctx, ref)
	return img.Ref(), err
}

// Err returns an error if the image does not exist and cannot be built.
func (r Readiness) Err() error {
	if r.Built || len(r.Obstacles) == 0 {
		return nil
	}
	var what, hints []string
	for _, err := range r.Obstacles {
		what = append(what, err.Error())
		if hint := agentlab.HintOf(err); hint != "" {
			hints = append(hints, hint)
		}
	}
	return agentlab.Errorf(agentlab.CodeOf(r.Obstacles[0]), "%s", strings.Join(what, "; ")).WithHint("%s", strings.Join(hints, "; "))
}
