package store

import (
	"compress/gzip"
	"database/sql"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

// fixtures are databases of real runs of earlier versions, with rows in every
// table of their time. 'go test ./internal/cli -run TestWriteDatabaseFixture
// -fixture' writes one.
const fixtures = "testdata/schema-*.db.gz"

// rowsOf returns the rows of each table, as sorted texts with the names of
// their columns. With like, it reads only the tables and columns of like.
func rowsOf(t *testing.T, path string, like map[string][]string) (columns map[string][]string, rows map[string][]string) {
	t.Helper()
	db := must(openReadOnly(path))(t)
	defer db.Close()
	columns, rows = like, map[string][]string{}
	if columns == nil {
		columns = columnsOf(t, db)
	}
	for table, cols := range columns {
		var quoted []string
		for _, c := range cols {
			quoted = append(quoted, fmt.Sprintf("'%s=' || quote(%q)", c, c))
		}
		rows[table] = texts(t, db, fmt.Sprintf("SELECT %s FROM %q", strings.Join(quoted, " || ' ' || "), table))
		slices.Sort(rows[table])
	}
	return columns, rows
}

// columnsOf returns the columns of each table of AgentLab.
func columnsOf(t *testing.T, db *sql.DB) map[string][]string {
	out := map[string][]string{}
	for _, table := range texts(t, db, "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%' AND name <> 'goose_db_version'") {
		out[table] = texts(t, db, fmt.Sprintf("SELECT name FROM pragma_table_info('%s')", table))
	}
	return out
}

func texts(t *testing.T, db *sql.DB, query string) (out []string) {
	t.Helper()
	rows := must(db.QueryContext(t.Context(), query))(t)
	defer rows.Close()
	for rows.Next() {
		var s string
		if err := rows.Scan(&s); err != nil {
			t.Fatal(err)
		}
		out = append(out, s)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return out
}

func unpack(t *testing.T, packed, path string) {
	t.Helper()
	f := must(os.Open(packed))(t)
	defer f.Close()
	z := must(gzip.NewReader(f))(t)
	content := must(io.ReadAll(z))(t)
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
}

// Each version opens the databases of earlier versions: it copies them first,
// and every value of every row survives.
func TestDatabasesOfEarlierVersions(t *testing.T) {
	files, err := filepath.Glob(fixtures)
	if err != nil || len(files) == 0 {
		t.Fatalf("no fixtures: %v", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "agentlab.db")
			unpack(t, file, path)
			was := must(Inspect(t.Context(), path))(t)
			columns, before := rowsOf(t, path, nil)
			for table, rows := range before {
				if len(rows) == 0 {
					t.Errorf("the fixture has no row in %s: add it to the script of TestWriteDatabaseFixture", table)
				}
			}

			// A program that comes after this one upgrades it, too.
			s := must(open(t.Context(), path, Options{}, withOneMore(t, "CREATE TABLE later (x);")))(t)
			readEverything(t, s)
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			if err := Verify(t.Context(), path); err != nil {
				t.Error(err)
			}
			backup := fmt.Sprintf("%s.v%d.bak", path, was.Schema)
			for name, file := range map[string]string{"database": path, "copy": backup} {
				_, after := rowsOf(t, file, columns)
				for table, rows := range before {
					if !slices.Equal(rows, after[table]) {
						t.Errorf("%s: the rows of %s changed:\n%s\nto\n%s", name, table, strings.Join(rows, "\n"), strings.Join(after[table], "\n"))
					}
				}
			}
			if got := must(Inspect(t.Context(), backup))(t); got != was {
				t.Errorf("copy: %+v, want %+v", got, was)
			}
			_, err := Open(t.Context(), path, Options{})
			wantCode(t, err, agentlab.CodeSchema)
			if hint := agentlab.HintOf(err); !strings.Contains(hint, "agentlab db restore "+backup) {
				t.Errorf("hint %q", hint)
			}
			if err := os.Remove(backup); err != nil {
				t.Fatal(err)
			}
			_, err = Open(t.Context(), path, Options{})
			if hint := agentlab.HintOf(err); hint != "start the newer version of AgentLab that wrote it" {
				t.Errorf("without a copy: hint %q", hint)
			}
		})
	}
}

// readEverything decodes and checks each row as the services do.
func readEverything(t *testing.T, s *Store) {
	t.Helper()
	for _, err := range []error{
		decodes(t, s, apiTokens), decodes(t, s, artifacts), decodes(t, s, egress), decodes(t, s, egressCursors), decodes(t, s, events),
		decodes(t, s, jobs), decodes(t, s, messages), decodes(t, s, sandboxes), decodes(t, s, snapshots), decodes(t, s, tokens),
		decodes(t, s, grants), decodes(t, s, workspaces), decodes(t, s, workspaceSnapshots), decodes(t, s, workspaceLeases),
	} {
		if err != nil {
			t.Error(err)
		}
	}
}

func decodes[T any](t *testing.T, s *Store, of *table[T]) error {
	_, err := of.query(t.Context(), s.r, "")
	return err
}
