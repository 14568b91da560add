// Package sshkey creates SSH host keys. It implements the few formats of OpenSSH
// that are needed: package golang.org/x/crypto/ssh would delay the start of each
// process in the guest by some milliseconds.
package sshkey

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"encoding/pem"
)

// TypeEd25519 is the name of the type of the keys that New creates.
const TypeEd25519 = "ssh-ed25519"

// String appends p as a string of RFC 4251.
func String(dst, p []byte) []byte {
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(p)))
	return append(dst, p...)
}

// New creates a host key of type ed25519, as the contents of its two files.
func New() (private, public string) {
	pub, priv, _ := ed25519.GenerateKey(rand.Reader) // never fails
	blob := String(String(nil, []byte(TypeEd25519)), pub)
	line := TypeEd25519 + " " + base64.StdEncoding.EncodeToString(blob) + "\n"
	return privateFile(blob, pub, priv), line
}

// privateFile returns the file of an unencrypted private key, as described in
// PROTOCOL.key of OpenSSH.
func privateFile(blob []byte, pub ed25519.PublicKey, priv ed25519.PrivateKey) string {
	var check [4]byte
	_, _ = rand.Read(check[:]) // never fails
	secret := append(check[:], check[:]...)
	secret = String(secret, []byte(TypeEd25519))
	secret = String(secret, pub)
	secret = String(secret, priv)
	secret = String(secret, nil) // comment
	for pad := byte(1); len(secret)%8 != 0; pad++ {
		secret = append(secret, pad)
	}
	b := []byte("openssh-key-v1\x00")
	b = String(b, []byte("none")) // cipher
	b = String(b, []byte("none")) // key derivation
	b = String(b, nil)            // its options
	b = binary.BigEndian.AppendUint32(b, 1)
	b = String(b, blob)
	b = String(b, secret)
	return string(pem.EncodeToMemory(&pem.Block{Type: "OPENSSH PRIVATE KEY", Bytes: b}))
}
