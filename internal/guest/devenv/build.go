package devenv

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// BuildContainer builds the dev container of the work tree in dir, and prepares the disk of
// this VM to become an image. It removes the work tree. What Docker has pulled and built
// stays on the disk: no container, no volume, and no block that is no longer used. The
// commands that run in a container that was made do not run. The VM is new: nothing else
// has used its Docker.
func BuildContainer(ctx context.Context, dir string, out io.Writer) error {
	if err := unusable(Request{Dir: dir}); err != nil {
		return err
	}
	if err := docker(ctx); err != nil {
		return err
	}
	build, cancel := context.WithTimeout(ctx, containerLimit)
	defer cancel()
	err := run(build, dir, out, out, []string{"devcontainer", "up", "--workspace-folder", dir, "--log-format", "text", "--omit-syntax-directive", "--skip-post-create"})
	if err != nil {
		return agentlab.Errorf(agentlab.CodeConflict, "the dev container was not built: %w", err)
	}
	for _, of := range []struct{ list, remove []string }{
		{[]string{"ps", "--all", "--quiet"}, []string{"rm", "--force", "--volumes"}},
		{[]string{"volume", "ls", "--quiet"}, []string{"volume", "rm", "--force"}},
	} {
		var ids strings.Builder
		if err := run(ctx, "", &ids, io.Discard, append([]string{"docker"}, of.list...)); err != nil {
			return err
		}
		if names := strings.Fields(ids.String()); len(names) > 0 {
			if err := runQuiet(ctx, "docker", append(of.remove, names...)...); err != nil {
				return err
			}
		}
	}
	for _, argv := range [][]string{
		{"docker", "network", "prune", "--force"},
		{"sudo", "systemctl", "stop", "docker.service", "docker.socket"},
		{"sudo", "rm", "-rf", dir},
		{"sync"},
		{"sudo", "fstrim", "/"},
	} {
		if err := runQuiet(ctx, argv[0], argv[1:]...); err != nil {
			return fmt.Errorf("%s: %w", strings.Join(argv, " "), err)
		}
	}
	return nil
}
