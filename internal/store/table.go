package store

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// field maps a column to a pointer into the row's struct. The pointer is of a
// type that database/sql supports, or a timeCol, idCol or jsonCol.
type field struct {
	column string
	ptr    any
}

// table describes how a T is stored. The SQL is written manually, except the
// four lists of columns (insert, update, select, scan), which are built from
// one list of fields.
type table[T any] struct {
	name   string
	key    []string // columns of the primary key
	fields func(*T) []field
	check  func(*T) error // checks every row that is written or read

	insertSQL, updateSQL, selectSQL string
}

func newTable[T any](name string, key []string, fields func(*T) []field, check func(*T) error) *table[T] {
	t := &table[T]{name: name, key: key, fields: fields, check: check}
	var cols, sets []string
	for _, f := range fields(new(T)) {
		cols = append(cols, f.column)
		if !slices.Contains(key, f.column) {
			sets = append(sets, f.column+" = ?")
		}
	}
	where := strings.Join(key, " = ? AND ") + " = ?"
	t.insertSQL = fmt.Sprintf("INSERT INTO %s (%s) VALUES (?%s)", name, strings.Join(cols, ", "), strings.Repeat(", ?", len(cols)-1))
	t.updateSQL = fmt.Sprintf("UPDATE %s SET %s WHERE %s", name, strings.Join(sets, ", "), where)
	t.selectSQL = fmt.Sprintf("SELECT %s FROM %s ", strings.Join(cols, ", "), name)
	return t
}

// querier is a read-only *sql.DB or a *sql.Tx.
type querier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

func (t *table[T]) insert(w *tx, v *T) error {
	_, err := t.insertRow(w, v)
	return err
}

// insertRow inserts v and returns the id of its row.
func (t *table[T]) insertRow(w *tx, v *T) (int64, error) {
	if err := t.check(v); err != nil {
		return 0, err
	}
	var args []any
	for _, f := range t.fields(v) {
		args = append(args, f.ptr)
	}
	res, err := w.ExecContext(w.ctx, t.insertSQL, args...)
	if err != nil {
		return 0, fault(err)
	}
	id, err := res.LastInsertId()
	return id, fault(err)
}

func (t *table[T]) update(w *tx, v *T) error {
	if err := t.check(v); err != nil {
		return err
	}
	var args, keys []any
	for _, f := range t.fields(v) {
		if slices.Contains(t.key, f.column) {
			keys = append(keys, f.ptr)
		} else {
			args = append(args, f.ptr)
		}
	}
	return w.exec(t.updateSQL, append(args, keys...)...)
}

// query reads the rows that tail, "WHERE … ORDER BY …", selects.
func (t *table[T]) query(ctx context.Context, q querier, tail string, args ...any) (_ []T, err error) {
	defer wasRead(q, time.Now())
	rows, err := q.QueryContext(ctx, t.selectSQL+tail, args...)
	if err != nil {
		return nil, fault(err)
	}
	defer func() {
		if cerr := rows.Close(); err == nil && cerr != nil {
			err = fault(cerr)
		}
	}()
	var v, zero T // one value for all rows: binding its fields is slower than copying it
	fields := t.fields(&v)
	ptrs := make([]any, len(fields))
	for i, f := range fields {
		ptrs[i] = f.ptr
	}
	out := []T{}
	for rows.Next() {
		v = zero
		if err := rows.Scan(ptrs...); err != nil {
			return nil, damaged(t.name, err)
		}
		if err := t.check(&v); err != nil {
			return nil, damaged(t.name, err)
		}
		if len(out) == cap(out) {
			out = slices.Grow(out, max(16, len(out))) // doubled: append's own steps copy long lists five times
		}
		out = append(out, v)
	}
	if err := rows.Err(); err != nil {
		return nil, fault(err)
	}
	return out, nil
}

// one is query for at most one row; ok reports whether there is one.
func (t *table[T]) one(ctx context.Context, q querier, tail string, args ...any) (v T, ok bool, err error) {
	rows, err := t.query(ctx, q, tail+" LIMIT 1", args...)
	if err != nil || len(rows) == 0 {
		return v, false, err
	}
	return rows[0], true, nil
}

// filter builds a WHERE clause.
type filter struct {
	conds []string
	args  []any
}

func (f *filter) add(cond string, args ...any) {
	f.conds = append(f.conds, cond)
	f.args = append(f.args, args...)
}

func addIn[S ~string](f *filter, column string, values []S) {
	if len(values) == 0 {
		return
	}
	args := make([]any, len(values))
	for i, v := range values {
		args[i] = string(v)
	}
	f.add(column+" IN (?"+strings.Repeat(", ?", len(values)-1)+")", args...)
}

// tail returns the WHERE clause with an ORDER BY and a LIMIT, where a limit of
// 0 or less means no limit.
func (f *filter) tail(order string, limit int) string { return f.tailBy("", order, limit) }

// tailBy is tail with a GROUP BY; group "" means none.
func (f *filter) tailBy(group, order string, limit int) string {
	s := ""
	if len(f.conds) > 0 {
		s = "WHERE " + strings.Join(f.conds, " AND ")
	}
	if group != "" {
		s += " GROUP BY " + group
	}
	s += " ORDER BY " + order
	if limit > 0 {
		s += fmt.Sprintf(" LIMIT %d", limit)
	}
	return s
}

// countBy counts the rows of a table, which may have a condition, by the value
// of a column.
func countBy[K ~string](ctx context.Context, q querier, tableName, column string) (map[K]int, error) {
	return sumBy[K](ctx, q, "count(*)", tableName, column)
}

// sumBy is countBy with another aggregate, a whole number.
func sumBy[K ~string](ctx context.Context, q querier, aggregate, tableName, column string) (_ map[K]int, err error) {
	defer wasRead(q, time.Now())
	rows, err := q.QueryContext(ctx, fmt.Sprintf("SELECT %s, %s FROM %s GROUP BY 1", column, aggregate, tableName))
	if err != nil {
		return nil, fault(err)
	}
	defer func() {
		if cerr := rows.Close(); err == nil && cerr != nil {
			err = fault(cerr)
		}
	}()
	out := map[K]int{}
	for rows.Next() {
		var k string
		var n int
		if err := rows.Scan(&k, &n); err != nil {
			return nil, damaged(tableName, err)
		}
		out[K(k)] = n
	}
	return out, fault(rows.Err())
}

func damaged(tableName string, err error) error {
	return agentlab.Errorf(agentlab.CodeInternal, "a row of table %s cannot be used: %w", tableName, err).
		WithHint("another program changed the database, or this is a bug in AgentLab")
}
