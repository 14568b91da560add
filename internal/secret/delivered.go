package secret

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/redact"
)

// The values that a job received are stored, encrypted, as long as its guest may still
// send data: its output must be redacted with the values that it knows, not with those
// that the bundle or a reference has after a restart.

func (v *Vault) deliveredDir() string { return filepath.Join(v.dir, "delivered") }

func (v *Vault) deliveredPath(jobID string) (string, error) {
	if agentlab.ValidateName(jobID) != nil {
		return "", agentlab.Errorf(agentlab.CodeInvalid, "%q is not a job ID", jobID)
	}
	return filepath.Join(v.deliveredDir(), jobID+".age"), nil
}

// SaveDelivered stores values that a job is about to get, in addition to those stored
// before.
func (v *Vault) SaveDelivered(ctx context.Context, jobID string, values []string) error {
	path, err := v.deliveredPath(jobID)
	if err != nil {
		return err
	}
	return v.locked(ctx, func() error {
		before, _, err := v.Delivered(jobID)
		if err != nil {
			return err
		}
		all := slices.Concat(before, values)
		slices.Sort(all)
		all = slices.Compact(all)
		if slices.Equal(all, before) && before != nil {
			return nil
		}
		text, err := json.Marshal(all)
		if err != nil {
			return err
		}
		if len(text) > maxSealed {
			return agentlab.Errorf(agentlab.CodeLimit, "the secrets of job %s have more than %d bytes", jobID, maxSealed)
		}
		if err := os.MkdirAll(v.deliveredDir(), 0o700); err != nil {
			return fault(v.deliveredDir(), err)
		}
		return v.seal(path, text)
	})
}

// Delivered returns what SaveDelivered stored for a job; ok reports whether it did.
func (v *Vault) Delivered(jobID string) (values []string, ok bool, err error) {
	path, err := v.deliveredPath(jobID)
	if err != nil {
		return nil, false, err
	}
	text, err := v.open(path, maxSealed)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, false, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &values)
	}
	if err != nil {
		return nil, false, agentlab.Errorf(agentlab.CodeInvalid, "cannot read the stored secrets of job %s from %s", jobID, path)
	}
	return values, true, nil
}

// deliveredIDs returns the jobs for which SaveDelivered stored values.
func (v *Vault) deliveredIDs() ([]string, error) {
	files, err := readDir(v.deliveredDir())
	var ids []string
	for _, f := range files {
		if id, ok := strings.CutSuffix(f.Name(), ".age"); ok {
			ids = append(ids, id)
		}
	}
	return ids, err
}

// Known returns all values that can be read without resolving a reference: those of
// every bundle, and those that were delivered to guests that still exist. It returns
// an error if one of the files cannot be read, because the list would be incomplete.
func (v *Vault) Known(ctx context.Context) ([]string, error) {
	names, err := v.List()
	if err != nil {
		return nil, err
	}
	var all []string
	for _, name := range names {
		plain, _, err := v.Outline(ctx, name)
		if err != nil {
			return nil, err
		}
		all = append(append(all, plain.Values()...), redact.SettingsSecrets(plain.ClaudeSettingsJSON)...)
	}
	ids, err := v.deliveredIDs()
	if err != nil {
		return nil, err
	}
	for _, id := range ids {
		values, _, err := v.Delivered(id)
		if err != nil {
			return nil, err
		}
		all = append(all, values...)
	}
	return all, nil
}

// SweepDelivered deletes the values of every job for which done reports that its
// guest can no longer send data, and returns the number of these jobs.
func (v *Vault) SweepDelivered(ctx context.Context, done func(ctx context.Context, jobID string) (bool, error)) (n int, err error) {
	ids, err := v.deliveredIDs()
	if err != nil {
		return 0, err
	}
	for _, id := range ids {
		over, err := done(ctx, id)
		if err != nil {
			return n, err
		}
		if !over {
			continue
		}
		if err := os.Remove(filepath.Join(v.deliveredDir(), id+".age")); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return n, fault(v.deliveredDir(), err)
		}
		n++
	}
	return n, nil
}
