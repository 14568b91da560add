package link

import (
	"bytes"
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/durable"
)

// SeedLen is the length of the secret in a key file, in bytes.
const SeedLen = 32

// staleAfter is the age of a temporary file that no process is writing.
const staleAfter = time.Hour

// KeyFile returns the secret of SeedLen random bytes in the file at path. It
// creates the file with mode 0600 if there is none. Concurrent callers, in any
// process, get the same secret. It returns an error for a file that other
// users can read (denied), or of another length (invalid).
func KeyFile(path string) ([]byte, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInternal, "the directory of the key %s: %w", path, err)
	}
	for {
		seed, err := readKey(path)
		if !errors.Is(err, fs.ErrNotExist) {
			_ = durable.RemoveTemps(filepath.Dir(path), staleAfter) // the next call tries again
			return seed, err
		}
		seed = make([]byte, SeedLen)
		_, _ = rand.Read(seed) // never fails
		if err := durable.Create(path, seed); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, agentlab.Errorf(agentlab.CodeInternal, "cannot create the key %s: %w", path, err)
		}
	}
}

// readKey fails with fs.ErrNotExist only if path does not exist.
func readKey(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInternal, "cannot read the key %s: %w", path, err)
	}
	defer func() { _ = f.Close() }()
	fi, err := f.Stat()
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInternal, "cannot read the key %s: %w", path, err)
	}
	if !fi.Mode().IsRegular() || fi.Mode().Perm()&0o077 != 0 {
		return nil, agentlab.Errorf(agentlab.CodeDenied, "other users can read the key %s (mode %s)", path, fi.Mode()).
			WithHint("if no other user has read it: chmod 600 %s", path)
	}
	var b [SeedLen + 1]byte
	n, err := f.Read(b[:])
	if n != SeedLen {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "the key %s does not have %d bytes (%v)", path, SeedLen, err).
			WithHint("restore it from a backup; running sandboxes cannot be accessed without it")
	}
	return bytes.Clone(b[:SeedLen]), nil
}

// SandboxKey derives from the master secret the key that authenticates the
// controller to one sandbox. The public half is in the sandbox's seed. It is
// not secret, and the key of another sandbox cannot be used.
func SandboxKey(master []byte, uid string) (ed25519.PrivateKey, error) {
	if len(master) < SeedLen || uid == "" {
		return nil, agentlab.Errorf(agentlab.CodeInternal, "a sandbox's key needs a master secret and a uid")
	}
	seed, err := hkdf.Key(sha256.New, master, nil, "agentlab guest control 1 "+uid, ed25519.SeedSize)
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInternal, "deriving a sandbox's key: %w", err)
	}
	return ed25519.NewKeyFromSeed(seed), nil
}
