package cli

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// Limits of a doctor bundle, in bytes. The daemon's are lower.
const (
	maxDoctorBundle = 64 << 20
	maxDoctorFile   = 32 << 20
)

// DoctorLong is the part of help texts that describes a doctor bundle.
const DoctorLong = `A doctor bundle is a tar.gz with the rows of the database, events, the state on
the backend, the ends of logs and a manifest with the SHA-256 of each file. It
contains no secrets that the daemon knows, but it contains tasks, names, paths
and output of guests: read it before you pass it on. The same state gives the
same bytes. docs/doctor.md lists the files.`

// DoctorFlags are the flags of the commands that write a doctor bundle.
type DoctorFlags struct {
	Out   string
	Force bool
}

// Add adds the flags to a command.
func (f *DoctorFlags) Add(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&f.Out, "out", "o", "", "file or directory to write the bundle to")
	cmd.Flags().BoolVar(&f.Force, "force", false, "overwrite an existing file")
}

// DoctorOf returns a command that writes the doctor bundle of one object. what is the
// kind of the object.
func (a *App) DoctorOf(what string, get func(*client.Client, context.Context, string) (client.Body, error)) *cobra.Command {
	var f DoctorFlags
	arg := strings.ToUpper(what)
	cmd := &cobra.Command{
		Use: "doctor " + arg + " --out FILE", Short: "Write a doctor bundle of a " + what,
		Long: "Write a doctor bundle of a " + what + ".\n\n" + DoctorLong,
		Args: ExactArgs(arg),
	}
	f.Add(cmd)
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		if f.Out == "" {
			return work.UsageErrorf("--out is missing").WithHint("name the file to write: --out %s.tar.gz", what)
		}
		body, err := get(c, ctx, args[0])
		return a.WriteDoctor(f, "agentlab-doctor-"+what+".tar.gz", body, err)
	})
	return cmd
}

// WriteDoctor checks a bundle and writes it to a file that only its owner can
// read.
func (a *App) WriteDoctor(f DoctorFlags, name string, body client.Body, err error) error {
	if err != nil {
		return err
	}
	defer func() { _ = body.Close() }()
	data, err := io.ReadAll(io.LimitReader(body, maxDoctorBundle))
	if err != nil {
		return err
	}
	m, err := checkDoctor(data)
	if err != nil {
		return agentlab.Errorf(agentlab.CodeInternal, "the doctor bundle is damaged: %w", err)
	}
	name = OutputName(f.Out, name)
	if _, err := work.SaveTo(name, bytes.NewReader(data), f.Force, 0o600); err != nil {
		return err
	}
	for _, e := range m.Errors {
		a.Progressf("missing: %s: %s", agentlab.WithoutControls(e.Name), agentlab.WithoutControls(e.Message))
	}
	sum := sha256.Sum256(data)
	return a.Done(map[string]any{"file": name, "size": len(data), "sha256": hex.EncodeToString(sum[:]), "manifest": m},
		"wrote %s (%s, %s)", name, agentlab.Plural(len(m.Files), "file"), work.ByteSize(int64(len(data))))
}

// checkDoctor returns the manifest of a bundle whose files are those of the
// manifest.
func checkDoctor(data []byte) (m api.DoctorManifest, err error) {
	zr, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		return m, err
	}
	tr := tar.NewReader(io.LimitReader(zr, maxDoctorBundle))
	h, err := tr.Next()
	if err != nil {
		return m, err
	}
	if h.Name != api.DoctorManifestName {
		return m, fmt.Errorf("the first file is %s", agentlab.WithoutControls(h.Name))
	}
	if err := json.NewDecoder(io.LimitReader(tr, maxDoctorFile)).Decode(&m); err != nil {
		return m, err
	}
	for _, f := range m.Files {
		h, err := tr.Next()
		if err != nil {
			return m, err
		}
		sum := sha256.New()
		n, err := io.Copy(sum, io.LimitReader(tr, maxDoctorFile))
		if err != nil {
			return m, err
		}
		if h.Name != f.Name || n != f.Size || hex.EncodeToString(sum.Sum(nil)) != f.SHA256 {
			return m, fmt.Errorf("%s is not as in the manifest", agentlab.WithoutControls(f.Name))
		}
	}
	if _, err := tr.Next(); !errors.Is(err, io.EOF) {
		return m, errors.New("it has more files than its manifest")
	}
	return m, nil
}
