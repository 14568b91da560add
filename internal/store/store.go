// Package store keeps sandboxes, jobs, events, artifacts, tokens and the
// profiles they were made from in one SQLite file.
//
// Every change is one transaction that also writes its events; after the commit
// Options.OnCommit gets what changed, in commit order. There is one
// writer at a time, in this process by a queue and between processes by
// SQLite's lock (BEGIN IMMEDIATE); readers never wait for it (WAL).
//
// Commits are made with synchronous=FULL: a row is what we mean to do, it is
// written before we do it, and what we made would be an orphan if a power cut
// took the row back. That costs one fsync for each change, and changes are
// few beside what they stand for.
package store

import (
	"context"
	"database/sql"
	"errors"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	_ "modernc.org/sqlite" // the driver "sqlite"

	"github.com/agentlab-vm/agentlab"
)

// readers is the number of connections for reading.
const readers = 4

// Store is an open database. Its methods may be called from any goroutine.
//
// The methods that write finish what they began: ctx ends only their waiting
// for a turn, so an error that wraps ctx's says that nothing was written.
type Store struct {
	path     string
	w, r     *sql.DB
	turn     chan struct{} // holds a value while someone writes
	clock    func() time.Time
	onCommit func(Commit)
	full     func() bool
}

// Options configure Open.
type Options struct {
	Clock func() time.Time // nil means time.Now

	// OnCommit is called after each transaction that made a Commit, one call
	// at a time, in the order of the event ids, and before the writing call
	// returns. No other change can be written until it returns: it must be
	// quick and must not write to the Store. nil is allowed.
	OnCommit func(Commit)

	// Full is called when the disk of the database is full, and reports
	// whether it made room; what failed is then tried once more. It must not
	// use the Store. nil never makes room.
	Full func() bool

	// New is asked before a database is made where there is none, or one
	// without a table. With its error Open fails and has changed nothing.
	New func() error
}

// Commit is what a committed transaction changed.
type Commit struct {
	Events    []agentlab.Event   // that were written, with their ids
	Sandboxes []agentlab.Sandbox // rows that are new or differ from before
	Records   []string           // ids of jobs that have new egress entries
}

// Open opens the database at path, makes it when it is missing, and brings an
// older one up to date after copying it to PATH.v<version>.bak. The
// directory must exist; the file is made private (0600).
//
// A database written by a newer AgentLab, or that is none of ours, is code
// schema and left untouched; a damaged one is code unavailable.
func Open(ctx context.Context, path string, opts Options) (*Store, error) {
	return open(ctx, path, opts, migrations())
}

func open(ctx context.Context, path string, opts Options, migrations fs.FS) (_ *Store, err error) {
	path, err = filepath.Abs(path)
	if err != nil {
		return nil, fault(err)
	}
	if opts.New == nil {
		opts.New = func() error { return nil }
	}
	if err := whenNone(path, opts.New); err != nil { // before the file is made: SQLite removes the log of one that is empty
		return nil, err
	}
	if err := private(path); err != nil {
		return nil, err
	}
	s := &Store{path: path, turn: make(chan struct{}, 1), clock: opts.Clock, onCommit: opts.OnCommit, full: opts.Full}
	if s.clock == nil {
		s.clock = time.Now
	}
	err = withSpace(path, opts.Full, func() error {
		if err := migrate(ctx, path, migrations, opts.New); err != nil {
			return err
		}
		return s.connect(ctx)
	})
	if err != nil {
		return nil, inFile(path, err)
	}
	return s, nil
}

// connect opens the connections. It leaves none open when it fails.
func (s *Store) connect(ctx context.Context) (err error) {
	if s.w, err = connect(ctx, s.path, 1, url.Values{"_txlock": {"immediate"}}); err != nil {
		return err
	}
	if s.r, err = connect(ctx, s.path, readers, url.Values{"_query_only": {"1"}}); err != nil {
		return errors.Join(err, s.w.Close())
	}
	return nil
}

// whenNone calls f when the file at path is missing or has no byte.
func whenNone(path string, f func() error) error {
	st, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist), err == nil && st.Size() == 0:
		return f()
	case err != nil:
		return inFile(path, fault(err))
	}
	return nil
}

// private makes sure the file exists and only its owner can read it; SQLite
// gives its -wal and -shm files the same mode.
func private(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600) //nolint:gosec // the path is our caller's
	if err != nil {
		return fault(err)
	}
	return fault(errors.Join(f.Chmod(0o600), f.Close()))
}

// connect opens a pool of n connections, each set up by its DSN.
func connect(ctx context.Context, path string, n int, params url.Values) (*sql.DB, error) {
	q := url.Values{
		"_busy_timeout": {"10000"},
		"_foreign_keys": {"1"},
		"_journal_mode": {"WAL"},
		"_synchronous":  {"FULL"},
		"_dqs":          {"0"},
		"_defensive":    {"1"},
		"_pragma":       {"trusted_schema(0)", "cache_size(-8000)"}, // KiB; a list of 10,000 sandboxes stays in memory
	}
	for k, v := range params {
		q[k] = v
	}
	db, err := sql.Open("sqlite", dsn(path, q))
	if err != nil {
		return nil, fault(err)
	}
	db.SetMaxOpenConns(n)
	db.SetMaxIdleConns(n)
	if err := db.PingContext(ctx); err != nil {
		_ = db.Close()
		return nil, fault(err)
	}
	return db, nil
}

// dsn makes a file: URI, so that no character of a path is taken for syntax.
func dsn(path string, q url.Values) string {
	u := url.URL{Scheme: "file", Path: path, RawQuery: q.Encode()}
	return "file:" + strings.ReplaceAll(u.EscapedPath(), "?", "%3F") + "?" + u.RawQuery
}

// Close closes the database. What is being written is finished first.
func (s *Store) Close() error {
	var errs []error
	for _, db := range []*sql.DB{s.r, s.w} { // the writer last: it folds the WAL into the file
		if db != nil {
			errs = append(errs, db.Close())
		}
	}
	return fault(errors.Join(errs...))
}

// tx is a write transaction.
type tx struct {
	*sql.Tx
	ctx  context.Context
	now  time.Time
	done Commit // so far
}

func (w *tx) exec(query string, args ...any) error {
	_, err := w.ExecContext(w.ctx, query, args...)
	return fault(err)
}

// execN is exec that tells how many rows it changed.
func (w *tx) execN(query string, args ...any) (int64, error) {
	res, err := w.ExecContext(w.ctx, query, args...)
	if err != nil {
		return 0, fault(err)
	}
	n, err := res.RowsAffected()
	return n, fault(err)
}

// write runs fn in a transaction and commits it when fn returns nil. Where the
// disk was full and Options.Full made room, fn runs a second time.
func (s *Store) write(ctx context.Context, fn func(*tx) error) error {
	select {
	case s.turn <- struct{}{}:
	case <-ctx.Done():
		return fault(ctx.Err())
	}
	defer func() { <-s.turn }()
	if ctx.Err() != nil { // a turn and the end may have come together
		return fault(ctx.Err())
	}

	// From here on nothing waits but the disk, and a cancelled commit would
	// only leave the caller in doubt.
	ctx = context.WithoutCancel(ctx)
	return withSpace(s.path, s.full, func() error { return s.commit(ctx, fn) })
}

// commit makes one transaction of fn. It may be called again with the fn of a
// transaction that failed: fn reads what it changes in the transaction.
func (s *Store) commit(ctx context.Context, fn func(*tx) error) error {
	t, err := s.w.BeginTx(ctx, nil)
	if err != nil {
		return fault(err)
	}
	defer func() { _ = t.Rollback() }() // after a commit it does nothing
	w := &tx{Tx: t, ctx: ctx, now: s.now()}
	if err := fn(w); err != nil {
		return err
	}
	if err := t.Commit(); err != nil {
		return fault(err)
	}
	if s.onCommit != nil && len(w.done.Events)+len(w.done.Sandboxes)+len(w.done.Records) > 0 {
		s.onCommit(w.done)
	}
	return nil
}

func (s *Store) now() time.Time { return s.clock().UTC().Round(0) }
