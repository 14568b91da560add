package store

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/test/smalldisk"
)

// newer is the schema of withOneMore, after which no real one comes.
const newer = 99999

// withOneMore returns the migrations and one more.
func withOneMore(t *testing.T, last string) fs.FS {
	t.Helper()
	out := fstest.MapFS{strconv.Itoa(newer) + "_last.sql": {Data: []byte("-- +goose Up\n" + last + "\n")}}
	for _, name := range migrationNames(t) {
		data, err := fs.ReadFile(migrations(), name)
		if err != nil {
			t.Fatal(err)
		}
		out[name] = &fstest.MapFile{Data: data}
	}
	return out
}

func migrationNames(t *testing.T) []string {
	t.Helper()
	names, err := fs.Glob(migrations(), "*.sql") // sorted
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// schema is the version of the newest migration.
func schema(t *testing.T) int {
	t.Helper()
	names := migrationNames(t)
	n, err := strconv.Atoi(names[len(names)-1][:5])
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// filled makes a database with one sandbox in a fresh directory.
func filled(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "agentlab.db")
	s, err := Open(t.Context(), path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	must(s.AllocateSandbox(t.Context(), newSandbox("alpha"), agentlab.Allocation{First: 1, Last: 9}))(t)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

func readAll(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestOlderDatabaseIsCopiedAndUpgraded(t *testing.T) {
	path := filled(t)
	s, err := open(t.Context(), path, Options{}, withOneMore(t, "ALTER TABLE sandboxes ADD COLUMN extra TEXT NOT NULL DEFAULT 'x';"))
	if err != nil {
		t.Fatal(err)
	}
	must(s.SandboxByName(t.Context(), "alpha"))(t)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	backup := fmt.Sprintf("%s.v%d.bak", path, schema(t))
	if st, err := os.Stat(backup); err != nil || st.Mode().Perm() != 0o600 {
		t.Fatalf("copy: %v, %v", st, err)
	}
	old, err := Open(t.Context(), backup, Options{}) // the copy is a whole database of the old schema
	if err != nil {
		t.Fatal(err)
	}
	must(old.SandboxByName(t.Context(), "alpha"))(t)
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}

	// What was upgraded is now newer than what this program knows.
	before := readAll(t, path)
	_, err = Open(t.Context(), path, Options{})
	wantCode(t, err, agentlab.CodeSchema)
	if err == nil || !strings.Contains(err.Error(), "schema 99999") || !strings.Contains(agentlab.HintOf(err), backup) {
		t.Errorf("%v, hint %q", err, agentlab.HintOf(err))
	}
	if !bytes.Equal(before, readAll(t, path)) {
		t.Error("a newer database was changed")
	}
}

func TestFailedUpgradeChangesNothing(t *testing.T) {
	path := filled(t)
	_, err := open(t.Context(), path, Options{}, withOneMore(t, "CREATE TABLE half (x);\nINSERT INTO nowhere VALUES (1);"))
	if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("from schema %d to %d", schema(t), newer)) ||
		!strings.Contains(agentlab.HintOf(err), fmt.Sprintf(".v%d.bak", schema(t))) {
		t.Errorf("%v, hint %q", err, agentlab.HintOf(err))
	}
	s, err := Open(t.Context(), path, Options{})
	if err != nil {
		t.Fatalf("the old program cannot open it any more: %v", err)
	}
	defer func() { _ = s.Close() }()
	must(s.SandboxByName(t.Context(), "alpha"))(t)
	var n int
	if err := s.r.QueryRowContext(t.Context(), "SELECT count(*) FROM sqlite_schema WHERE name = 'half'").Scan(&n); err != nil || n != 0 {
		t.Errorf("half a migration is left: %d, %v", n, err)
	}
}

func TestInterruptedFirstStart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agentlab.db")
	if err := os.WriteFile(path, nil, 0o644); err != nil { // as a crash right after the file was made leaves it
		t.Fatal(err)
	}
	s, err := Open(t.Context(), path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if st, _ := os.Stat(path); st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v", st.Mode())
	}
}

func TestForeignAndDamagedFilesAreIgnored(t *testing.T) {
	foreign := filepath.Join(t.TempDir(), "foreign.db")
	db, err := sql.Open("sqlite", foreign)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.ExecContext(t.Context(), "CREATE TABLE theirs (x); INSERT INTO theirs VALUES (1)"); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}

	good := readAll(t, filled(t))
	damage := func(name string, data []byte) string {
		path := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	middle := bytes.Clone(good)
	copy(middle[4096:], bytes.Repeat([]byte{0xA5}, 8*4096))
	for _, tc := range []struct {
		path string
		code agentlab.Code
	}{
		{foreign, agentlab.CodeSchema},
		{damage("text", bytes.Repeat([]byte("this is no database\n"), 500)), agentlab.CodeUnavailable},
		{damage("header", append([]byte("SQLite format X\x00"), good[16:]...)), agentlab.CodeUnavailable},
		{damage("cut", good[:len(good)/2]), agentlab.CodeUnavailable},
		{damage("middle", middle), agentlab.CodeUnavailable},
	} {
		before := readAll(t, tc.path)
		s, err := Open(t.Context(), tc.path, Options{})
		if err == nil {
			_ = s.Close()
		}
		wantCode(t, err, tc.code)
		if err != nil && (!strings.Contains(err.Error(), tc.path) || agentlab.HintOf(err) == "") {
			t.Errorf("%v, hint %q", err, agentlab.HintOf(err))
		}
		if !bytes.Equal(before, readAll(t, tc.path)) {
			t.Errorf("%s was changed", tc.path)
		}
	}
	_, err = Open(t.Context(), filepath.Join(t.TempDir(), "none", "agentlab.db"), Options{})
	if err == nil {
		t.Error("opened in a directory that does not exist")
	}
}

func TestDamagedRowIsAnError(t *testing.T) {
	s := newStore(t)
	must(s.AllocateSandbox(t.Context(), newSandbox("alpha"), agentlab.Allocation{First: 1, Last: 9}))(t)
	for _, set := range []string{"state = 'ODD'", "desired = ''", "created_at = '2026-01-02 03:04:05.000000000Z'", "network_json = '{\"mood\": 1}'", "cores = 0", "name = 'B B'"} {
		tx, err := s.w.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tx.ExecContext(t.Context(), "UPDATE sandboxes SET "+set); err != nil {
			t.Fatal(err)
		}
		if _, err := sandboxes.query(t.Context(), tx, ""); agentlab.CodeOf(err) != agentlab.CodeInternal {
			t.Errorf("%s: got %v", set, err)
		}
		if err := tx.Rollback(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestFullDisk(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	sb := must(s.AllocateSandbox(ctx, newSandbox("alpha"), agentlab.Allocation{First: 1, Last: 9}))(t)
	var pages int
	if err := s.w.QueryRowContext(ctx, "PRAGMA page_count").Scan(&pages); err != nil {
		t.Fatal(err)
	}
	if _, err := s.w.ExecContext(ctx, fmt.Sprintf("PRAGMA max_page_count = %d", pages)); err != nil {
		t.Fatal(err)
	}
	big := strings.Repeat("x", 64<<10)
	_, err := s.UpdateSandbox(ctx, sb.VMID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		sb.Reason = big
		return []agentlab.Event{{Kind: "x"}}, nil
	})
	wantCode(t, err, agentlab.CodeNoSpace)
	if agentlab.HintOf(err) == "" {
		t.Error("no hint")
	}
	if got := must(s.Sandbox(ctx, sb.VMID))(t); !got.Equal(sb) || len(s.seen) != 0 {
		t.Errorf("half of it was written: %q, %v", got.Reason[:3], s.seen)
	}
	if _, err := s.w.ExecContext(ctx, "PRAGMA max_page_count = 1000000"); err != nil {
		t.Fatal(err)
	}
	must(s.UpdateSandbox(ctx, sb.VMID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) { sb.Reason = big; return nil, nil }))(t)
}

// TestFullFileSystem fills a real one, and goes on when there is room again.
func TestFullFileSystem(t *testing.T) {
	dir := t.TempDir()
	resize := smalldisk.Tmpfs(t, dir, "2m")
	ctx := t.Context()
	path := filepath.Join(dir, "agentlab.db")
	s, err := Open(ctx, path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	written := 0
	for err == nil && written < 10000 {
		if err = s.AppendEvents(ctx, agentlab.Event{Kind: "x", Data: `{"x": "` + strings.Repeat("x", 8<<10) + `"}`}); err == nil {
			written++
		}
	}
	wantCode(t, err, agentlab.CodeNoSpace)
	if evs := must(s.Events(ctx, agentlab.EventFilter{}))(t); len(evs) != written || written == 0 {
		t.Errorf("%d events, %d were written", len(evs), written)
	}
	resize("8m")
	if err := s.AppendEvents(ctx, agentlab.Event{Kind: "x"}); err != nil {
		t.Errorf("with room again: %v", err)
	}
	var verdict string
	if err := s.r.QueryRowContext(ctx, "PRAGMA integrity_check").Scan(&verdict); err != nil || verdict != "ok" {
		t.Errorf("%s, %v", verdict, err)
	}
}

// TestMain lets the test binary be the process that is killed.
func TestMain(m *testing.M) {
	if path := os.Getenv("STORE_CHILD"); path != "" {
		err := writeForever(path)
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// writeForever makes pairs of a sandbox and an event in one transaction and a
// change of it in the next, and prints each number once it is committed.
func writeForever(path string) error {
	ctx := context.Background()
	s, err := Open(ctx, path, Options{})
	if err != nil {
		return err
	}
	out := bufio.NewWriter(os.Stdout)
	for i := 0; ; i++ {
		sb := newSandbox("n-" + agentlab.NewUID())
		sb.LeaseExpiresAt = time.Now().Add(time.Hour)
		sb, err := s.AllocateSandbox(ctx, sb, agentlab.Allocation{First: 1, Last: 1 << 20}, agentlab.Event{Kind: agentlab.EventSandboxCreated})
		if err != nil {
			return err
		}
		if _, err := s.UpdateSandbox(ctx, sb.VMID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
			sb.State = agentlab.SandboxProvisioning
			return []agentlab.Event{{Kind: agentlab.EventSandboxState}}, nil
		}); err != nil {
			return err
		}
		fmt.Fprintln(out, sb.VMID)
		if err := out.Flush(); err != nil {
			return err
		}
	}
}

// TestKilledWriter kills a process that writes, again and again: what it said
// was committed is there, every row has its events, and the next one goes on.
func TestKilledWriter(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agentlab.db")
	last := 0
	for round := range 6 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "STORE_CHILD="+path)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for n := 0; n < 10+7*round && lines.Scan(); n++ {
			if last, err = strconv.Atoi(lines.Text()); err != nil {
				t.Fatal(err)
			}
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		for lines.Scan() { // what it could still say
			last, _ = strconv.Atoi(lines.Text())
		}
		_ = cmd.Wait()
		if last == 0 {
			t.Fatal("the child wrote nothing")
		}
		checkAfterKill(t, path, last)
	}
}

func checkAfterKill(t *testing.T, path string, last int) {
	t.Helper()
	ctx := t.Context()
	s, err := Open(ctx, path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	var verdict string
	if err := s.r.QueryRowContext(ctx, "PRAGMA integrity_check").Scan(&verdict); err != nil || verdict != "ok" {
		t.Fatalf("%s, %v", verdict, err)
	}
	list := must(s.Sandboxes(ctx, agentlab.SandboxFilter{}))(t)
	events := map[int]int{}
	for _, e := range must(s.Events(ctx, agentlab.EventFilter{}))(t) {
		events[e.SandboxVMID]++
	}
	want := 0
	for _, sb := range list {
		n := 1
		if sb.State == agentlab.SandboxProvisioning {
			n = 2
		}
		if events[sb.VMID] != n {
			t.Errorf("sandbox %d is %s with %d events", sb.VMID, sb.State, events[sb.VMID])
		}
		if sb.VMID <= last && n == 2 {
			want++
		}
	}
	// The killed rounds before may each have left one sandbox that was not
	// announced, so count: all that was announced is at least there.
	if sb := must(s.Sandbox(ctx, last))(t); sb.State != agentlab.SandboxProvisioning || want == 0 {
		t.Errorf("sandbox %d was announced and is %s", last, sb.State)
	}
}
