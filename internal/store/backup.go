package store

import (
	"context"
	"database/sql"
	"errors"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/durable"
)

// Summary describes the contents of a database file.
type Summary struct {
	Schema       int64
	Installation string // ID of the installation; "" in files from before there were IDs
	Jobs         int
	Sandboxes    int // that are not DESTROYED
}

// Inspect checks the database at path as Open does, and changes nothing.
func Inspect(ctx context.Context, path string) (s Summary, err error) {
	db, err := openReadOnly(path)
	if err != nil {
		return s, err
	}
	defer func() { err = inFile(path, errors.Join(err, fault(db.Close()))) }()
	if s.Schema, err = inspect(ctx, db); err != nil || s.Schema == 0 {
		return s, err
	}
	err = db.QueryRowContext(ctx, `SELECT (SELECT count(*) FROM jobs), (SELECT count(*) FROM sandboxes WHERE state <> 'DESTROYED')`).Scan(&s.Jobs, &s.Sandboxes)
	if err != nil {
		return s, fault(err)
	}
	if s.Schema >= factsSchema {
		s.Installation, err = fact(ctx, db, FactInstallation)
	}
	return s, err
}

// Verify reads the whole database at path and changes nothing. It returns code
// unavailable for an index that does not match its table and for a reference
// to a missing row. Inspect does not find these, because it runs at every
// start and must be fast.
func Verify(ctx context.Context, path string) (err error) {
	db, err := openReadOnly(path)
	if err != nil {
		return err
	}
	defer func() { err = inFile(path, errors.Join(err, fault(db.Close()))) }()
	var verdict string
	if err := db.QueryRowContext(ctx, "PRAGMA integrity_check(1)").Scan(&verdict); err != nil {
		return fault(err)
	}
	if verdict != "ok" {
		return damageError(verdict)
	}
	err = db.QueryRowContext(ctx, `SELECT "table" || ' refers to a missing row of ' || parent FROM pragma_foreign_key_check LIMIT 1`).Scan(&verdict)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return nil
	case err != nil:
		return fault(err)
	}
	return damageError(verdict)
}

// openReadOnly opens the database file at path, which must exist, with read-only
// connections.
func openReadOnly(path string) (*sql.DB, error) {
	if _, err := os.Stat(path); err != nil {
		return nil, inFile(path, fault(err))
	}
	db, err := sql.Open("sqlite", dsn(path, url.Values{"_query_only": {"1"}, "_busy_timeout": {"10000"}}))
	if err != nil {
		return nil, inFile(path, fault(err))
	}
	return db, nil
}

// factsSchema is the first schema with the table facts.
const factsSchema = 8

// Backup writes a copy of the database to path, whole or not at all. The copy
// is consistent, has passed the checks of Open, and replaces an existing file.
// Writers do not wait. The error has code unavailable if the database is
// damaged.
func (s *Store) Backup(ctx context.Context, path string) error {
	db, err := connect(ctx, s.path, 1, nil)
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	if _, err := inspect(ctx, db); err != nil { // a copy of a damaged table may look intact
		return inFile(s.path, err)
	}
	return copyTo(ctx, db, path)
}

// copyTo writes a consistent and checked copy, whole or not at all.
func copyTo(ctx context.Context, db *sql.DB, path string) (err error) {
	tmp := path + ".tmp"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fault(err)
	}
	if err := private(tmp); err != nil { // VACUUM INTO accepts an empty file and keeps its mode
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(tmp)
		}
	}()
	if _, err := db.ExecContext(ctx, "VACUUM INTO ?", tmp); err != nil {
		return fault(err)
	}
	if err := durable.SyncPath(tmp); err != nil {
		return fault(err)
	}
	if s, err := Inspect(ctx, tmp); err != nil {
		return err
	} else if s.Schema == 0 {
		return agentlab.Errorf(agentlab.CodeInternal, "the copy %s is empty", tmp)
	}
	if err := os.Rename(tmp, path); err != nil {
		return fault(err)
	}
	// An upgrade that follows must not outlive its backup in a power cut.
	return fault(durable.SyncPath(filepath.Dir(path)))
}
