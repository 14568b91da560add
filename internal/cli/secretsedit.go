package cli

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
)

// newBundleText is what a person finds who edits a bundle that is empty or
// not there.
const newBundleText = `# A secrets bundle. Values may be references: op://…, env:…, file:…, cmd:…
# A text that only looks like one is written with "literal:" before it.
# Comments are not kept.
#
# git:
#   url: https://github.com/OWNER/REPO
#   token: …
# env:
#   ANTHROPIC_API_KEY: …
`

const maxBundleText = 1 << 20

func (a *App) secretsEditCmd(bundle *string) *cobra.Command {
	return &cobra.Command{
		Use: "edit", Short: "Edit a bundle in your editor", Args: exactArgs(),
		Long: `Edit the plain text of a bundle with $VISUAL or $EDITOR. The text is in a file
that only you can read, on a file system in memory, and is removed afterwards;
it never touches a disk. On a terminal a text with a mistake can be edited
again; otherwise it is thrown away, and the bundle stays as it was.`,
		RunE: a.run(func(ctx context.Context, c *client.Client, _ []string) error {
			old, err := c.SecretsText(ctx, *bundle)
			if err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound {
				return err
			}
			if err != nil {
				a.progressf("there is no bundle %s yet; it is made when the text is saved", *bundle)
			}
			if strings.TrimSpace(old.Text) == "" {
				old.Text = newBundleText
			}
			return a.editBundle(ctx, c, *bundle, old)
		}),
	}
}

// editBundle lets a person edit a text until it can be kept, or is given up.
func (a *App) editBundle(ctx context.Context, c *client.Client, bundle string, old api.SecretText) error {
	dir, err := privateMemory()
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	file := filepath.Join(dir, bundle+".yaml")
	if err := os.WriteFile(file, []byte(old.Text), 0o600); err != nil {
		return err
	}
	refused := ""
	for {
		if err := a.edit(ctx, file); err != nil {
			return err
		}
		text, err := a.readLimited(file, maxBundleText)
		if err != nil {
			return err
		}
		if text == old.Text {
			a.progressf("bundle %s is left as it is", bundle)
			return nil
		}
		err = c.ReplaceSecrets(ctx, bundle, text, old.Version)
		if err == nil {
			a.progressf("bundle %s is saved", bundle)
			return nil
		}
		if agentlab.CodeOf(err) != agentlab.CodeInvalid {
			a.progressf("what you wrote is thrown away")
			return err
		}
		if text == refused || !a.again(err) {
			a.progressf("what you wrote is thrown away, and bundle %s is left as it was", bundle)
			return err
		}
		refused = text
	}
}

// again shows why a text cannot be kept and asks whether to edit on.
func (a *App) again(err error) bool {
	if _, tty := terminal(a.Stdin); !tty || a.noInput {
		return false
	}
	a.printError(err)
	fmt.Fprint(a.Stderr, "edit again? [Y/n] ")
	line, rerr := bufio.NewReader(a.Stdin).ReadString('\n')
	if rerr != nil {
		fmt.Fprintln(a.Stderr)
	}
	line = strings.ToLower(strings.TrimSpace(line))
	return rerr == nil && line != "n" && line != "no"
}

// edit runs the editor on a file, as git does: $VISUAL or $EDITOR is a shell
// command.
func (a *App) edit(ctx context.Context, file string) error {
	editor := os.Getenv("VISUAL")
	if editor == "" {
		editor = os.Getenv("EDITOR")
	}
	if editor == "" {
		return usageErrorf("no editor is known").WithHint("set EDITOR, or use 'agentlab secrets set'")
	}
	cmd := exec.CommandContext(ctx, "sh", "-c", editor+` "$@"`, editor, file) //nolint:gosec // the user's own editor
	cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.Dir = a.Stdin, a.Stderr, a.Stderr, filepath.Dir(file)
	if err := cmd.Run(); err != nil {
		return agentlab.Errorf(agentlab.CodeInvalid, "the editor %q failed, so nothing was changed: %w", editor, err)
	}
	return nil
}

// privateMemory makes a directory that only this user can enter, on a file
// system in memory. A relative XDG_RUNTIME_DIR is ignored, as its specification
// demands: the editor runs in another directory than this process.
func privateMemory() (string, error) {
	for _, dir := range []string{os.Getenv("XDG_RUNTIME_DIR"), "/dev/shm", "/run"} {
		var fs unix.Statfs_t
		if !filepath.IsAbs(dir) || unix.Statfs(dir, &fs) != nil || fs.Type != unix.TMPFS_MAGIC {
			continue
		}
		if tmp, err := os.MkdirTemp(dir, "agentlab-edit-*"); err == nil { // mode 0700
			return tmp, nil
		}
	}
	return "", agentlab.Errorf(agentlab.CodeUnsupported, "there is no file system in memory to edit secrets on").
		WithHint("use 'agentlab secrets set', or set XDG_RUNTIME_DIR to a folder on a tmpfs")
}
