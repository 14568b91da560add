package store

import (
	"context"
	"database/sql"
	"errors"
)

// The facts that the daemon stores.
const (
	FactInstallation = "installation" // ID of the installation, also in a file of the state directory
	FactClock        = "clock"        // last state of the host's clock, as JSON
	FactDrained      = "drained"      // names of the drained backends, as a JSON list
	FactRepair       = "repair"       // unfinished repair of the database; "" for none
)

// Fact returns the value of a fact, "" if it is not set.
func (s *Store) Fact(ctx context.Context, name string) (string, error) {
	return fact(ctx, s.r, name)
}

func fact(ctx context.Context, q querier, name string) (value string, err error) {
	err = q.QueryRowContext(ctx, "SELECT value FROM facts WHERE name = ?", name).Scan(&value)
	if errors.Is(err, sql.ErrNoRows) {
		return "", nil
	}
	return value, fault(err)
}

// SetFact stores a fact and replaces its old value.
func (s *Store) SetFact(ctx context.Context, name, value string) error {
	return s.write(ctx, func(w *tx) error { return setFact(w, name, value) })
}

func setFact(w *tx, name, value string) error {
	return w.exec("INSERT INTO facts (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value", name, value)
}
