package secret

import (
	"crypto/sha256"
	"encoding/hex"

	"github.com/agentlab-vm/agentlab"
)

// MintToken returns a new bearer token of 256 random bits and its hash, which
// is the only part that is stored.
func MintToken() (token, hash string) {
	token = agentlab.NewToken()
	return token, HashToken(token)
}

// HashToken returns the SHA-256 of a token in lower-case hex. Tokens are
// random, so the hash needs neither salt nor stretching.
func HashToken(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:])
}
