package imagecmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/cli/jobcmd"
	"github.com/agentlab-vm/agentlab/internal/cli/sandboxcmd"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/attach"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/guestrun"
	"github.com/agentlab-vm/agentlab/internal/work/project"
)

// devcontainerDir is where a sandbox has the repository of its job.
const devcontainerDir = "/tmp/repo"

func imageFromDevcontainerCmd(a *cli.App) *cobra.Command {
	var name string
	req := api.SandboxCreate{}
	cmd := &cobra.Command{
		Use: "from-devcontainer [PATH]", Short: "Build an image with the dev container of a repository", Args: cli.OptionalArg("PATH"),
		Long: `Build an image with the dev container of a repository, so that sandboxes with the
image need not download and build it. The dev container is built in a sandbox, whose
disk becomes the image. The lifecycle commands run as before, in each container, except
initializeCommand, which also runs here. Build the image again when the dev container
has changed: until then, sandboxes with the image build what has changed.

The current commit is used, without what is not committed. PATH is the directory of the
repository (default: this one).`,
		Example: `  agentlab image from-devcontainer --name app
  agentlab claude --image app`,
	}
	flags := cmd.Flags()
	flags.StringVar(&name, "name", "", "name of the image (default: the name of the directory)")
	flags.StringVar(&req.Image, "image", "dev", "image to start from; it needs Docker and @devcontainers/cli")
	flags.StringVar(&req.Profile, "profile", "no-secrets", "profile of the sandbox; it has no secrets, and its network policy must allow the registries")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		top, err := gitsafe.Git(ctx, append(args, ".")[0], "rev-parse", "--show-toplevel")
		if err != nil {
			return err
		}
		if name == "" {
			name = strings.ToLower(filepath.Base(top))
		}
		if err := agentlab.ValidateName(name); err != nil {
			return agentlab.Errorf(agentlab.CodeInvalid, "%w", err).WithField("name").WithHint("choose one with --name")
		}
		if !slices.ContainsFunc(project.ContainerFiles, func(f string) bool {
			_, err := gitsafe.Git(ctx, top, "cat-file", "-e", "HEAD:"+f)
			return err == nil
		}) {
			return agentlab.Errorf(agentlab.CodeNotFound, "the current commit of %s has no %s", top, project.ContainerFiles[0]).WithHint("commit it, and try again")
		}
		img, err := devcontainerImage(ctx, a, c, top, name, req)
		if err != nil {
			return err
		}
		return printImage(a, img)
	})
	return cmd
}

// devcontainerImage builds the dev container of a repository in a new sandbox, and
// makes the image. The sandbox is destroyed at the end, also after an error.
func devcontainerImage(ctx context.Context, a *cli.App, c *client.Client, top, name string, req api.SandboxCreate) (img api.Image, err error) {
	p, err := c.Profile(ctx, req.Profile)
	if err == nil && p.Secrets != "" {
		err = agentlab.Errorf(agentlab.CodeDenied, "sandboxes with the profile %s receive secrets, which the image would keep", p.Name).
			WithField("profile").WithHint("choose one without secrets_bundle: agentlab profile list; docs/profiles.md")
	}
	if err != nil {
		return img, err
	}
	f := &sandboxcmd.NewFlags{Repo: top, NoSetup: true, NoPreflight: true, Req: req}
	if err := sandboxcmd.SandboxJob(ctx, a, c, f); err != nil {
		return img, err
	}
	f.Req.Job.Devcontainer = agentlab.DevcontainerOff
	sb, err := c.CreateSandbox(ctx, f.Req)
	if err != nil {
		gitsafe.DropBundle(ctx, a, c, f.Req.Job.BundleID)
		return img, err
	}
	id := fmt.Sprint(sb.VMID)
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		if _, derr := c.PurgeSandbox(end, id); derr != nil {
			err = errors.Join(err, derr)
		}
	}()
	if _, err = work.WaitSandbox(ctx, a, c, sb, 0, work.IsUp); err != nil {
		return img, err
	}
	if j, err := jobcmd.FollowJob(ctx, a, c, client.EventQuery{JobID: sb.JobID}, func(api.Event) {}); err != nil {
		return img, err
	} else if err := jobcmd.StatusError(j); err != nil {
		return img, agentlab.Errorf(agentlab.CodeConflict, "the repository was not cloned: %s", agentlab.WithoutControls(j.Reason))
	}
	commit := func() (api.Image, error) {
		return c.BuildImage(ctx, api.ImageBuild{Name: name, Sandbox: id}, func(line string) { a.Progressf("%s", agentlab.WithoutControls(line)) })
	}
	// While the sandbox runs, this is the only error, unless the image can never be made.
	if _, err := commit(); agentlab.CodeOf(err) != agentlab.CodeConflict {
		return img, err
	}
	if err := buildContainer(ctx, a, c, sb); err != nil {
		return img, err
	}
	return commit()
}

// buildContainer builds the dev container in a sandbox, and stops the sandbox.
func buildContainer(ctx context.Context, a *cli.App, c *client.Client, sb api.Sandbox) error {
	a.Progressf("building the dev container in sandbox %s", sb.Name)
	id := fmt.Sprint(sb.VMID)
	req := guestapi.ExecRequest{Command: []string{"agentlab-agent", "devcontainer", "--build", "--dir", devcontainerDir}}
	code, text, err := guestrun.Tool(ctx, c, id, req, nil, io.Discard, attach.FilteredWriter(a.Stderr))
	switch {
	case err != nil:
		return err
	case code == guestapi.ContainerUnsupported:
		return agentlab.Errorf(agentlab.CodeUnsupported, "%s", agentlab.OneLine(guestrun.LastLine(text), 300)).WithField("image").
			WithHint("use --image dev, or an image that extends it")
	case code != 0:
		return agentlab.Errorf(agentlab.CodeConflict, "the image was not made (exit code %d): %s", code, agentlab.OneLine(guestrun.LastLine(text), 1000)).
			WithHint("correct the configuration; the profile's network policy must allow the registries")
	}
	r := work.RequestChange(ctx, c, id, true, func(ctx context.Context, id string) (api.Sandbox, error) {
		return c.StopSandbox(ctx, id, api.SandboxStop{})
	})
	if r.Err == nil {
		_, r.Err = work.WaitSandbox(ctx, a, c, r.Sb, r.After, work.IsStopped)
	}
	return r.Err
}
