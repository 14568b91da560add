// Package storetest creates databases for tests.
package storetest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/store"
)

// empty returns the file of a database without rows. All migrations take most of
// the time of many tests, so they run once.
var empty = sync.OnceValues(func() (content []byte, err error) {
	dir, err := os.MkdirTemp("", "agentlab-store-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	path := filepath.Join(dir, "empty.db")
	st, err := store.Open(context.Background(), path, store.Options{})
	if err != nil {
		return nil, err
	}
	if err := st.Close(); err != nil {
		return nil, err
	}
	return os.ReadFile(path)
})

// Create writes a database without rows to path, which store.Open opens.
func Create(t testing.TB, path string) {
	t.Helper()
	content, err := empty()
	if err == nil {
		err = os.WriteFile(path, content, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}
