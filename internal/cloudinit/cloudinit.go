// Package cloudinit renders the seeds of guests that cloud-init sets up. Seeds
// contain no secrets: a seed is on a disk of the sandbox and in a file of the
// host.
package cloudinit

import (
	"encoding/base64"
	"encoding/json"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// MaxSize is the maximum size of user-data in bytes: Proxmox rejects snippets
// above 1 MiB.
const MaxSize = 1 << 20

// Seed is the configuration of one guest.
type Seed struct {
	Hostname string   // a DNS label
	User     string   // name of the template's default user; default "agent"
	SSHKeys  []string // keys that may log in as User: authorized_keys lines without options
	Files    []File   // written once, at the first boot of the instance
}

// File is a file of the guest, owned by root.
type File struct {
	Path    string      // absolute and clean; letters, digits and ._-/ only
	Mode    fs.FileMode // permission bits; 0: 0644
	Content []byte
}

// userData is the part of cloud-config that is used.
type userData struct {
	Hostname       string      `json:"hostname"`
	ManageEtcHosts bool        `json:"manage_etc_hosts"`
	User           user        `json:"user"` // overrides the template's default_user
	SSHKeys        []string    `json:"ssh_authorized_keys,omitempty"`
	PasswordAuth   bool        `json:"ssh_pwauth"`
	PackageUpdate  bool        `json:"package_update"`
	PackageUpgrade bool        `json:"package_upgrade"`
	Files          []writeFile `json:"write_files,omitempty"`
}

type user struct {
	Name string `json:"name"`
}

type writeFile struct {
	Path        string `json:"path"`
	Owner       string `json:"owner"`
	Permissions string `json:"permissions"`
	Encoding    string `json:"encoding"`
	Content     string `json:"content"`
}

// UserData renders s as cloud-config. The body is JSON, which is YAML too, of
// printable ASCII without a single escape, so that no value can end its string. Values that would need one are refused (code invalid, with the
// field), and so is a result above MaxSize.
func UserData(s Seed) ([]byte, error) {
	if s.User == "" {
		s.User = "agent"
	}
	if err := agentlab.ValidateName(s.Hostname); err != nil {
		return nil, err
	}
	if !made(s.User, 32, lower+"_-") || strings.HasPrefix(s.User, "-") || s.User == "root" {
		return nil, invalid("user", "%q is not the name of an ordinary user", s.User)
	}
	doc := userData{Hostname: s.Hostname, ManageEtcHosts: true, User: user{s.User}}
	for _, line := range s.SSHKeys {
		key, err := SSHKey(line)
		if err != nil {
			return nil, err
		}
		doc.SSHKeys = append(doc.SSHKeys, key)
	}
	for _, f := range s.Files {
		w, err := f.render()
		if err != nil {
			return nil, err
		}
		doc.Files = append(doc.Files, w)
	}
	body, err := json.MarshalIndent(doc, "", "  ")
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInternal, "the seed: %w", err)
	}
	out := slices.Concat([]byte("#cloud-config\n"), body, []byte("\n"))
	if len(out) > MaxSize {
		return nil, invalid("files", "the seed has %d bytes, the limit is %d", len(out), MaxSize)
	}
	return out, nil
}

func (f File) render() (writeFile, error) {
	mode := f.Mode
	if mode == 0 {
		mode = 0o644
	}
	switch {
	case !strings.HasPrefix(f.Path, "/") || path.Clean(f.Path) != f.Path || f.Path == "/" || !made(f.Path, 255, lower+upper+"._-/"):
		return writeFile{}, invalid("files", "%q is not the path of a file in a seed", f.Path)
	case mode&^0o777 != 0:
		return writeFile{}, invalid("files", "%s is not the mode of a file in a seed", mode)
	}
	return writeFile{
		Path: f.Path, Owner: "root:root", Permissions: "0" + strconv.FormatUint(uint64(mode), 8),
		Encoding: "b64", Content: base64.StdEncoding.EncodeToString(f.Content),
	}, nil
}

// keyTypes are the types of public keys that OpenSSH accepts; AgentLab creates
// keys of the first type.
var keyTypes = []string{
	"ssh-ed25519", "sk-ssh-ed25519@openssh.com",
	"ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "sk-ecdsa-sha2-nistp256@openssh.com",
	"ssh-rsa",
}

// SSHKey returns the public key of one authorized_keys line as "TYPE BASE64",
// without its comment; anything else, such as an option, is rejected (code
// invalid).
func SSHKey(line string) (string, error) {
	fields := strings.Fields(line)
	if len(line) <= 16<<10 && len(fields) >= 2 && !strings.ContainsAny(line, "\r\n") && slices.Contains(keyTypes, fields[0]) {
		blob, err := base64.StdEncoding.Strict().DecodeString(fields[1])
		n := len(fields[0])
		if err == nil && len(blob) > 4+n && string(blob[:4]) == "\x00\x00\x00"+string(rune(n)) && string(blob[4:4+n]) == fields[0] {
			return fields[0] + " " + fields[1], nil
		}
	}
	return "", invalid("ssh_keys", "not an SSH public key: one line, without options").WithHint("it begins with a type, as in a file ~/.ssh/id_ed25519.pub")
}

const (
	lower = "abcdefghijklmnopqrstuvwxyz0123456789"
	upper = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
)

// made reports whether text is not empty, at most most bytes long, and of the
// given characters.
func made(text string, most int, of string) bool {
	return text != "" && len(text) <= most && strings.Trim(text, of) == ""
}

func invalid(field, format string, args ...any) *agentlab.Error {
	return agentlab.Errorf(agentlab.CodeInvalid, format, args...).WithField(field)
}
