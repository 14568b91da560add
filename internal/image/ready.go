package image

import (
	"context"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// readyLimit bounds the look at what this machine lacks for a build.
const readyLimit = 20 * time.Second

// Readiness tells whether an image can be had.
type Readiness struct {
	Built     bool    // it is there, as its recipe is now
	Obstacles []error // what would make its build fail on this machine, each with a hint
}

// Readiness looks whether Ensure would have to build ref and what would make
// that fail. Nothing is built. Only shipped images are ever built by Ensure;
// the error is that of any other image that cannot be found.
func (s *Store) Readiness(ctx context.Context, ref string) (Readiness, error) {
	name, digest, err := ParseRef(ref)
	if err != nil {
		return Readiness{}, err
	}
	if digest != "" || !slices.Contains(ShippedNames(), name) {
		_, err := s.resolve(name, digest)
		return Readiness{Built: err == nil}, err
	}
	r, err := Shipped(name)
	if err != nil {
		return Readiness{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, readyLimit)
	defer cancel()
	if err := os.MkdirAll(s.root, 0o755); err != nil { //nolint:gosec // images are not secret
		return Readiness{}, classify("making the image store", err, "")
	}
	_, built := s.fresh(r.Name, r.Key())
	return Readiness{Built: built, Obstacles: r.obstacles(ctx, s.root)}, nil
}

// Err is nil unless the image is neither there nor can be built.
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
