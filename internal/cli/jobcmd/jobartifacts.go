package jobcmd

import (
	"context"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/transfer"
)

func jobArtifactsCmd(a *cli.App) *cobra.Command {
	cmd := cli.Query(a, "artifacts JOB", "List the artifacts of a job", cli.ExactArgs("JOB"), cli.One((*client.Client).Artifacts), func(list api.List[api.Artifact]) error {
		return artifactTable(a, list.Items)
	})
	cmd.AddCommand(artifactsDownloadCmd(a))
	return cmd
}

func artifactsDownloadCmd(a *cli.App) *cobra.Command {
	var out string
	var force bool
	cmd := &cobra.Command{
		Use:   "download JOB [PATH]",
		Short: "Download one artifact, or all of them as JOB.tar.gz",
		Args:  cobra.RangeArgs(1, 2),
	}
	cmd.Flags().StringVarP(&out, "out", "o", "", "file or directory to write to; - means standard output (default: the current directory)")
	cmd.Flags().BoolVar(&force, "force", false, "overwrite an existing file; with -o -, write binary data to a terminal")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		id, err := JobID(ctx, c, args[0])
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
			return cli.CopyOut(a.Stdout, body, force)
		}
		name = cli.OutputName(out, name)
		found, err := judgeDownload(ctx, a, c, id, args[1:], name)
		if err != nil {
			return err
		}
		n, err := work.SaveTo(name, body, force, 0o644)
		if err != nil {
			return err
		}
		doc := map[string]any{"file": name, "size": n}
		if len(found) > 0 {
			doc["findings"] = gitsafe.FindingsJSON(found)
		}
		return a.Done(doc, "wrote %s (%s)", name, work.ByteSize(n))
	})
	return cmd
}

// judgeDownload is the return check of one artifact that becomes a file, or of all of them
// in an archive, which is only named: it is extracted by the user.
func judgeDownload(ctx context.Context, a *cli.App, c *client.Client, job string, artifact []string, name string) ([]returncheck.Finding, error) {
	if len(artifact) > 0 {
		return transfer.AdmitFile(ctx, a, name, a.JSON)
	}
	list, err := c.Artifacts(ctx, job)
	if err != nil {
		return nil, err
	}
	var entries []returncheck.Entry
	for _, f := range list.Items {
		entries = append(entries, returncheck.Entry{Path: f.Path, Kind: returncheck.File})
	}
	found := returncheck.Check(entries, returncheck.Host{})
	if !a.JSON {
		gitsafe.NoteArchive(a, found)
	}
	return found, nil
}

// JobID returns the ID of the job with an ID or unique prefix of one.
func JobID(ctx context.Context, c *client.Client, arg string) (string, error) {
	if agentlab.ValidateJobID(arg) == nil {
		return arg, nil
	}
	j, err := c.Job(ctx, arg)
	return j.ID, err
}
