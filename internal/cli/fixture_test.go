package cli_test

import (
	"bytes"
	"compress/gzip"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/agentlab-vm/agentlab/internal/store"
)

var fixture = flag.Bool("fixture", false, "write the database of a run to the fixtures of internal/store")

// TestWriteDatabaseFixture runs a script that writes rows to every table, and
// saves the database as a fixture of internal/store, named after its schema. The
// tests of internal/store require that later versions open it without a loss.
func TestWriteDatabaseFixture(t *testing.T) {
	if !*fixture {
		t.Skip("writes a fixture; run it with -fixture before a release")
	}
	dir, err := filepath.Abs("../store/testdata")
	if err != nil {
		t.Fatal(err)
	}
	p := scriptParams(t, "testdata/fixture")
	p.Cmds["fixture"] = func(ts *testscript.TestScript, neg bool, args []string) {
		if neg || len(args) != 1 {
			ts.Fatalf("usage: fixture BACKUP")
		}
		content, err := os.ReadFile(args[0])
		ts.Check(err)
		var packed bytes.Buffer
		z, err := gzip.NewWriterLevel(&packed, gzip.BestCompression)
		ts.Check(err)
		_, err = z.Write(content)
		ts.Check(err)
		ts.Check(z.Close())
		ts.Check(os.MkdirAll(dir, 0o750))
		ts.Check(os.WriteFile(filepath.Join(dir, fmt.Sprintf("schema-%05d.db.gz", store.NewestSchema())), packed.Bytes(), 0o600))
	}
	testscript.Run(t, p)
}
