package secret

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"filippo.io/age"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
	"github.com/agentlab-vm/agentlab/internal/lock"
	"github.com/agentlab-vm/agentlab/internal/strictyaml"
)

// DefaultBundle is the bundle that is empty, rather than an error, while it
// does not exist, so that the shipped profiles work before any secret is set.
const DefaultBundle = "default"

// Vault is a directory of bundles: BUNDLE.age, each encrypted to the identity
// in identity.txt. Values are decrypted in memory, when they are asked for.
// It may be used from any goroutine and process.
type Vault struct{ dir string }

// NewVault returns the vault in dir, which need not exist yet.
func NewVault(dir string) *Vault { return &Vault{dir: dir} }

func (v *Vault) identityPath() string { return filepath.Join(v.dir, "identity.txt") }

// Init makes the directory (0700) and the identity (0600) when they are
// missing. An identity that is there is never replaced: with it, what it
// encrypted would be lost.
func (v *Vault) Init() error {
	if err := os.MkdirAll(v.dir, 0o700); err != nil {
		return fault(v.dir, err)
	}
	if _, err := os.Lstat(v.identityPath()); err == nil {
		_, err := v.identity()
		return err
	} else if !errors.Is(err, fs.ErrNotExist) {
		return fault(v.identityPath(), err)
	}
	id, err := age.GenerateX25519Identity()
	if err != nil {
		return fault(v.identityPath(), err)
	}
	text := fmt.Sprintf("# AgentLab: this key opens the secrets bundles beside it. Keep it, and keep it secret.\n# public key: %s\n%s\n", id.Recipient(), id)
	err = writeFile(v.identityPath(), []byte(text), false)
	if errors.Is(err, fs.ErrExist) { // another process was quicker
		err = nil
	}
	return err
}

func (v *Vault) identity() (*age.X25519Identity, error) {
	path := v.identityPath()
	f, err := os.Open(path)
	if err != nil {
		e := fault(path, err)
		if errors.Is(err, fs.ErrNotExist) {
			e = agentlab.Errorf(agentlab.CodeNotFound, "the identity %s is missing", path).
				WithHint("put it back from a copy: without it the bundles beside it cannot be read")
		}
		return nil, e
	}
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil {
		return nil, fault(path, err)
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	switch {
	case st.Mode().Perm()&0o077 != 0:
		return nil, agentlab.Errorf(agentlab.CodeDenied, "other users can read %s (mode %04o)", path, st.Mode().Perm()).WithHint("chmod 600 %s", path)
	case ok && int(sys.Uid) != os.Geteuid():
		return nil, agentlab.Errorf(agentlab.CodeDenied, "%s belongs to user %d", path, sys.Uid).WithHint("it must belong to the user that runs agentlabd")
	}
	data, err := io.ReadAll(io.LimitReader(f, 64<<10))
	if err != nil {
		return nil, fault(path, err)
	}
	for l := range strings.Lines(string(data)) {
		if l = strings.TrimSpace(l); l == "" || l[0] == '#' {
			continue
		}
		id, err := age.ParseX25519Identity(l)
		if err != nil { // the error may repeat a part of the key
			break
		}
		return id, nil
	}
	return nil, agentlab.Errorf(agentlab.CodeInvalid, "%s holds no age identity", path).WithHint("put it back from a copy")
}

// Load decrypts a bundle. Code not_found when it does not exist, but for
// DefaultBundle, which is empty then.
func (v *Vault) Load(name string) (Bundle, error) {
	if err := checkName(name); err != nil {
		return Bundle{}, err
	}
	path := v.path(name)
	sealed, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if name == DefaultBundle {
			return Bundle{}, nil
		}
		return Bundle{}, agentlab.Errorf(agentlab.CodeNotFound, "there is no secrets bundle %q", name).WithField("secrets_bundle").
			WithHint("make it by setting a first value: agentlab secrets set --bundle %s KEY", name)
	}
	if err != nil {
		return Bundle{}, fault(path, err)
	}
	id, err := v.identity()
	if err != nil {
		return Bundle{}, err
	}
	r, err := age.Decrypt(bytes.NewReader(sealed), id)
	if err == nil {
		sealed, err = io.ReadAll(io.LimitReader(r, strictyaml.MaxBytes+1))
	}
	if err != nil {
		return Bundle{}, agentlab.Errorf(agentlab.CodeInvalid, "the secrets bundle %q cannot be decrypted with %s", name, v.identityPath()).
			WithHint("it is damaged or was made with another identity; put back a copy, or remove %s and set its values again", path)
	}
	b, err := parseBundle(sealed)
	if err != nil {
		return Bundle{}, agentlab.Errorf(agentlab.CodeInvalid, "secrets bundle %q: %w", name, err)
	}
	return b, nil
}

// Save encrypts b as the bundle with that name, whole or not at all.
func (v *Vault) Save(name string, b Bundle) error {
	if err := checkName(name); err != nil {
		return err
	}
	if err := v.Init(); err != nil {
		return err
	}
	id, err := v.identity()
	if err != nil {
		return err
	}
	plain, err := b.marshal()
	if err != nil {
		return err
	}
	if len(plain) > strictyaml.MaxBytes {
		return agentlab.Errorf(agentlab.CodeLimit, "the secrets bundle %q would have more than %d bytes", name, strictyaml.MaxBytes)
	}
	var sealed bytes.Buffer
	w, err := age.Encrypt(&sealed, id.Recipient())
	if err == nil {
		_, err = w.Write(plain)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		return fault(v.path(name), err)
	}
	return writeFile(v.path(name), sealed.Bytes(), true)
}

// Set reads a value and stores it under key: "env.NAME", or one of git.url,
// git.token, git.username, git.ssh_private_key, git.ssh_known_hosts and
// claude_settings_json. One newline at the value's end is dropped, and the
// two SSH texts always end in one.
func (v *Vault) Set(ctx context.Context, name, key string, value io.Reader) error {
	data, err := io.ReadAll(io.LimitReader(value, MaxValueBytes+2))
	if err != nil {
		return agentlab.Errorf(agentlab.CodeInvalid, "the value cannot be read").WithField(key)
	}
	text := strings.TrimSuffix(strings.TrimSuffix(string(data), "\n"), "\r")
	if text != "" && strings.HasPrefix(key, "git.ssh_") {
		text = strings.TrimRight(text, "\r\n") + "\n"
	}
	return v.change(ctx, name, func(b *Bundle) error { return b.set(key, text) })
}

// Unset removes the value under key; not_found when it is not set.
func (v *Vault) Unset(ctx context.Context, name, key string) error {
	return v.change(ctx, name, func(b *Bundle) error { return b.unset(key) })
}

// change loads a bundle, lets fn change it and saves it, while no other
// change of the vault is under way. A missing bundle begins empty.
func (v *Vault) change(ctx context.Context, name string, fn func(*Bundle) error) error {
	if err := checkName(name); err != nil {
		return err
	}
	if err := v.Init(); err != nil {
		return err
	}
	l, err := lock.Acquire(ctx, filepath.Join(v.dir, ".lock"))
	if err != nil {
		return err
	}
	defer func() { _ = l.Unlock() }()
	b, err := v.Load(name)
	if err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound {
		return err
	}
	if err != nil {
		if _, serr := os.Lstat(v.path(name)); serr == nil {
			return err // the bundle is there, its identity is not
		}
	}
	if err := fn(&b); err != nil {
		return err
	}
	return v.Save(name, b)
}

// Keys returns the names of the values in a bundle, never a value.
func (v *Vault) Keys(name string) ([]string, error) {
	b, err := v.Load(name)
	if err != nil {
		return nil, err
	}
	return b.Keys(), nil
}

// List returns the names of the bundles that exist, sorted.
func (v *Vault) List() ([]string, error) {
	files, err := os.ReadDir(v.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fault(v.dir, err)
	}
	names := []string{}
	for _, f := range files {
		if name, ok := strings.CutSuffix(f.Name(), ".age"); ok && checkName(name) == nil {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

func (v *Vault) path(name string) string { return filepath.Join(v.dir, name+".age") }

func checkName(name string) error {
	if err := agentlab.ValidateName(name); err != nil {
		return agentlab.Errorf(agentlab.CodeInvalid, "%q is not the name of a secrets bundle", name).WithField("secrets_bundle").WithHint("%s", agentlab.HintOf(err))
	}
	return nil
}

// writeFile makes a private file whole or not at all; without replace, an
// existing one is fs.ErrExist.
func writeFile(path string, data []byte, replace bool) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), ".tmp-*") // mode 0600
	if err != nil {
		return fault(path, err)
	}
	defer func() {
		_ = os.Remove(f.Name())
		if err != nil {
			err = fault(path, err)
		}
	}()
	_, werr := f.Write(data)
	if err := errors.Join(werr, f.Sync(), f.Close()); err != nil {
		return err
	}
	if replace {
		err = os.Rename(f.Name(), path)
	} else {
		err = os.Link(f.Name(), path) // unlike rename, it never replaces
	}
	if err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func fault(path string, err error) error { return fsfault.At(path, err) }
