package hostcmd

import (
	"cmp"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

// newBundleText is the initial text when editing an empty or missing bundle.
const newBundleText = `# A secrets bundle. Values may be references: op://…, env:…, file:…, cmd:…
# Prefix a literal value that looks like a reference with "literal:".
# Comments are not stored.
#
# git:
#   url: https://github.com/OWNER/REPO
#   token: …
# env:
#   ANTHROPIC_API_KEY: …
`

const maxBundleText = 1 << 20

func secretsEditCmd(a *cli.App, bundle *string) *cobra.Command {
	return &cobra.Command{
		Use: "edit", Short: "Edit a bundle in your editor", Args: cli.ExactArgs(),
		Long: `Edit the decrypted text of a bundle with $VISUAL or $EDITOR. The text is in a
private file on a file system in memory, which is then removed; it is never
written to a disk. If the text is invalid, you can edit it again on a terminal;
otherwise it is discarded and the bundle does not change.`,
		RunE: a.RunE(func(ctx context.Context, c *client.Client, _ []string) error {
			old, err := c.SecretsText(ctx, *bundle)
			if err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound {
				return err
			}
			if err != nil {
				a.Progressf("bundle %s does not exist; it is created when you save the text", *bundle)
			}
			if strings.TrimSpace(old.Text) == "" {
				old.Text = newBundleText
			}
			return editBundle(ctx, a, c, *bundle, old)
		}),
	}
}

// editBundle runs the editor until the text is valid or the user gives up.
func editBundle(ctx context.Context, a *cli.App, c *client.Client, bundle string, old api.SecretText) error {
	dir, remove, err := privateMemory()
	if err != nil {
		return err
	}
	defer remove()
	file := filepath.Join(dir, bundle+".yaml")
	if err := os.WriteFile(file, []byte(old.Text), 0o600); err != nil {
		return err
	}
	refused := ""
	for {
		if err := edit(ctx, a, file); err != nil {
			return err
		}
		text, err := cli.ReadFile(file, maxBundleText)
		if err != nil {
			return err
		}
		if text == old.Text {
			a.Progressf("bundle %s not changed", bundle)
			return nil
		}
		err = c.ReplaceSecrets(ctx, bundle, text, old.Version)
		if err == nil {
			a.Progressf("bundle %s saved", bundle)
			return nil
		}
		if agentlab.CodeOf(err) != agentlab.CodeInvalid {
			a.Progressf("your changes are discarded")
			return err
		}
		if _, tty := work.TerminalOf(a.Stdin); !tty || a.NoInput || text == refused || !confirmRetry(a, err) {
			a.Progressf("your changes are discarded; bundle %s not changed", bundle)
			return err
		}
		refused = text
	}
}

// confirmRetry prints why a text is rejected and asks whether to edit it again.
func confirmRetry(a *cli.App, err error) bool {
	a.PrintError(err)
	answer, ok := a.Prompt("edit again? [Y/n] ")
	return ok && answer != "n" && answer != "no"
}

// edit runs the editor on a file. As in git, $VISUAL and $EDITOR are shell
// commands.
func edit(ctx context.Context, a *cli.App, file string) error {
	editor := cmp.Or(os.Getenv("VISUAL"), os.Getenv("EDITOR"))
	if editor == "" {
		return work.UsageErrorf("no editor is set").WithHint("set EDITOR, or use 'agentlab secrets set'")
	}
	cmd := exec.CommandContext(ctx, "sh", "-c", editor+` "$@"`, editor, file) //nolint:gosec // the user's own editor
	cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.Dir = a.Stdin, a.Stderr, a.Stderr, filepath.Dir(file)
	if err := cmd.Run(); err != nil {
		return agentlab.Errorf(agentlab.CodeInvalid, "the editor %q failed, nothing was changed: %w", editor, err)
	}
	return nil
}

// privatePattern is the name of the directories of privateMemory.
const privatePattern = "agentlab-edit-*"

// privateMemory creates a private directory on a file system in memory, and removes
// those that killed processes have left. It ignores a relative XDG_RUNTIME_DIR, as its
// specification requires: the editor runs in another directory than this process.
func privateMemory() (dir string, remove func(), err error) {
	for _, dir := range []string{os.Getenv("XDG_RUNTIME_DIR"), "/dev/shm", "/run"} {
		if !filepath.IsAbs(dir) || !inMemory(dir) {
			continue
		}
		gitsafe.RemoveKilled(dir, privatePattern)
		if tmp, remove, err := gitsafe.LockedDir(dir, privatePattern); err == nil {
			return tmp, remove, nil
		}
	}
	return "", nil, agentlab.Errorf(agentlab.CodeUnsupported, "no file system in memory was found for editing secrets").
		WithHint("use 'agentlab secrets set', or set XDG_RUNTIME_DIR to a directory on a tmpfs")
}
