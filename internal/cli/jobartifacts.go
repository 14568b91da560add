package cli

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
)

func (a *App) jobArtifactsCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "artifacts JOB", Short: "List what a job left", Args: exactArgs("JOB"),
		RunE: a.run(func(ctx context.Context, c *client.Client, args []string) error {
			list, err := c.Artifacts(ctx, args[0])
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(list)
			}
			return a.artifactTable(list.Items)
		}),
	}
	cmd.AddCommand(a.artifactsDownloadCmd())
	return cmd
}

func (a *App) artifactsDownloadCmd() *cobra.Command {
	var out string
	var force bool
	cmd := &cobra.Command{
		Use:   "download JOB [PATH]",
		Short: "Download one artifact, or all of them as JOB.tar.gz",
		Args:  cobra.RangeArgs(1, 2),
	}
	cmd.Flags().StringVarP(&out, "out", "o", "", "file or folder to write to (default: here; - is standard output)")
	cmd.Flags().BoolVar(&force, "force", false, "replace a file that exists; with -o -, write binary data to a terminal")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		name := args[0] + ".tar.gz"
		get := c.JobBundle
		if len(args) == 2 {
			name = filepath.Base(args[1])
			get = func(ctx context.Context, id string) (client.Body, error) { return c.Artifact(ctx, id, args[1]) }
		}
		body, err := get(ctx, args[0])
		if err != nil {
			return err
		}
		defer func() { _ = body.Close() }()
		if out == "-" {
			return copyOut(a.Stdout, body, force)
		}
		name = outputName(out, name)
		n, err := saveTo(name, body, force)
		if err != nil {
			return err
		}
		if a.json {
			return a.printJSON(map[string]any{"file": name, "size": n})
		}
		a.progressf("wrote %s (%s)", name, byteSize(n))
		return nil
	})
	return cmd
}

// copyOut copies an artifact, which a guest wrote, to standard output. On a
// terminal only text is shown, without control characters, unless force asks
// for the bytes as they are.
func copyOut(w io.Writer, r io.Reader, force bool) error {
	if _, tty := terminal(w); tty && !force {
		in := bufio.NewReader(r)
		head, err := in.Peek(in.Size())
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if bytes.IndexByte(head, 0) >= 0 {
			return agentlab.Errorf(agentlab.CodeInvalid, "the artifact is binary and standard output is a terminal").
				WithHint("write it to a file with --out FILE or into a pipe, or give --force")
		}
		r = in
	}
	if !force {
		w = logWriter(w)
	}
	_, err := io.Copy(w, r)
	return err
}

// outputName applies --out, which may name a folder, to a default file name.
func outputName(out, name string) string {
	if out == "" {
		return name
	}
	if info, err := os.Stat(out); strings.HasSuffix(out, "/") || err == nil && info.IsDir() {
		return filepath.Join(out, name)
	}
	return out
}

func (a *App) jobFetchCmd() *cobra.Command {
	var repo string
	cmd := &cobra.Command{
		Use:   "fetch JOB",
		Short: "Fetch a job's commits into refs/agentlab/JOB of a local repository",
		Long: `Fetch a job's commits into refs/agentlab/JOB of a local repository. Nothing
is checked out or merged, and no branch of yours moves. Look at the work with
'git log refs/agentlab/JOB', take it with 'git merge refs/agentlab/JOB'.`,
		Args: exactArgs("JOB"),
	}
	cmd.Flags().StringVar(&repo, "repo", ".", "path of the repository to fetch into")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		j, err := c.Job(ctx, args[0])
		if err != nil {
			return err
		}
		ref, commit, err := fetchJob(ctx, c, j, repo)
		if err != nil {
			return err
		}
		if a.json {
			return a.printJSON(map[string]any{"ref": ref, "commit": commit, "commits": j.Result.Commits})
		}
		fmt.Fprintf(a.Stdout, "%s %s\n", ref, commit)
		a.progressf("  → git log -p HEAD..%s\n  → git merge %s", ref, ref)
		return nil
	})
	return cmd
}

// resultBundle is the artifact that holds a job's new commits.
const resultBundle = "result.bundle"

// fetchJob takes the one branch of the job's bundle into refs/agentlab/JOB.
// The bundle was written by an untrusted guest: every object is checked first,
// no other ref is taken, and nothing of it is checked out.
func fetchJob(ctx context.Context, c *client.Client, j api.Job, repo string) (ref, commit string, err error) {
	if _, err := git(ctx, repo, "rev-parse", "--git-dir"); err != nil {
		return "", "", agentlab.Errorf(agentlab.CodeInvalid, "%s is not a git repository: %v", repo, err).WithHint("give its path with --repo")
	}
	body, err := c.Artifact(ctx, j.ID, resultBundle)
	if err != nil {
		if agentlab.CodeOf(err) == agentlab.CodeNotFound {
			return "", "", agentlab.Errorf(agentlab.CodeNotFound, "job %s left no commits (it is %s)", j.ID, j.Status).
				WithHint("uncommitted changes are in the artifact changes.diff: agentlab job artifacts %s", j.ID)
		}
		return "", "", err
	}
	defer func() { _ = body.Close() }()
	dir, err := os.MkdirTemp("", "agentlab-fetch-*")
	if err != nil {
		return "", "", err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	file := filepath.Join(dir, resultBundle)
	if _, err := saveTo(file, body, false); err != nil {
		return "", "", err
	}
	ref = "refs/agentlab/" + j.ID
	commit, err = takeBundle(ctx, dir, file, repo, "refs/heads/agentlab/"+j.ID, ref)
	if err != nil && ctx.Err() == nil {
		code := agentlab.CodeConflict
		if agentlab.CodeOf(err) == agentlab.CodeLimit {
			code = agentlab.CodeLimit
		}
		fault := agentlab.Errorf(code, "git does not take the bundle of job %s: %s", j.ID, plain(err.Error()))
		if errors.Is(err, errLacksBase) {
			return "", "", fault.WithHint("it builds on commit %.12s, which this repository must have; fetch into the repository that the job came from", j.Result.BaseCommit)
		}
		return "", "", fault.WithHint("nothing of it was taken; look at the artifacts instead: agentlab job artifacts %s", j.ID)
	}
	return ref, commit, err
}
