package guard

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
)

// envShared is the directory of what the processes of a run of the tests make once. A run
// (test/run) sets it for all its processes, and Run for those of one package.
const envShared = "AGENTLAB_TEST_SHARED"

// Once returns the directory with a name that all processes of this run share. The first
// one calls fill with it; the others wait for that. If fill fails, the next call tries again.
func Once(name string, fill func(dir string) error) (string, error) {
	base := os.Getenv(envShared)
	if base == "" {
		return "", fmt.Errorf("%s is not set: TestMain of this package does not call guard.Run", envShared)
	}
	dir, done := filepath.Join(base, name), filepath.Join(base, name+".done")
	lock, err := os.OpenFile(filepath.Join(base, name+".lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return "", err
	}
	defer func() { _ = lock.Close() }()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	if _, err := os.Stat(done); !errors.Is(err, fs.ErrNotExist) {
		return dir, err
	}
	err = os.RemoveAll(dir)
	if err == nil {
		err = os.Mkdir(dir, 0o700)
	}
	if err == nil {
		err = fill(dir)
	}
	if err != nil {
		return "", err
	}
	return dir, os.WriteFile(done, nil, 0o600)
}

// Programs returns a directory with the static programs of the named packages of this
// module, as they are shipped: what is built with the same flags has the same bytes.
func Programs(root string, packages ...string) (string, error) {
	name := "programs"
	for _, p := range packages {
		name += "-" + filepath.Base(p)
	}
	return Once(name, func(dir string) error { return Build(root, dir, nil, packages...) })
}

// Build builds programs of this module into a directory.
func Build(root, dir string, flags []string, packages ...string) error {
	argv := append([]string{"build", "-trimpath", "-ldflags", "-s -w", "-o", dir + "/"}, flags...)
	cmd := exec.Command("go", append(argv, packages...)...)
	cmd.Dir, cmd.Env = root, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	return nil
}
