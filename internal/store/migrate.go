package store

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"strconv"

	"github.com/pressly/goose/v3"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/agentlab-vm/agentlab"
)

//go:embed migrations/*.sql
var migrationFiles embed.FS

func migrations() fs.FS {
	sub, err := fs.Sub(migrationFiles, "migrations")
	if err != nil {
		panic(err) // the embedded directory has a constant name
	}
	return sub
}

// NewestSchema returns the newest schema version that this program supports.
func NewestSchema() int64 {
	names, err := fs.Glob(migrations(), "*.sql")
	if err != nil || len(names) == 0 {
		panic("the migrations are embedded")
	}
	n, err := strconv.ParseInt(names[len(names)-1][:5], 10, 64)
	if err != nil {
		panic(err)
	}
	return n
}

// applicationID marks AgentLab's files in their header; the first migration
// sets it.
const applicationID = 0x41474C42

// migrate upgrades the database at path to the newest schema in files. If the
// database has no schema, it first calls fresh, which may return an error.
func migrate(ctx context.Context, path string, files fs.FS, fresh func() error) (err error) {
	// The first check uses a read-only connection: even the change to WAL
	// would modify a file that AgentLab did not create.
	db, err := sql.Open("sqlite", dsn(path, url.Values{"_query_only": {"1"}, "_busy_timeout": {"10000"}}))
	if err != nil {
		return fault(err)
	}
	current, err := inspect(ctx, db)
	err = errors.Join(err, db.Close())
	if err == nil && current == 0 {
		err = fresh()
	}
	if err != nil {
		return err
	}

	rw, err := connect(ctx, path, 1, url.Values{"_txlock": {"immediate"}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, fault(rw.Close())) }()
	p, err := goose.NewProvider(goose.DialectSQLite3, rw, files, goose.WithDisableGlobalRegistry(true))
	if err != nil {
		return fault(err)
	}
	sources := p.ListSources()
	target := sources[len(sources)-1].Version
	switch {
	case current == target:
		return nil
	case current > target:
		return agentlab.Errorf(agentlab.CodeSchema, "the database has schema %d, this version of AgentLab supports schemas up to %d", current, target).
			WithHint("%s", newerHint(path, target))
	}
	backup := ""
	if current > 0 {
		backup = upgradeCopy(path, current)
		if err := backupTo(ctx, rw, backup); err != nil {
			return err
		}
	}
	if _, err := p.Up(ctx); err != nil {
		e := fault(err)
		if backup != "" {
			e = agentlab.Errorf(agentlab.CodeOf(e), "cannot upgrade the database from schema %d to %d: %w", current, target, err).
				WithHint("the failed step was rolled back; a copy from before the upgrade is %s", backup)
		}
		return e
	}
	return nil
}

// upgradeCopy is the copy of the database at path that an upgrade from schema makes.
func upgradeCopy(path string, schema int64) string { return fmt.Sprintf("%s.v%d.bak", path, schema) }

// newerHint returns the next step for a database that is newer than this program:
// it names the newest copy that this program can open, if there is one.
func newerHint(path string, newest int64) string {
	hint := "start the newer version of AgentLab that wrote it"
	for schema := newest; schema > 0; schema-- {
		if _, err := os.Stat(upgradeCopy(path, schema)); err == nil {
			return fmt.Sprintf("%s, or restore the copy from before its upgrade, which lacks all changes since then: agentlab db restore %s", hint, upgradeCopy(path, schema))
		}
	}
	return hint
}

// inspect returns the schema version of a database, 0 for a new one, and an
// error for a database that is damaged or not AgentLab's.
func inspect(ctx context.Context, db *sql.DB) (int64, error) {
	var tables, versions int
	err := db.QueryRowContext(ctx, `SELECT count(*), count(CASE WHEN name = 'goose_db_version' THEN 1 END)
		FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'`).Scan(&tables, &versions)
	if err != nil {
		return 0, fault(err)
	}
	if tables == versions { // empty, or after a crash before the first migration
		return 0, nil
	}
	var id int
	if err := db.QueryRowContext(ctx, "PRAGMA application_id").Scan(&id); err != nil {
		return 0, fault(err)
	}
	if id != applicationID || versions == 0 {
		return 0, agentlab.Errorf(agentlab.CodeSchema, "the file is a database of another program").WithHint("move it away")
	}
	var verdict string
	if err := db.QueryRowContext(ctx, "PRAGMA quick_check(1)").Scan(&verdict); err != nil {
		return 0, fault(err)
	}
	if verdict != "ok" {
		return 0, damageError(verdict)
	}
	var v int64
	err = db.QueryRowContext(ctx, "SELECT max(version_id) FROM goose_db_version WHERE is_applied").Scan(&v)
	return v, fault(err)
}

// damageError returns the error for a database in which a check of SQLite found
// damage.
func damageError(verdict string) error {
	code, message, hint := classify(sqlite3.SQLITE_CORRUPT)
	return agentlab.Errorf(code, "%s: %s", message, verdict).WithHint("%s", hint)
}

// backupTo copies the database before an upgrade.
func backupTo(ctx context.Context, db *sql.DB, path string) error {
	if err := copyTo(ctx, db, path); err != nil {
		return agentlab.Errorf(agentlab.CodeOf(err), "cannot copy the database before the upgrade: %w", err).
			WithHint("free disk space beside the database and start again; nothing was changed")
	}
	return nil
}
