package egresslog

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/bounded"
)

func openTestLog(t *testing.T, path string, rebooted bool) *Log {
	t.Helper()
	l, err := Open(path, 7, rebooted)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func testRecord(i int) agentlab.EgressRecord {
	now := time.Unix(1700000000, 0).UTC()
	return agentlab.EgressRecord{Time: now, Last: now, Proto: "tcp", Addr: "192.31.196.1", Port: i, Rule: "mode.off", Count: 1}
}

func TestEgressLogContinuesAfterCrash(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "egress.log")
	l := openTestLog(t, path, false)
	for i := range 3 {
		l.Write(testRecord(i + 1))
	}
	// The process died within a line, and before it the log dropped something.
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = f.WriteString("\n[512 bytes dropped]\n{\"seq\":4,\"time\":\"20")
	_ = f.Close()
	openTestLog(t, path, false).Write(testRecord(5))
	recs, err := Read(t.Context(), path, 0, 100)
	if err != nil {
		t.Fatal(err)
	}
	var seqs []string
	for _, r := range recs {
		seqs = append(seqs, fmt.Sprintf("%d:%d", r.Seq, r.Port))
	}
	if got := strings.Join(seqs, " "); got != "1:1 2:2 3:3 4:5" && got != "1:1 2:2 3:3 5:5" {
		t.Errorf("records %s", got)
	}
	openTestLog(t, path, true).Write(testRecord(6)) // the host was booted: a gap, never a number twice
	more, err := Read(t.Context(), path, recs[len(recs)-1].Seq, 100)
	if err != nil || len(more) != 1 || more[0].Seq < recs[len(recs)-1].Seq+seqJump {
		t.Errorf("after a boot: %+v, %v", more, err)
	}
}

// A daemon of an older version reads only records with the number of the
// sandbox.
func TestRecordsHaveTheVMID(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "egress.log")
	openTestLog(t, path, false).Write(testRecord(1))
	recs, err := Read(t.Context(), path, 0, 100)
	if err != nil || len(recs) != 1 || recs[0].VMID != 7 {
		t.Errorf("%+v, %v", recs, err)
	}
}

// A reader sees every number once and in order, however often the log turns
// over under it.
func TestEgressLogIsReadDuringRotation(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "egress.log")
	log, err := bounded.OpenLog(path, 40<<10, 0, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	l := &Log{log: log}
	const records = 5000
	var wg sync.WaitGroup
	done := make(chan struct{})
	wg.Go(func() {
		defer close(done)
		for i := range records {
			l.Write(testRecord(i + 1))
		}
		_ = l.Close()
	})
	var last int64
	for ended := false; ; {
		select {
		case <-done:
			ended = true
		default:
		}
		recs, err := Read(t.Context(), path, last, 50)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range recs {
			if r.Seq <= last || int64(r.Port) != r.Seq {
				t.Fatalf("record %+v after %d", r, last)
			}
			last = r.Seq
		}
		if ended && len(recs) == 0 {
			break
		}
	}
	wg.Wait()
	if last != records {
		t.Errorf("the last record is %d", last)
	}
}

// What stands in the log is a guest's doing; nothing of it is taken for more
// than it is.
func TestEgressLogWithInvalidContent(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "egress.log")
	l := openTestLog(t, path, false)
	r := testRecord(1)
	r.Name, r.Error = "a\x1b[2J\n{\"seq\":99,", "x\u202ey"
	l.Write(r)
	lines := []string{
		`{"seq":-5,"vmid":1001}`, `{"seq":99999999999999999999,"vmid":1001}`, `{"seq":8`, "\x00\xff",
		`{"seq":9,"seq":1,"vmid":1001}`, strings.Repeat("x", 3*maxLine),
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = f.WriteString(strings.Join(lines, "\n") + "\n")
	_ = f.Close()
	recs, err := Read(t.Context(), path, 0, 100)
	if err != nil || len(recs) != 1 || recs[0].Seq != 1 || strings.ContainsAny(recs[0].Name+recs[0].Error, "\x1b\n\u202e") {
		t.Errorf("%+v, %v", recs, err)
	}
	if _, err := Read(t.Context(), path, 0, 0); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("limit 0: %v", err)
	}
}
