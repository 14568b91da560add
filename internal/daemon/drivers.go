package daemon

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/backend/registry"
	"github.com/agentlab-vm/agentlab/internal/backends"
	"github.com/agentlab-vm/agentlab/internal/image"
)

// envForeign names, for tests only, a number of the fake backend that somebody
// else takes just before we would.
const envForeign = "AGENTLAB_TEST_FOREIGN"

// knownBackends adds the backend of the tests to those of the programs.
func knownBackends(b registry.List, getenv func(string) string) registry.List {
	if b == nil {
		b = backends.All
	}
	if getenv("AGENTLAB_ALLOW_FAKE") == "1" {
		b = append(slices.Clip(b), registry.Backend{Name: "fake", Open: openFake})
	}
	return b
}

// openFake opens the backend of the tests, which isolates nothing because it
// runs nothing.
func openFake(env registry.Env) (registry.Opened, error) {
	d, err := fake.Open(fake.Config{Dir: filepath.Join(env.Paths.State, "fake"), Logger: env.Log})
	if err != nil {
		return registry.Opened{}, fmt.Errorf("opening the fake backend: %w", err)
	}
	if n, err := strconv.Atoi(env.Getenv(envForeign)); err == nil {
		d.Host().Inject(fake.Fault{Op: fake.OpCreate, VMID: n, Hook: func(r backend.Ref) { d.Host().PutForeign(r.VMID) }})
	}
	return registry.Opened{Driver: d, Images: namedImages{env.Images}}, nil
}

// builtImages are the images of the store, built when they are missing.
type builtImages struct{ *image.Store }

// Check implements sandbox.Images. An image that would have to be built on a
// machine that cannot do so is refused here, before anything is begun.
func (s builtImages) Check(name string) error {
	ready, err := s.Readiness(context.Background(), name)
	if err == nil {
		err = ready.Err()
	}
	if err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound && agentlab.CodeOf(err) != agentlab.CodeInvalid {
		return agentlab.Errorf(agentlab.CodeOf(err), "image %s is not built, and cannot be: %w", name, err).WithHint("%s", agentlab.HintOf(err))
	}
	return err
}

// findings tells which of the images cannot be built on this machine. That is
// an error for the first, the default one, while it is not there.
func (s builtImages) findings(ctx context.Context, names ...string) (all []backend.Finding) {
	for i, name := range slices.Compact(names) {
		f := backend.Finding{Name: "image " + name, Level: backend.LevelOK}
		ready, err := s.Readiness(ctx, name)
		built := ready.Built
		ready.Built = false
		if err == nil {
			err = ready.Err()
		}
		switch {
		case err != nil && built:
			f.Level, f.Detail = backend.LevelWarn, "it is built, but this machine could not build it again: "+err.Error()
		case err != nil:
			f.Level, f.Detail = backend.LevelWarn, "it is not built, and this machine cannot build it: "+err.Error()
			if i == 0 {
				f.Level = backend.LevelError
			}
		case built:
			f.Detail = "it is built"
		default:
			f.Detail = "it is built when it is needed first"
		}
		f.Remedy = agentlab.HintOf(err)
		all = append(all, f)
	}
	return all
}

// imageFinder is implemented by images that are built on this machine.
type imageFinder interface {
	findings(ctx context.Context, names ...string) []backend.Finding
}

// Ensure implements sandbox.Images.
func (s builtImages) Ensure(ctx context.Context, name string, progress func(string)) (string, error) {
	img, err := s.Store.Ensure(ctx, name, progress)
	if err != nil {
		return "", err
	}
	return img.Ref(), nil
}

// namedImages are the images of the store by name only: the fake boots
// nothing, so nothing is built for it.
type namedImages struct{ *image.Store }

// Ensure implements sandbox.Images.
func (s namedImages) Ensure(_ context.Context, ref string, _ func(string)) (string, error) {
	name, digest, err := image.ParseRef(ref)
	if err == nil && digest == "" {
		digest = strings.Repeat("0", 20)
	}
	return name + "@" + digest, err
}
