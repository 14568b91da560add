package cli

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
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
		id, err := jobID(ctx, c, args[0])
		if err != nil {
			return err
		}
		name := id + ".tar.gz"
		get := c.JobBundle
		if len(args) == 2 {
			name = filepath.Base(args[1])
			get = func(ctx context.Context, id string) (client.Body, error) { return c.Artifact(ctx, id, args[1]) }
		}
		body, err := get(ctx, id)
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

// jobID returns the id of the job that an argument names by its id or the
// beginning of it.
func jobID(ctx context.Context, c *client.Client, arg string) (string, error) {
	if agentlab.ValidateJobID(arg) == nil {
		return arg, nil
	}
	j, err := c.Job(ctx, arg)
	return j.ID, err
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
