package guestd

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"encoding/pem"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// This file implements the few formats of OpenSSH that are needed. Package
// golang.org/x/crypto/ssh would delay the start of each process in the guest
// by some milliseconds.

const typeEd25519 = "ssh-ed25519"

// keyTypes are the public keys that may be authorized.
var keyTypes = []string{
	typeEd25519, "sk-ssh-ed25519@openssh.com",
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
	if err != nil || !slices.Contains(keyTypes, kind) || !bytes.HasPrefix(blob, sshString(nil, []byte(kind))) || len(blob) < len(kind)+4+32 {
		return publicKey{}, bad
	}
	return publicKey{kind: kind, blob: blob}, nil
}

// sshString appends p as a string of RFC 4251.
func sshString(dst, p []byte) []byte {
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(p))) //nolint:gosec // a few bytes
	return append(dst, p...)
}

func ed25519Public(pub ed25519.PublicKey) publicKey {
	return publicKey{kind: typeEd25519, blob: sshString(sshString(nil, []byte(typeEd25519)), pub)}
}

// ed25519Private returns the file of an unencrypted private key, as described
// in PROTOCOL.key of OpenSSH.
func ed25519Private(priv ed25519.PrivateKey) []byte {
	pub, _ := priv.Public().(ed25519.PublicKey)
	var check [4]byte
	_, _ = rand.Read(check[:]) // never fails
	secret := append(check[:], check[:]...)
	secret = sshString(secret, []byte(typeEd25519))
	secret = sshString(secret, pub)
	secret = sshString(secret, priv)
	secret = sshString(secret, nil) // comment
	for pad := byte(1); len(secret)%8 != 0; pad++ {
		secret = append(secret, pad)
	}
	b := []byte("openssh-key-v1\x00")
	b = sshString(b, []byte("none")) // cipher
	b = sshString(b, []byte("none")) // key derivation
	b = sshString(b, nil)            // its options
	b = binary.BigEndian.AppendUint32(b, 1)
	b = sshString(b, ed25519Public(pub).blob)
	b = sshString(b, secret)
	return pem.EncodeToMemory(&pem.Block{Type: "OPENSSH PRIVATE KEY", Bytes: b})
}
