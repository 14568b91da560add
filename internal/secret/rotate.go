package secret

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/durable"
)

// Rotation describes what a rotation did.
type Rotation struct {
	PublicKey  string   // of the new identity
	Recipients []string // further recipients of bundles
	Bundles    []string // that were encrypted again
	Kept       []string // public keys of older identities that sops bundles still need
}

// Rotate creates a new identity, changes the further recipients, and encrypts
// every bundle again, one by one. Until all are done the older identities stay
// valid, so that readers, in this process and others, can read every bundle at
// any time; writers wait. After a crash at any point it can be run again.
// Codes: invalid if a bundle cannot be decrypted (then nothing is changed) or
// a recipient is not valid, not_found if a recipient to remove does not exist.
func (v *Vault) Rotate(ctx context.Context, add, remove []string) (r Rotation, err error) {
	err = v.locked(ctx, func() error {
		r, err = v.rotate(ctx, add, remove)
		return err
	})
	return r, err
}

func (v *Vault) rotate(ctx context.Context, add, remove []string) (Rotation, error) {
	if err := v.sweep(); err != nil {
		return Rotation{}, err
	}
	others, err := v.changeRecipients(add, remove)
	if err != nil {
		return Rotation{}, err
	}
	files, err := v.encryptedFiles()
	if err != nil {
		return Rotation{}, err
	}
	old, err := v.identities()
	if err != nil {
		return Rotation{}, err
	}
	for _, path := range files {
		if _, err := v.open(path, maxSealed); err != nil && !v.deletedMeanwhile(path, err) {
			return Rotation{}, agentlab.Errorf(agentlab.CodeOf(err), "%s cannot be decrypted, so nothing was changed: %w", path, err).
				WithHint("restore it from a backup, or remove it")
		}
	}
	fresh, err := newIdentity()
	if err != nil {
		return Rotation{}, err
	}
	if err := step(ctx, func() error {
		return replaceFile(v.identityPath(), identityText(append([]identity{fresh}, old...)))
	}); err != nil {
		return Rotation{}, err
	}
	if err := step(ctx, func() error { return v.writeRecipients(others) }); err != nil {
		return Rotation{}, err
	}
	r := Rotation{PublicKey: fresh.public, Recipients: others, Bundles: []string{}, Kept: []string{}}
	for _, path := range files {
		if err := step(ctx, func() error { return v.reencrypt(path, fresh) }); err != nil && !v.deletedMeanwhile(path, err) {
			return Rotation{}, err
		}
		if filepath.Dir(path) == v.dir {
			r.Bundles = append(r.Bundles, strings.TrimSuffix(filepath.Base(path), ".age"))
		}
	}
	keep, err := v.usedBySops(old)
	if err != nil {
		return Rotation{}, err
	}
	for _, id := range keep {
		r.Kept = append(r.Kept, id.public)
	}
	return r, step(ctx, func() error {
		return replaceFile(v.identityPath(), identityText(append([]identity{fresh}, keep...)))
	})
}

// sweep deletes the temporary files of writers that were killed, which may
// contain an identity. The vault must be locked.
func (v *Vault) sweep() error {
	for _, dir := range []string{v.dir, v.deliveredDir()} {
		if err := durable.RemoveTemps(dir, -1); err != nil {
			return fault(dir, err)
		}
	}
	return nil
}

// step runs one step of a rotation, unless ctx has ended. Between two steps
// every bundle is readable.
func step(ctx context.Context, fn func() error) error {
	if ctx.Err() != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "the rotation was interrupted; every bundle can be read").WithHint("run it again")
	}
	return fn()
}

// deletedMeanwhile reports whether a file could not be read because the values of a
// job were deleted in the meantime. That deletion does not wait for a rotation.
func (v *Vault) deletedMeanwhile(path string, err error) bool {
	return filepath.Dir(path) == v.deliveredDir() && errors.Is(err, fs.ErrNotExist)
}

// reencrypt encrypts a file to the current recipients, and checks that the new
// identity alone decrypts it, before the old identities are removed.
func (v *Vault) reencrypt(path string, fresh identity) error {
	plain, err := v.open(path, maxSealed)
	if err != nil {
		return err
	}
	if err := v.seal(path, plain); err != nil {
		return err
	}
	sealed, err := readPrivate(path, 3*maxSealed, 0o022)
	if err != nil {
		return err
	}
	_, err = decrypt(sealed, maxSealed, []identity{fresh})
	return err
}

// maxSealed is larger than any file of the vault.
const maxSealed = 4 << 20

// encryptedFiles lists every file of the vault that AgentLab encrypts.
func (v *Vault) encryptedFiles() ([]string, error) {
	var out []string
	for _, dir := range []string{v.dir, v.deliveredDir()} {
		files, err := readDir(dir)
		if err != nil {
			return nil, err
		}
		for _, f := range files {
			if strings.HasSuffix(f.Name(), ".age") && !f.IsDir() {
				out = append(out, filepath.Join(dir, f.Name()))
			}
		}
	}
	return out, nil
}

// changeRecipients returns the new list of further recipients.
func (v *Vault) changeRecipients(add, remove []string) ([]string, error) {
	others, err := v.extraRecipients()
	if err != nil {
		return nil, err
	}
	for _, text := range remove {
		i := slices.Index(others, strings.TrimSpace(text))
		if i < 0 {
			return nil, agentlab.Errorf(agentlab.CodeNotFound, "%.100q is not a recipient of these bundles", text).WithField("remove")
		}
		others = slices.Delete(others, i, i+1)
	}
	for _, text := range add {
		text = strings.TrimSpace(text)
		if _, err := parseRecipient(text); err != nil {
			return nil, err
		}
		if !slices.Contains(others, text) {
			others = append(others, text)
		}
	}
	if others == nil {
		others = []string{}
	}
	return others, nil
}

func (v *Vault) writeRecipients(others []string) error {
	if len(others) == 0 {
		if _, err := os.Lstat(v.recipientsPath()); err != nil {
			return nil //nolint:nilerr // nothing to empty
		}
	}
	text := "# AgentLab: who can open the secrets bundles beside this file, besides identity.txt.\n# After a manual change run: agentlab secrets rotate\n"
	return replaceFile(v.recipientsPath(), []byte(text+strings.Join(append(others[:len(others):len(others)], ""), "\n")))
}

// usedBySops returns the identities that a sops bundle names as recipients.
// They are kept at a rotation, which cannot change such a file.
func (v *Vault) usedBySops(ids []identity) ([]identity, error) {
	files, err := readDir(v.dir)
	if err != nil {
		return nil, err
	}
	var keep []identity
	for _, f := range files {
		if !strings.HasSuffix(f.Name(), sopsSuffix) {
			continue
		}
		text, err := readPrivate(filepath.Join(v.dir, f.Name()), maxSealed, 0o022)
		if err != nil {
			return nil, err
		}
		for _, id := range ids {
			known := slices.ContainsFunc(keep, func(k identity) bool { return k.public == id.public })
			if !known && strings.Contains(string(text), id.public) {
				keep = append(keep, id)
			}
		}
	}
	return keep, nil
}
