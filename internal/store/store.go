// Package store stores sandboxes, jobs, events, artifacts, tokens and the
// profiles that they were created from in one SQLite file.
//
// Every change is one transaction that also writes its events; after the commit
// the subscribers get what changed, in commit order (Subscribe). There is one
// writer at a time, in this process by a queue and between processes by
// SQLite's lock (BEGIN IMMEDIATE); readers never wait for it (WAL).
//
// Commits are made with synchronous=FULL: a row records an intent before its
// side effect, and a created VM would be an orphan if a power cut reverted the
// row. That costs one fsync for each change, which is little compared with the
// work that a change starts.
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
// A method that writes is not interrupted: ctx ends only the wait for its
// turn, so an error that wraps ctx's error means that nothing was written.
type Store struct {
	path      string
	w, r      *pool
	turn      chan struct{} // has a value during a write
	clock     func() time.Time
	committed []func(agentlab.Commit) // the subscribers; read and changed by the holder of turn
	onWrite   func(wait, took time.Duration, err error)
	onRead    func(took time.Duration)
	full      func() bool
}

// Options configure Open.
type Options struct {
	Clock func() time.Time // nil means time.Now

	// OnWrite is called after each write, also a failed one: how long it
	// waited for its turn, how long it then took, and its error. It may be
	// called by several goroutines at once; nil is allowed.
	OnWrite func(wait, took time.Duration, err error)

	// OnRead is called after each read outside of a write: how long it took, with
	// the wait for a connection. It may be called by several goroutines at once;
	// nil is allowed.
	OnRead func(took time.Duration)

	// Full is called when the disk of the database is full, and reports
	// whether it freed space; the failed operation is then tried once more.
	// It must not use the Store; nil is allowed.
	Full func() bool

	// New is called before a database is created where there is none, or
	// only one without a table. If it returns an error, Open fails and
	// changes nothing.
	New func() error
}

// Open opens the database at path, creates it if it is missing, and upgrades
// an older one after copying it to PATH.v<version>.bak. The directory must
// exist; the file gets mode 0600.
//
// The error has code schema for a database of a newer AgentLab or of another
// program, which is not changed, and code unavailable for a damaged one.
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
	if err := ifMissing(path, opts.New); err != nil { // before the file is created: SQLite deletes the log of an empty file
		return nil, err
	}
	if err := private(path); err != nil {
		return nil, err
	}
	s := &Store{path: path, turn: make(chan struct{}, 1), clock: opts.Clock, onWrite: opts.OnWrite, onRead: opts.OnRead, full: opts.Full}
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

// connect opens the connections. After an error none is open.
func (s *Store) connect(ctx context.Context) error {
	w, err := connect(ctx, s.path, 1, url.Values{"_txlock": {"immediate"}})
	if err != nil {
		return err
	}
	r, err := connect(ctx, s.path, readers, url.Values{"_query_only": {"1"}})
	if err != nil {
		return errors.Join(err, w.Close())
	}
	s.w, s.r = newPool(w), newPool(r)
	s.r.onRead = s.onRead
	return nil
}

// ifMissing calls f if the file at path is missing or empty.
func ifMissing(path string, f func() error) error {
	st, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist), err == nil && st.Size() == 0:
		return f()
	case err != nil:
		return inFile(path, fault(err))
	}
	return nil
}

// private ensures that the file exists and that only its owner can read it.
// SQLite gives its -wal and -shm files the same mode.
func private(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
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
		"_pragma":       {"trusted_schema(0)", "cache_size(-512)"}, // KiB for each connection; the kernel caches the file, too
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

// dsn returns a file: URI, so that no character of a path is parsed as syntax.
func dsn(path string, q url.Values) string {
	u := url.URL{Scheme: "file", Path: path, RawQuery: q.Encode()}
	return "file:" + strings.ReplaceAll(u.EscapedPath(), "?", "%3F") + "?" + u.RawQuery
}

// Close finishes the current write and closes the database.
func (s *Store) Close() error {
	var errs []error
	for _, db := range []*pool{s.r, s.w} { // the writer last: it merges the WAL into the file
		if db != nil {
			errs = append(errs, db.Close())
		}
	}
	return fault(errors.Join(errs...))
}

// tx is a write transaction.
type tx struct {
	*sql.Tx
	ctx    context.Context
	pool   *pool
	now    time.Time
	done   agentlab.Commit // so far
	missed []string        // queries that the pool does not keep yet
}

func (w *tx) exec(query string, args ...any) error {
	_, err := w.ExecContext(w.ctx, query, args...)
	return fault(err)
}

// execN is exec that returns how many rows it changed.
func (w *tx) execN(query string, args ...any) (int64, error) {
	res, err := w.ExecContext(w.ctx, query, args...)
	if err != nil {
		return 0, fault(err)
	}
	n, err := res.RowsAffected()
	return n, fault(err)
}

// write runs fn in a transaction and commits it when fn returns nil. If the
// disk was full and Options.Full freed space, fn runs a second time.
func (s *Store) write(ctx context.Context, fn func(*tx) error) (err error) {
	asked := time.Now()
	select {
	case s.turn <- struct{}{}:
	case <-ctx.Done():
		return fault(ctx.Err())
	}
	defer func() { <-s.turn }()
	if ctx.Err() != nil { // the turn and the end of ctx may have come together
		return fault(ctx.Err())
	}

	// From here on only the disk takes time, and after a cancelled commit
	// the caller would not know its outcome.
	ctx = context.WithoutCancel(ctx)
	if s.onWrite != nil {
		begin := time.Now()
		defer func() { s.onWrite(begin.Sub(asked), time.Since(begin), err) }()
	}
	return withSpace(s.path, s.full, func() error { return s.commit(ctx, fn) })
}

// commit runs fn in one transaction. It may be called again with the fn of a
// failed transaction, because fn reads what it changes in the transaction.
func (s *Store) commit(ctx context.Context, fn func(*tx) error) error {
	t, err := s.w.BeginTx(ctx, nil)
	if err != nil {
		return fault(err)
	}
	defer func() { _ = t.Rollback() }() // no effect after a commit
	w := &tx{Tx: t, ctx: ctx, pool: s.w, now: s.now()}
	if err := fn(w); err != nil {
		return err
	}
	if err := t.Commit(); err != nil {
		return fault(err)
	}
	for _, query := range w.missed {
		s.w.prepared(ctx, query)
	}
	if w.done.Empty() {
		return nil
	}
	for _, fn := range s.committed {
		fn(w.done)
	}
	return nil
}

// Subscribe calls fn after each later transaction with a Commit, one call at a time, in
// the order of the event IDs, and before the writing call returns. No other change can
// be written until fn returns: it must be quick, must not use the Store, and the caller
// of a write must not hold a lock that fn takes. The subscription ends with the Store.
func (s *Store) Subscribe(fn func(agentlab.Commit)) {
	s.turn <- struct{}{}
	s.committed = append(s.committed, fn)
	<-s.turn
}

func (s *Store) now() time.Time { return s.clock().UTC().Round(0) }
