package store

import (
	"context"
	"database/sql"
	"sync"
	"time"
)

// maxStatements bounds the statements that a pool keeps. The queries of filters
// have many forms.
const maxStatements = 256

// pool is a pool of connections that keeps the statements that it has run: for most
// of them, parsing takes longer than running.
type pool struct {
	*sql.DB
	onRead func(took time.Duration) // nil means none

	mu   sync.Mutex
	kept map[string]*sql.Stmt // by their SQL
}

func newPool(db *sql.DB) *pool { return &pool{DB: db, kept: map[string]*sql.Stmt{}} }

// statement returns the statement of a query, nil if there is none yet.
func (p *pool) statement(query string) *sql.Stmt {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.kept[query]
}

// prepared is statement that prepares the statement first if there is none yet, which
// needs a free connection. It returns nil if it cannot be prepared, which running the
// query reports, or if there are too many.
func (p *pool) prepared(ctx context.Context, query string) *sql.Stmt {
	p.mu.Lock()
	st, full := p.kept[query], len(p.kept) >= maxStatements
	p.mu.Unlock()
	if st != nil || full {
		return st
	}
	st, err := p.PrepareContext(ctx, query)
	if err != nil {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if other := p.kept[query]; other != nil {
		_ = st.Close()
		return other
	}
	p.kept[query] = st
	return st
}

// wasRead reports a read that began at a time, unless it was part of a write.
func wasRead(q querier, begin time.Time) {
	if p, ok := q.(*pool); ok && p.onRead != nil {
		p.onRead(time.Since(begin))
	}
}

// QueryContext does not report the read: the caller does, after the last row.
func (p *pool) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	if st := p.prepared(ctx, query); st != nil {
		return st.QueryContext(ctx, args...)
	}
	return p.DB.QueryContext(ctx, query, args...)
}

func (p *pool) QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row {
	defer wasRead(p, time.Now())
	if st := p.prepared(ctx, query); st != nil {
		return st.QueryRowContext(ctx, args...)
	}
	return p.DB.QueryRowContext(ctx, query, args...)
}

// statement returns the statement of a query for this transaction, nil if the pool
// does not have it: the only connection is in use, and the statement is prepared after the
// transaction.
func (w *tx) statement(query string) *sql.Stmt {
	if st := w.pool.statement(query); st != nil {
		return w.StmtContext(w.ctx, st)
	}
	w.missed = append(w.missed, query)
	return nil
}

func (w *tx) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	if st := w.statement(query); st != nil {
		return st.QueryContext(ctx, args...)
	}
	return w.Tx.QueryContext(ctx, query, args...)
}

func (w *tx) QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row {
	if st := w.statement(query); st != nil {
		return st.QueryRowContext(ctx, args...)
	}
	return w.Tx.QueryRowContext(ctx, query, args...)
}

func (w *tx) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	if st := w.statement(query); st != nil {
		return st.ExecContext(ctx, args...)
	}
	return w.Tx.ExecContext(ctx, query, args...)
}
