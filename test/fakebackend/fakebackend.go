// Package fakebackend is the fake backend as a daemon opens it. Only tests
// have it in their list of backends: it runs nothing, so it isolates nothing.
package fakebackend

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/backend/registry"
	"github.com/agentlab-vm/agentlab/internal/guest/repocmd"
	"github.com/agentlab-vm/agentlab/internal/guest/sessioncmd"
	"github.com/agentlab-vm/agentlab/internal/image"
)

// Backend is the backend "fake".
var Backend = registry.Backend{Name: "fake", Open: open}

func open(env registry.Env) (registry.Opened, error) {
	d, err := fake.Open(fake.Config{Dir: filepath.Join(env.State, "fake"), Logger: env.Log, Programs: programs()})
	if err != nil {
		return registry.Opened{}, fmt.Errorf("opening the fake backend: %w", err)
	}
	return registry.Opened{Driver: d, Images: namedImages{env.Images}}, nil
}

// GuestGit is an environment variable for the daemon: a directory. With it, guests have
// the repository of a session there, in a directory with the UID of their volume.
const GuestGit = "AGENTLAB_TEST_GUEST_GIT"

func programs() map[string]fake.Program {
	dir := os.Getenv(GuestGit)
	if dir == "" {
		return nil
	}
	return map[string]fake.Program{
		"agentlab-agent": func(volume string, args []string, in io.Reader, out, errOut io.Writer) int {
			if len(args) == 0 {
				return 2
			}
			g := sessioncmd.Guest{Repo: filepath.Join(dir, volume, "repo"), Home: filepath.Join(dir, volume, "home")}
			run := map[string]func() error{
				"repo":    func() error { return repocmd.Run(g.Repo, args[1:], in, out) },
				"session": func() error { return g.Run(args[1:], in, out, errOut) },
			}[args[0]]
			if run == nil {
				return 0 // terminals
			}
			if err := run(); err != nil {
				_, _ = fmt.Fprintln(errOut, "agentlab-agent: "+err.Error())
				return 1
			}
			return 0
		},
	}
}

// namedImages are the images of the store by name only. The fake backend boots
// nothing, so no image is built for it.
type namedImages struct{ *image.Store }

// Current is Ensure.
func (s namedImages) Current(ctx context.Context, ref string) (string, error) {
	return s.Ensure(ctx, ref, nil)
}

// Ensure implements registry.Images.
func (s namedImages) Ensure(_ context.Context, ref string, _ func(string)) (string, error) {
	name, digest, err := image.ParseRef(ref)
	if err == nil && digest == "" {
		digest = strings.Repeat("0", 20)
	}
	return name + "@" + digest, err
}
