//go:build linux

package guestd

import (
	"bytes"
	"encoding/base64"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/sshkey"
)

// keyTypes are the public keys that may be authorized.
var keyTypes = []string{
	sshkey.TypeEd25519, "sk-ssh-ed25519@openssh.com",
	"ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "sk-ecdsa-sha2-nistp256@openssh.com",
	"ssh-rsa",
}

// publicKey is a public key in the format of authorized_keys and known_hosts.
type publicKey struct {
	kind string
	blob []byte // begins with kind
}

func (k publicKey) line() string {
	return k.kind + " " + base64.StdEncoding.EncodeToString(k.blob)
}

// parseKey accepts one public key, with or without a comment, and nothing that
// could be read as an option.
func parseKey(line string) (publicKey, error) {
	bad := agentlab.Errorf(agentlab.CodeInvalid, "not a public key of one line without options").WithField("public_key")
	line = strings.TrimSpace(line)
	if len(line) > 16<<10 || !oneLine(line) {
		return publicKey{}, bad
	}
	kind, rest, _ := strings.Cut(line, " ")
	text, _, _ := strings.Cut(rest, " ")
	blob, err := base64.StdEncoding.Strict().DecodeString(text)
	if err != nil || !slices.Contains(keyTypes, kind) || !bytes.HasPrefix(blob, sshkey.String(nil, []byte(kind))) || len(blob) < len(kind)+4+32 {
		return publicKey{}, bad
	}
	return publicKey{kind: kind, blob: blob}, nil
}
