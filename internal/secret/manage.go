package secret

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"

	"github.com/agentlab-vm/agentlab"
)

// Operations of users on bundles: show, edit, check.

// Info is one bundle in a list.
type Info struct {
	Name    string
	Format  string   // FormatAge or FormatSops
	Keys    []string // nil if it cannot be read
	Problem string   // why it cannot be read
}

// Bundles lists the bundles that exist, sorted by name. One that cannot be
// read is listed with the reason.
func (v *Vault) Bundles(ctx context.Context) ([]Info, error) {
	names, err := v.List()
	if err != nil {
		return nil, err
	}
	out := make([]Info, 0, len(names))
	for _, name := range names {
		i := Info{Name: name}
		if i.Format, err = v.format(name); err == nil {
			i.Keys, err = v.Keys(ctx, name)
		}
		if err != nil {
			i.Problem = err.Error()
		}
		out = append(out, i)
	}
	return out, nil
}

// Entry is one value of a bundle.
type Entry struct {
	Key       string
	Reference string // the source of the value; "" for a literal
	Value     string // of a literal, when it must be revealed
}

// Entries lists the contents of a bundle, with the values of literals only if
// reveal is set. References are not resolved.
func (v *Vault) Entries(ctx context.Context, name string, reveal bool) ([]Entry, error) {
	b, err := v.load(ctx, name)
	if err != nil {
		return nil, err
	}
	out := []Entry{}
	for _, e := range b.entries() {
		x := Entry{Key: e.key}
		if _, ok := parseReference(e.value); ok {
			x.Reference = e.value
		} else if reveal {
			x.Value = literal(e.value)
		}
		out = append(out, x)
	}
	return out, nil
}

// Text returns the plain text of a bundle for editing, and its version for
// Replace. Code not_found if the bundle does not exist.
func (v *Vault) Text(ctx context.Context, name string) (text, version string, err error) {
	format, err := v.format(name)
	switch {
	case err != nil:
		return "", "", err
	case format == FormatSops:
		return "", "", v.sopsOnly(name)
	case format == "":
		return "", "", noBundle(name)
	}
	data, err := v.text(ctx, name)
	return string(data), versionOf(data), err
}

// Replace replaces the content of a bundle with text. version is the version
// that Text returned, "" if there was no bundle. Codes: invalid, conflict if
// the bundle has changed in the meantime, limit.
func (v *Vault) Replace(ctx context.Context, name, text, version string) error {
	b, err := parseBundle([]byte(text))
	if err != nil {
		return err
	}
	return v.locked(ctx, func() error {
		_, now, err := v.Text(ctx, name)
		if err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound {
			return err
		}
		if now != version {
			return agentlab.Errorf(agentlab.CodeConflict, "the secrets bundle %q was changed by another user or process in the meantime", name).
				WithHint("edit it again: agentlab secrets edit --bundle %s", name)
		}
		return v.save(name, b)
	})
}

func versionOf(text []byte) string {
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:16])
}

// Exists returns an error of code not_found if there is no bundle with that name. It
// does not read the bundle.
func (v *Vault) Exists(_ context.Context, name string) error {
	format, err := v.format(name)
	if err == nil && format == "" && name != DefaultBundle {
		return noBundle(name)
	}
	return err
}

func noBundle(name string) error {
	return agentlab.Errorf(agentlab.CodeNotFound, "there is no secrets bundle %q", name).WithField("secrets_bundle").
		WithHint("create it: agentlab secrets create %s", name)
}

func (v *Vault) sopsOnly(name string) error {
	return agentlab.Errorf(agentlab.CodeUnsupported, "the secrets bundle %q is encrypted with sops", name).
		WithHint("change it with: sops %s", v.sopsPath(name))
}

// Finding is a problem of the vault or a bundle.
type Finding struct {
	Bundle  string // "" for the vault itself
	Key     string // of a value; may be empty
	Problem string
	Hint    string
}

// Validate checks the vault's directory and keys, and the bundles: one by its
// name, or all for "". With resolving it also resolves every reference and
// discards the value. It returns the problems, and the names of the bundles
// that it checked.
func (v *Vault) Validate(ctx context.Context, name string, resolving bool) (checked []string, found []Finding, err error) {
	if name != "" {
		if err := v.Check(ctx, name); agentlab.CodeOf(err) == agentlab.CodeNotFound {
			return nil, nil, err
		}
		checked = []string{name}
	} else if checked, err = v.List(); err != nil {
		return nil, nil, err
	}
	found = []Finding{}
	note := func(bundle string, err error) {
		if err == nil {
			return
		}
		f := Finding{Bundle: bundle, Problem: err.Error(), Hint: agentlab.HintOf(err)}
		if e, ok := errors.AsType[*agentlab.Error](err); ok && e.Field != "" {
			f.Key, f.Problem = e.Field, e.Message
		}
		found = append(found, f)
	}
	if _, err := v.identities(); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		note("", err)
	} else if files, lerr := v.encryptedFiles(); lerr != nil || len(files) > 0 { // otherwise none is needed yet
		note("", err)
	}
	_, err = v.extraRecipients()
	note("", err)
	for _, bundle := range checked {
		b, err := v.load(ctx, bundle)
		if err != nil {
			note(bundle, err)
			continue
		}
		if !resolving {
			continue
		}
		for _, e := range b.entries() {
			_, err := resolve(ctx, b.selectKeys(func(key string) bool { return key == e.key }))
			note(bundle, err)
		}
	}
	return checked, found, nil
}
