package secret

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"filippo.io/age"
	"filippo.io/age/agessh"

	"github.com/agentlab-vm/agentlab"
)

// identity is a key pair that opens bundles.
type identity struct {
	age.Identity
	recipient age.Recipient
	public    string // age1…
	private   string // AGE-SECRET-KEY-1…
}

func newIdentity() (identity, error) {
	id, err := age.GenerateX25519Identity()
	if err != nil {
		return identity{}, agentlab.Errorf(agentlab.CodeInternal, "cannot create an identity: %w", err)
	}
	return identity{id, id.Recipient(), id.Recipient().String(), id.String()}, nil
}

func parseIdentity(line string) (identity, bool) {
	id, err := age.ParseX25519Identity(line)
	if err != nil { // the error may contain a part of the key
		return identity{}, false
	}
	return identity{id, id.Recipient(), id.Recipient().String(), id.String()}, true
}

// identityText returns the content of the identity file. Bundles are encrypted
// to the first identity; all can decrypt them.
func identityText(ids []identity) []byte {
	var b bytes.Buffer
	b.WriteString("# AgentLab: this key opens the secrets bundles beside it. Keep it, and keep it secret.\n")
	for i, id := range ids {
		if i > 0 {
			b.WriteString("# an older key, which bundles may still need\n")
		}
		fmt.Fprintf(&b, "# public key: %s\n%s\n", id.public, id.private)
	}
	return b.Bytes()
}

func (v *Vault) identityPath() string { return filepath.Join(v.dir, "identity.txt") }

func (v *Vault) recipientsPath() string { return filepath.Join(v.dir, "recipients.txt") }

// identities reads the keys that decrypt bundles, at least one. Bundles are
// encrypted to the first.
func (v *Vault) identities() ([]identity, error) {
	path := v.identityPath()
	data, err := readPrivate(path, 64<<10, 0o077)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, agentlab.Errorf(agentlab.CodeNotFound, "the identity %s is missing", path).
			WithHint("restore it from a backup: without it the bundles in this directory cannot be read")
	}
	if err != nil {
		return nil, err
	}
	var ids []identity
	for l := range strings.Lines(string(data)) {
		if l = strings.TrimSpace(l); l == "" || l[0] == '#' {
			continue
		}
		id, ok := parseIdentity(l)
		if !ok {
			ids = nil
			break
		}
		ids = append(ids, id)
	}
	if len(ids) == 0 {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%s contains no valid age identity", path).WithHint("restore it from a backup")
	}
	return ids, nil
}

// extraRecipients reads the further recipients of all bundles, as text.
func (v *Vault) extraRecipients() ([]string, error) {
	data, err := readPrivate(v.recipientsPath(), 64<<10, 0o022)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []string
	for l := range strings.Lines(string(data)) {
		if l = strings.TrimSpace(l); l != "" && l[0] != '#' {
			if _, err := parseRecipient(l); err != nil {
				return nil, err
			}
			out = append(out, l)
		}
	}
	return out, nil
}

// parseRecipient reads a public key: age's own or an SSH key.
func parseRecipient(text string) (age.Recipient, error) {
	parse := func(s string) (age.Recipient, error) { return age.ParseX25519Recipient(s) }
	if strings.HasPrefix(text, "ssh-") {
		parse = agessh.ParseRecipient
	}
	r, err := parse(text)
	if err != nil || strings.ContainsAny(text, "\r\n") {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%.100q is not a recipient", text).WithField("recipient").
			WithHint("a recipient is a public key: age1…, ssh-ed25519 … or ssh-rsa …")
	}
	return r, nil
}

// recipients returns the current recipients of bundles.
func (v *Vault) recipients() ([]age.Recipient, error) {
	ids, err := v.identities()
	if err != nil {
		return nil, err
	}
	others, err := v.extraRecipients()
	if err != nil {
		return nil, err
	}
	out := []age.Recipient{ids[0].recipient}
	for _, text := range others {
		r, err := parseRecipient(text)
		if err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	return out, nil
}

// seal encrypts plain to the current recipients and writes the file at path
// atomically.
func (v *Vault) seal(path string, plain []byte) error {
	rs, err := v.recipients()
	if err != nil {
		return err
	}
	var sealed bytes.Buffer
	w, err := age.Encrypt(&sealed, rs...)
	if err == nil {
		_, err = w.Write(plain)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		return agentlab.Errorf(agentlab.CodeInvalid, "cannot encrypt to all recipients in %s", v.recipientsPath()).
			WithHint("remove the last recipient; some kinds of keys cannot be mixed")
	}
	return replaceFile(path, sealed.Bytes())
}

// open decrypts the file at path, which holds at most limit bytes. The error
// has code invalid if it cannot be decrypted. A rotation may begin or end
// between its two reads, so it tries again if the keys do not fit.
func (v *Vault) open(path string, limit int64) (plain []byte, err error) {
	for range 3 {
		sealed, rerr := readPrivate(path, 2*limit+64<<10, 0o022)
		if rerr != nil {
			return nil, rerr
		}
		ids, rerr := v.identities()
		if rerr != nil {
			return nil, rerr
		}
		if plain, err = decrypt(sealed, limit, ids); err == nil {
			return plain, nil
		}
	}
	return nil, err
}

func decrypt(sealed []byte, limit int64, ids []identity) ([]byte, error) {
	keys := make([]age.Identity, len(ids))
	for i, id := range ids {
		keys[i] = id.Identity
	}
	var plain []byte
	r, err := age.Decrypt(bytes.NewReader(sealed), keys...)
	if err == nil {
		plain, err = io.ReadAll(io.LimitReader(r, limit+1))
	}
	if err != nil || int64(len(plain)) > limit {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "it cannot be decrypted")
	}
	return plain, nil
}

func readDir(dir string) ([]os.DirEntry, error) {
	files, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fault(dir, err)
	}
	return files, nil
}

// Public returns the public key of the vault's own identity, and the further
// recipients of its bundles.
func (v *Vault) Public() (own string, others []string, err error) {
	ids, err := v.identities()
	if err != nil {
		return "", nil, err
	}
	others, err = v.extraRecipients()
	return ids[0].public, append([]string{}, others...), err
}
