package cli

import (
	"context"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/transfer"
)

func (a *App) jobArtifactsCmd() *cobra.Command {
	cmd := query(a, "artifacts JOB", "List the artifacts of a job", exactArgs("JOB"), one((*client.Client).Artifacts), func(list api.List[api.Artifact]) error {
		return a.artifactTable(list.Items)
	})
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
	cmd.Flags().StringVarP(&out, "out", "o", "", "file or directory to write to; - means standard output (default: the current directory)")
	cmd.Flags().BoolVar(&force, "force", false, "overwrite an existing file; with -o -, write binary data to a terminal")
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
		found, err := a.judgeDownload(ctx, c, id, args[1:], name)
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
		return a.done(doc, "wrote %s (%s)", name, work.ByteSize(n))
	})
	return cmd
}

// judgeDownload is the return check of one artifact that becomes a file, or of all of them
// in an archive, which is only named: it is extracted by the user.
func (a *App) judgeDownload(ctx context.Context, c *client.Client, job string, artifact []string, name string) ([]returncheck.Finding, error) {
	if len(artifact) > 0 {
		return transfer.AdmitFile(ctx, a, name, a.json)
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
	if !a.json {
		gitsafe.NoteArchive(a, found)
	}
	return found, nil
}

// jobID returns the ID of the job with an ID or unique prefix of one.
func jobID(ctx context.Context, c *client.Client, arg string) (string, error) {
	if agentlab.ValidateJobID(arg) == nil {
		return arg, nil
	}
	j, err := c.Job(ctx, arg)
	return j.ID, err
}
