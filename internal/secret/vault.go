package secret

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/lock"
	"github.com/agentlab-vm/agentlab/internal/strictyaml"
)

// DefaultBundle is a bundle that counts as empty if it does not exist, so that
// the shipped profiles work before any secret is set.
const DefaultBundle = "default"

// The file formats of a bundle, by the suffix of its file.
const (
	FormatAge  = "age"  // NAME.age: AgentLab's own
	FormatSops = "sops" // NAME.sops.yaml: read with the program sops, changed with it only
)

const sopsSuffix = ".sops.yaml"

// Vault is a directory of bundles, each encrypted to the identity in
// identity.txt and to the recipients in recipients.txt. Values are decrypted
// in memory, when they are needed. It may be used from any goroutine and
// process.
type Vault struct {
	dir string
}

// NewVault returns the vault in dir, which need not exist yet.
func NewVault(dir string) *Vault { return &Vault{dir: dir} }

// Init creates the directory (0700) and the identity (0600) if they are
// missing. An existing identity is never replaced: bundles that are encrypted
// to it would be lost.
func (v *Vault) Init() error {
	if err := os.MkdirAll(v.dir, 0o700); err != nil {
		return fault(v.dir, err)
	}
	if err := v.checkDir(); err != nil {
		return err
	}
	if _, err := os.Lstat(v.identityPath()); err == nil {
		_, err := v.identities()
		return err
	} else if !errors.Is(err, fs.ErrNotExist) {
		return fault(v.identityPath(), err)
	}
	id, err := newIdentity()
	if err != nil {
		return err
	}
	err = durable.Create(v.identityPath(), identityText([]identity{id}))
	if err == nil || errors.Is(err, fs.ErrExist) { // another process was faster
		return nil
	}
	return fault(v.identityPath(), err)
}

// checkDir refuses a directory in which other users could put bundles,
// or see which there are. A missing one is fine.
func (v *Vault) checkDir() error {
	st, err := os.Stat(v.dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fault(v.dir, err)
	case !st.IsDir():
		return agentlab.Errorf(agentlab.CodeInvalid, "%s is not a directory", v.dir)
	}
	if bad := checkMode(v.dir, st, 0o077); bad != nil {
		return bad
	}
	return nil
}

// Deliver decrypts a bundle and resolves its references, only for the keys
// that want selects; nil selects all. Codes: not_found if the bundle does not
// exist, except DefaultBundle, which is empty then; for a reference, invalid,
// not_found and denied are permanent, unavailable and timeout may be
// temporary.
func (v *Vault) Deliver(ctx context.Context, name string, want func(key string) bool) (Bundle, error) {
	b, err := v.load(ctx, name)
	if err != nil {
		return Bundle{}, err
	}
	out, err := resolve(ctx, b.selectKeys(want))
	if err != nil {
		return Bundle{}, agentlab.Errorf(agentlab.CodeOf(err), "secrets bundle %q: %w", name, err).WithHint("%s", agentlab.HintOf(err))
	}
	return out, nil
}

// Check reports whether a bundle exists and can be read. References are not
// resolved. Codes as Deliver.
func (v *Vault) Check(ctx context.Context, name string) error {
	_, err := v.load(ctx, name)
	return err
}

// load decrypts a stored bundle.
func (v *Vault) load(ctx context.Context, name string) (Bundle, error) {
	text, err := v.text(ctx, name)
	if err != nil {
		return Bundle{}, err
	}
	b, err := parseBundle(text)
	if err != nil {
		return Bundle{}, agentlab.Errorf(agentlab.CodeInvalid, "secrets bundle %q: %w", name, err).WithHint("%s", agentlab.HintOf(err))
	}
	return b, nil
}

// text decrypts the text of a bundle; DefaultBundle is empty while it is
// missing.
func (v *Vault) text(ctx context.Context, name string) ([]byte, error) {
	format, err := v.format(name)
	switch {
	case err != nil:
		return nil, err
	case format == FormatSops:
		return v.decryptSops(ctx, v.sopsPath(name))
	case format == "" && name == DefaultBundle:
		return nil, nil
	case format == "":
		return nil, noBundle(name)
	}
	text, err := v.open(v.path(name), strictyaml.MaxBytes)
	if agentlab.CodeOf(err) == agentlab.CodeInvalid {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "the secrets bundle %q cannot be decrypted with %s", name, v.identityPath()).
			WithHint("it is damaged or was encrypted with another identity; restore it from a backup, or remove %s and set its values again", v.path(name))
	}
	return text, err
}

// format returns the form in which a bundle is stored, "" when it does not exist.
func (v *Vault) format(name string) (string, error) {
	if err := checkName(name); err != nil {
		return "", err
	}
	if err := v.checkDir(); err != nil {
		return "", err
	}
	found := ""
	for _, f := range []struct{ format, path string }{{FormatAge, v.path(name)}, {FormatSops, v.sopsPath(name)}} {
		_, err := os.Stat(f.path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return "", fault(f.path, err)
		case found != "":
			return "", agentlab.Errorf(agentlab.CodeConflict, "the secrets bundle %q exists twice: %s and %s", name, v.path(name), v.sopsPath(name)).
				WithHint("remove one of them")
		default:
			found = f.format
		}
	}
	return found, nil
}

// save encrypts b and writes it atomically as the bundle with that name.
func (v *Vault) save(name string, b Bundle) error {
	plain, err := b.marshal()
	if err != nil {
		return err
	}
	if len(plain) > strictyaml.MaxBytes {
		return agentlab.Errorf(agentlab.CodeLimit, "the secrets bundle %q would have more than %d bytes", name, strictyaml.MaxBytes)
	}
	return v.seal(v.path(name), plain)
}

// Create creates an empty bundle. Code exists if there is one with that name.
func (v *Vault) Create(ctx context.Context, name string) error {
	return v.locked(ctx, func() error {
		format, err := v.format(name)
		if err != nil {
			return err
		}
		if format != "" {
			return agentlab.Errorf(agentlab.CodeExists, "the secrets bundle %q already exists", name).WithField("name")
		}
		return v.save(name, Bundle{})
	})
}

// Set reads a value and stores it under key: "env.NAME", "ssh_keys.HOST", or
// one of the names in docs/secrets.md such as "git.token". One newline at the
// value's end is dropped, and SSH texts always end in one. With reference, the
// value is stored as a reference and not resolved; otherwise it is always
// stored as a literal.
func (v *Vault) Set(ctx context.Context, name, key string, value io.Reader, reference bool) error {
	data, err := io.ReadAll(io.LimitReader(value, MaxValueBytes+2))
	if err != nil {
		return agentlab.Errorf(agentlab.CodeInvalid, "the value cannot be read").WithField(key)
	}
	if err := checkKey(key); err != nil {
		return err
	}
	text := normalize(key, string(data))
	if reference {
		text = strings.TrimSpace(text)
		if _, ok := parseReference(text); !ok {
			return agentlab.Errorf(agentlab.CodeInvalid, "the value is not a reference").WithField(key).
				WithHint("a reference begins with op://, env:, file: or cmd:")
		}
		err = checkReference(key, text)
	} else {
		err = checkValue(key, text)
		text = storeLiteral(text)
	}
	if err != nil {
		return err
	}
	return v.change(ctx, name, func(b *Bundle) error {
		b.put(key, text)
		return nil
	})
}

// Unset removes the value under key; not_found if it is not set.
func (v *Vault) Unset(ctx context.Context, name, key string) error {
	return v.change(ctx, name, func(b *Bundle) error { return b.unset(key) })
}

// locked runs fn under the lock of the vault, so that there is no other
// change.
func (v *Vault) locked(ctx context.Context, fn func() error) error {
	if err := v.Init(); err != nil {
		return err
	}
	l, err := lock.Acquire(ctx, filepath.Join(v.dir, ".lock"))
	if err != nil {
		return err
	}
	defer func() { _ = l.Unlock() }()
	return fn()
}

// change loads a bundle, lets fn change it and saves it. A missing bundle
// counts as empty.
func (v *Vault) change(ctx context.Context, name string, fn func(*Bundle) error) error {
	return v.locked(ctx, func() error {
		format, err := v.format(name)
		if err != nil {
			return err
		}
		if format == FormatSops {
			return v.sopsOnly(name)
		}
		b := Bundle{}
		if format != "" {
			if b, err = v.load(ctx, name); err != nil {
				return err
			}
		}
		if err := fn(&b); err != nil {
			return err
		}
		return v.save(name, b)
	})
}

// Keys returns the names of the values in a bundle, never a value.
func (v *Vault) Keys(ctx context.Context, name string) ([]string, error) {
	b, err := v.load(ctx, name)
	if err != nil {
		return nil, err
	}
	return b.Keys(), nil
}

// List returns the names of the bundles that exist, sorted.
func (v *Vault) List() ([]string, error) {
	if err := v.checkDir(); err != nil {
		return nil, err
	}
	files, err := os.ReadDir(v.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fault(v.dir, err)
	}
	names := []string{}
	for _, f := range files {
		for _, suffix := range []string{".age", sopsSuffix} {
			if name, ok := strings.CutSuffix(f.Name(), suffix); ok && checkName(name) == nil {
				names = append(names, name)
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

func (v *Vault) path(name string) string { return filepath.Join(v.dir, name+".age") }

func (v *Vault) sopsPath(name string) string { return filepath.Join(v.dir, name+sopsSuffix) }

func checkName(name string) error {
	if err := agentlab.ValidateName(name); err != nil {
		return agentlab.Errorf(agentlab.CodeInvalid, "%q is not the name of a secrets bundle", name).WithField("secrets_bundle").WithHint("%s", agentlab.HintOf(err))
	}
	return nil
}
