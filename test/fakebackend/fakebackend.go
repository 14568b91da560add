// Package fakebackend is the fake backend as a daemon opens it. Only tests
// have it in their list of backends: it runs nothing, so it isolates nothing.
package fakebackend

import (
	"context"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/backend/registry"
	"github.com/agentlab-vm/agentlab/internal/image"
)

// Backend is the backend "fake".
var Backend = registry.Backend{Name: "fake", Open: open}

// envForeign is the number of a sandbox that another user of the backend takes
// just before the driver does.
const envForeign = "AGENTLAB_TEST_FOREIGN"

func open(env registry.Env) (registry.Opened, error) {
	d, err := fake.Open(fake.Config{Dir: filepath.Join(env.Paths.State, "fake"), Logger: env.Log})
	if err != nil {
		return registry.Opened{}, fmt.Errorf("opening the fake backend: %w", err)
	}
	if n, err := strconv.Atoi(env.Getenv(envForeign)); err == nil {
		d.Host().Inject(fake.Fault{Op: fake.OpCreate, VMID: n, Hook: func(r backend.Spec) { d.Host().PutForeign(r.VMID) }})
	}
	return registry.Opened{Driver: d, Images: namedImages{env.Images}}, nil
}

// namedImages are the images of the store by name only: the fake boots
// nothing, so nothing is built for it.
type namedImages struct{ *image.Store }

// Ensure implements registry.Images.
func (s namedImages) Ensure(_ context.Context, ref string, _ func(string)) (string, error) {
	name, digest, err := image.ParseRef(ref)
	if err == nil && digest == "" {
		digest = strings.Repeat("0", 20)
	}
	return name + "@" + digest, err
}
