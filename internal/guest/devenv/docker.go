// Package devenv starts the environment of a repository in the guest: the services of
// its Compose file and its dev container. Both run in Docker, which the image must have.
//
// The files of the repository are hostile. They can do everything in this virtual
// machine, as the agent can, and nothing outside of it.
package devenv

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/bounded"
)

const (
	socket = "/var/run/docker.sock"

	// dockerStarts limits the wait for Docker: the runner starts before the
	// distribution has booted, which takes minutes under emulation.
	dockerStarts = 5 * time.Minute
	dockerPause  = 300 * time.Millisecond

	imageHint = "use an image with Docker, such as dev: --image dev, or image: dev in the profile (docs/environments.md)"

	maxReason = 600 // bytes of the output of a program in an error
	maxTail   = 8 << 10
)

// docker returns an error unless Docker answers. It waits for the boot.
func docker(ctx context.Context) error {
	if _, err := exec.LookPath("docker"); err != nil {
		return agentlab.Errorf(agentlab.CodeUnsupported, "this image does not have Docker").WithHint(imageHint)
	}
	ctx, cancel := context.WithTimeout(ctx, dockerStarts)
	defer cancel()
	for {
		err := dial(ctx)
		if errors.Is(err, os.ErrPermission) {
			// The agent may become root. Without the group docker it would need sudo for
			// each command.
			err = runQuiet(ctx, "sudo", "-n", "chown", strconv.Itoa(os.Getuid()), socket)
		}
		if err == nil {
			err = runQuiet(ctx, "docker", "version", "--format", "{{.Server.Version}}")
		}
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return agentlab.Errorf(agentlab.CodeUnavailable, "Docker does not answer: %w", err).WithHint("look at its log in the sandbox: sudo journalctl -u docker")
		case <-time.After(dockerPause):
		}
	}
}

func dial(ctx context.Context) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return err
	}
	return conn.Close()
}

// runQuiet runs a program; its error has the end of its output.
func runQuiet(ctx context.Context, name string, args ...string) error {
	return run(ctx, "", io.Discard, io.Discard, append([]string{name}, args...))
}

// run runs a program in dir. Its error has the end of what it wrote to standard error.
func run(ctx context.Context, dir string, stdout, stderr io.Writer, argv []string) error {
	said := &bounded.Tail{Max: maxTail}
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir, cmd.Stdout, cmd.Stderr, cmd.WaitDelay = dir, stdout, io.MultiWriter(stderr, said), 5*time.Second
	err := cmd.Run()
	switch {
	case err == nil:
		return nil
	case context.Cause(ctx) != nil:
		err = context.Cause(ctx)
	}
	if text := lastLines(said.String()); text != "" {
		err = fmt.Errorf("%w: %s", err, text)
	}
	return err
}

// lastLines returns the end of a program's output in one line.
func lastLines(text string) string {
	text = strings.TrimSpace(text)
	if len(text) > maxReason {
		text = text[len(text)-maxReason:]
		if _, rest, ok := strings.Cut(text, "\n"); ok {
			text = rest
		}
	}
	var lines []string
	for line := range strings.Lines(text) {
		if line = agentlab.OneLine(line, maxReason); line != "" {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, " | ")
}
