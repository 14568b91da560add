package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// buildContainerScript starts the dev container of the directory $1, which builds it,
// without the commands that run in a container that was made. What stays on the disk is
// what Docker has pulled and built. Blocks that are no longer used do not become a part
// of the image.
const buildContainerScript = `set -euo pipefail
for program in docker devcontainer; do
  command -v $program >/dev/null || { echo "the image has no $program" >&2; exit 90; }
done
timeout 300 bash -c 'until docker version >/dev/null 2>&1; do sleep 0.2; done'
dir=$1
devcontainer up --workspace-folder "$dir" --log-format text --omit-syntax-directive --skip-post-create >&2
docker ps --all --quiet --filter label=devcontainer.local_folder="$dir" | xargs --no-run-if-empty docker rm --force --volumes >/dev/null
sudo systemctl stop docker.service docker.socket
rm -rf "$dir"
sync
sudo fstrim /`

// devcontainerDir is the directory of the sandbox to which the repository is copied.
const devcontainerDir = "/tmp/repo"

func (a *App) imageFromDevcontainerCmd() *cobra.Command {
	var name string
	req := api.SandboxCreate{}
	cmd := &cobra.Command{
		Use: "from-devcontainer [PATH]", Short: "Build an image with the dev container of a repository", Args: optionalArg("PATH"),
		Long: `Build an image with the dev container of a repository, so that sandboxes with the
image need not download and build it. The dev container is built in a sandbox, whose
disk becomes the image. The lifecycle commands run as before, in each container, except
initializeCommand, which also runs here. Build the image again when the dev container
has changed: until then, sandboxes with the image build what has changed.

Files that Git does not track are not copied to the sandbox. PATH is the directory of
the repository (default: this one).`,
		Example: `  agentlab image from-devcontainer --name app
  agentlab claude --image app`,
	}
	flags := cmd.Flags()
	flags.StringVar(&name, "name", "", "name of the image (default: the name of the directory)")
	flags.StringVar(&req.Image, "image", "dev", "image to start from; it needs Docker and @devcontainers/cli")
	flags.StringVar(&req.Profile, "profile", "no-secrets", "profile of the sandbox; it has no secrets, and its network policy must allow the registries")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		top, err := git(ctx, slices.Concat(args, []string{"."})[0], "rev-parse", "--show-toplevel")
		if err != nil {
			return err
		}
		if name == "" {
			name = strings.ToLower(filepath.Base(top))
		}
		if err := agentlab.ValidateName(name); err != nil {
			return agentlab.Errorf(agentlab.CodeInvalid, "%w", err).WithField("name").WithHint("choose one with --name")
		}
		if !slices.ContainsFunc(containerFiles, func(f string) bool {
			_, err := os.Stat(filepath.Join(top, f))
			return err == nil
		}) {
			return agentlab.Errorf(agentlab.CodeNotFound, "%s has no .devcontainer/devcontainer.json", top).WithHint("add it, and try again")
		}
		img, err := a.devcontainerImage(ctx, c, top, name, req)
		if err != nil {
			return err
		}
		return a.emit(img, func() error {
			_, err := fmt.Fprintf(a.Stdout, "%s@%s\n", img.Name, img.Digest)
			return err
		})
	})
	return cmd
}

// devcontainerImage builds the dev container of the work tree top in a new sandbox, and
// makes the image. The sandbox is destroyed at the end, also after an error.
func (a *App) devcontainerImage(ctx context.Context, c *client.Client, top, name string, req api.SandboxCreate) (img api.Image, err error) {
	p, err := c.Profile(ctx, req.Profile)
	if err == nil && p.Secrets != "" {
		err = agentlab.Errorf(agentlab.CodeDenied, "sandboxes with the profile %s receive secrets, which the image would keep", p.Name).
			WithField("profile").WithHint("choose one without secrets_bundle: agentlab profile list; docs/profiles.md")
	}
	if err != nil {
		return img, err
	}
	sb, err := c.CreateSandbox(ctx, req)
	if err != nil {
		return img, err
	}
	id := fmt.Sprint(sb.VMID)
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		if _, derr := c.DestroySandbox(end, id); derr != nil {
			err = errors.Join(err, derr)
		}
	}()
	if sb, err = a.waitSandbox(ctx, c, sb, 0, isUp); err != nil {
		return img, err
	}
	if err := a.pushTracked(ctx, c, top, copyPath{sandbox: id, path: devcontainerDir}); err != nil {
		return img, err
	}
	a.progressf("building the dev container in sandbox %s", sb.Name)
	code, text, err := runLongScript(ctx, c, id, guestapi.ExecRequest{}, "from-devcontainer", buildContainerScript, []string{devcontainerDir}, nil, io.Discard, guestWriter(a.Stderr))
	switch {
	case err != nil:
		return img, err
	case code == 90:
		return img, agentlab.Errorf(agentlab.CodeUnsupported, "%s", text).WithField("image").WithHint("use --image dev, or an image that extends it")
	case code != 0:
		return img, agentlab.Errorf(agentlab.CodeConflict, "the dev container was not built (exit code %d): %s", code, agentlab.OneLine(text[max(0, len(text)-300):], 300)).
			WithHint("correct the configuration; the profile's network policy must allow the registries")
	}
	r := requestChange(ctx, c, id, true, func(ctx context.Context, id string) (api.Sandbox, error) {
		return c.StopSandbox(ctx, id, api.SandboxStop{})
	})
	if r.err != nil {
		return img, r.err
	}
	if _, err := a.waitSandbox(ctx, c, r.sb, r.after, isStopped); err != nil {
		return img, err
	}
	return c.BuildImage(ctx, api.ImageBuild{Name: name, Sandbox: id}, func(line string) { a.progressf("%s", sanitize(line)) })
}

// pushTracked copies the files of a work tree that Git tracks.
func (a *App) pushTracked(ctx context.Context, c *client.Client, top string, to copyPath) error {
	list, err := gitInput{raw: true}.run(ctx, top, "ls-files", "-z", "--cached", "--deduplicate")
	if err != nil {
		return err
	}
	root, err := os.OpenRoot(top)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	var names []string
	for name := range strings.SplitSeq(list, "\x00") {
		if st, err := root.Lstat(name); name != "" && err == nil && !st.IsDir() { // a submodule is a directory
			names = append(names, name)
		}
	}
	p := &packer{kind: "content", name: top, root: root, names: names, show: func() {}}
	return a.sendArchive(ctx, c, to, "", []string{to.path, p.kind, "", "", "force"}, p.pack)
}
