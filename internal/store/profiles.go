package store

import (
	"context"
	"crypto/sha256"
	"encoding/hex"

	"github.com/agentlab-vm/agentlab"
)

// PutProfile stores the text of a profile that a sandbox or job is created
// from, so that it is known after the file changes. It returns the text's
// SHA-256 in lower-case hex. Storing the same text again changes nothing.
func (s *Store) PutProfile(ctx context.Context, name, yaml string) (sum string, err error) {
	if err := agentlab.ValidateName(name); err != nil {
		return "", err
	}
	digest := sha256.Sum256([]byte(yaml))
	sum = hex.EncodeToString(digest[:])
	var known bool
	err = s.r.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 FROM profiles WHERE name = ? AND sha256 = ?)", name, sum).Scan(&known)
	if err != nil || known {
		return sum, fault(err)
	}
	return sum, s.write(ctx, func(w *tx) error {
		now := w.now
		return w.exec("INSERT INTO profiles (name, sha256, yaml, updated_at) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING", name, sum, yaml, timeCol{&now})
	})
}
