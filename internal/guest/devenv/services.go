package devenv

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// servicesLimit limits the start of services, with the download of their images.
const servicesLimit = 20 * time.Minute

// errTooLong is the cause of the end of a start that takes too long.
var errTooLong = errors.New("the time for the start is over")

// StartServices starts the services of a Compose file of the work tree dir, and waits
// until they run and are healthy. It may be called again. The output of Compose goes to
// out.
func StartServices(ctx context.Context, dir, file string, out io.Writer) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	if st, err := root.Stat(file); err != nil || !st.Mode().IsRegular() {
		return agentlab.Errorf(agentlab.CodeNotFound, "the repository has no file %.80q", file).WithHint("correct services in .agentlab.yaml")
	}
	ctx, cancel := context.WithTimeoutCause(ctx, servicesLimit, errTooLong)
	defer cancel()
	if err := docker(ctx); err != nil {
		return err
	}
	if err := runQuiet(ctx, "docker", "compose", "version"); err != nil {
		return agentlab.Errorf(agentlab.CodeUnsupported, "this image does not have Docker Compose: %w", err).WithHint(imageHint)
	}
	err = run(ctx, dir, out, out, []string{"docker", "compose", "--ansi", "never", "--file", filepath.Join(dir, file), "up", "--detach", "--wait"})
	if err != nil {
		return agentlab.Errorf(agentlab.CodeConflict, "docker compose up: %w", err).
			WithHint("see the logs of the services in the sandbox: docker compose --file %s logs", file)
	}
	return nil
}
