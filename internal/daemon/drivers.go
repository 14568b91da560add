package daemon

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/backend/qemu"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/hostnet"
	"github.com/agentlab-vm/agentlab/internal/hostspace"
	"github.com/agentlab-vm/agentlab/internal/image"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
)

// driverEnv is what drivers are made of.
type driverEnv struct {
	paths    config.Paths
	settings config.Config
	images   *image.Store
	network  *hostnet.Local // of this host; who uses it claims it
	getenv   func(string) string
	log      *slog.Logger
}

// place is where sandboxes run: a driver, and where what they boot comes
// from.
type place struct {
	driver backend.Driver
	images sandbox.Images
	also   []io.Closer // what the driver uses and does not close
}

// drivers is the list of backends: the value of the key backend, and how its
// driver is made.
var drivers = map[string]func(driverEnv) (place, error){
	"qemu":    openQEMU,
	"proxmox": openProxmox,
	"fake":    openFake,
}

func openPlace(env driverEnv) (place, error) {
	open, ok := drivers[env.settings.Backend]
	if !ok {
		known := slices.Sorted(maps.Keys(drivers))
		return place{}, agentlab.Errorf(agentlab.CodeInvalid, "there is no backend %q", env.settings.Backend).WithField("backend").
			WithHint("choose one of %s", strings.Join(known, ", "))
	}
	return open(env)
}

// openQEMU opens the backend of virtual machines on this host.
func openQEMU(env driverEnv) (place, error) {
	runner, err := findRunner()
	if err != nil {
		return place{}, err
	}
	upstream, err := upstreamProxy(env.settings)
	if err != nil {
		return place{}, err
	}
	d, err := qemu.New(qemu.Config{
		StateDir: env.paths.State,
		CacheDir: filepath.Join(env.paths.Cache, "qemu"),
		Runner:   runner,
		Images: func(ctx context.Context, ref string) (qemu.ImageFiles, error) {
			img, err := env.images.Resolve(ctx, ref)
			if err != nil {
				return qemu.ImageFiles{}, err
			}
			return qemu.ImageFiles{Ref: img.Ref(), RootDisk: img.RootDisk(), Kernel: img.Kernel(), Modules: img.Modules()}, nil
		},
		PauseBelow: uint64(hostspace.PauseBelow(int64(env.settings.Limits.MinFreeMB) << 20)), //nolint:gosec // bounded by the configuration
		Accel:      qemu.Accel(env.settings.QEMU.Accel),
		QEMU:       env.settings.QEMU.Binary,
		DialUnix:   env.getenv(envInternet),
		Reserved:   reservedPorts(env.settings),
		Logger:     env.log,

		UpstreamProxy: upstream,
	})
	if err != nil {
		return place{}, err
	}
	return place{driver: d, images: builtImages{env.images}}, nil
}

// envInternet names, for tests only, a unix socket that takes the place of
// the internet for every sandbox. It can only take reach away.
const envInternet = "AGENTLAB_TEST_INTERNET"

// findRunner finds agent-runner beside this program, else on the PATH.
func findRunner() (string, error) {
	const name = "agent-runner"
	if self, err := os.Executable(); err == nil {
		if resolved, err := filepath.EvalSymlinks(self); err == nil {
			self = resolved
		}
		beside := filepath.Join(filepath.Dir(self), name)
		if st, err := os.Stat(beside); err == nil && st.Mode().IsRegular() {
			return beside, nil
		}
	}
	path, err := exec.LookPath(name)
	if err == nil {
		path, err = filepath.Abs(path)
	}
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeUnavailable, "agent-runner is not installed").
			WithHint("put it beside the agentlabd program: make build makes both")
	}
	return path, nil
}

// envForeign names, for tests only, a number of the fake backend that somebody
// else takes just before we would.
const envForeign = "AGENTLAB_TEST_FOREIGN"

// openFake opens the backend of the tests, which isolates nothing because it
// runs nothing.
func openFake(env driverEnv) (place, error) {
	if env.getenv("AGENTLAB_ALLOW_FAKE") != "1" {
		return place{}, agentlab.Errorf(agentlab.CodeInvalid, "the fake backend is for AgentLab's own tests: it runs nothing").WithField("backend").
			WithHint("write backend: qemu or proxmox, or nothing, in %s", env.paths.ConfigFile())
	}
	d, err := fake.Open(fake.Config{Dir: filepath.Join(env.paths.State, "fake"), Logger: env.log})
	if err != nil {
		return place{}, fmt.Errorf("opening the fake backend: %w", err)
	}
	if n, err := strconv.Atoi(env.getenv(envForeign)); err == nil {
		d.Host().Inject(fake.Fault{Op: fake.OpCreate, VMID: n, Hook: func(r backend.Ref) { d.Host().PutForeign(r.VMID) }})
	}
	return place{driver: d, images: namedImages{env.images}}, nil
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
