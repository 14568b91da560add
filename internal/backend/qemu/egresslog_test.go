package qemu

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// egressDriver has one sandbox, of which there is nothing but its log.
func egressDriver(t *testing.T) (*Driver, backend.Ref, string) {
	t.Helper()
	dir := t.TempDir()
	d, err := New(Config{
		StateDir: dir, CacheDir: filepath.Join(dir, "cache"), Runner: "/bin/true", Shim: []string{"/bin/false"},
		Images: func(context.Context, string) (ImageFiles, error) { return ImageFiles{}, os.ErrNotExist },
	})
	if err != nil {
		t.Fatal(err)
	}
	ref := backend.Ref{VMID: 1001, UID: uid(1)}
	if err := os.MkdirAll(d.dir(ref), 0o700); err != nil {
		t.Fatal(err)
	}
	h := handle{Version: handleVersion, Spec: backend.Spec{VMID: ref.VMID, UID: ref.UID, Network: agentlab.Network{Mode: agentlab.NetworkNAT}}}
	if err := writeJSON(filepath.Join(d.dir(ref), fileConfig), h); err != nil {
		t.Fatal(err)
	}
	return d, ref, d.dir(ref)
}

func openTestLog(t *testing.T, dir string, rebooted bool) *egressLog {
	t.Helper()
	l, err := openEgressLog(dir, 1001, rebooted)
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

func TestEgressLogGoesOnAfterACrash(t *testing.T) {
	t.Parallel()
	d, ref, dir := egressDriver(t)
	l := openTestLog(t, dir, false)
	for i := range 3 {
		l.write(testRecord(i + 1))
	}
	// The process died within a line, and before it the log dropped something.
	f, err := os.OpenFile(filepath.Join(dir, fileEgress), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = f.WriteString("\n[512 bytes dropped]\n{\"seq\":4,\"time\":\"20")
	_ = f.Close()
	openTestLog(t, dir, false).write(testRecord(5))
	recs, err := d.EgressLog(t.Context(), ref, 0, 100)
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
	openTestLog(t, dir, true).write(testRecord(6)) // the host was booted: a gap, never a number twice
	more, err := d.EgressLog(t.Context(), ref, recs[len(recs)-1].Seq, 100)
	if err != nil || len(more) != 1 || more[0].Seq < recs[len(recs)-1].Seq+seqJump {
		t.Errorf("after a boot: %+v, %v", more, err)
	}
}

// A reader sees every number once and in order, however often the log turns
// over under it.
func TestEgressLogIsReadWhileItTurnsOver(t *testing.T) {
	t.Parallel()
	d, ref, dir := egressDriver(t)
	log, err := openLog(filepath.Join(dir, fileEgress), 40<<10, 0, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	l := &egressLog{log: log, vmid: 1001}
	const records = 5000
	var wg sync.WaitGroup
	done := make(chan struct{})
	wg.Go(func() {
		defer close(done)
		for i := range records {
			l.write(testRecord(i + 1))
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
		recs, err := d.EgressLog(t.Context(), ref, last, 50)
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
func TestEgressLogOfStrangeContent(t *testing.T) {
	t.Parallel()
	d, ref, dir := egressDriver(t)
	l := openTestLog(t, dir, false)
	r := testRecord(1)
	r.Name, r.Error = "a\x1b[2J\n{\"seq\":99,", "x\u202ey"
	l.write(r)
	lines := []string{
		`{"seq":-5,"vmid":1001}`, `{"seq":7,"vmid":2}`, `{"seq":99999999999999999999,"vmid":1001}`, `{"seq":8`, "\x00\xff",
		`{"seq":9,"seq":1,"vmid":1001}`, strings.Repeat("x", 3*maxEgressLine),
	}
	f, err := os.OpenFile(filepath.Join(dir, fileEgress), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = f.WriteString(strings.Join(lines, "\n") + "\n")
	_ = f.Close()
	recs, err := d.EgressLog(t.Context(), ref, 0, 100)
	if err != nil || len(recs) != 1 || recs[0].Seq != 1 || strings.ContainsAny(recs[0].Name+recs[0].Error, "\x1b\n\u202e") {
		t.Errorf("%+v, %v", recs, err)
	}
	if _, err := d.EgressLog(t.Context(), ref, 0, 0); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("limit 0: %v", err)
	}
}

func TestUpdateNetworkOfAStoppedSandbox(t *testing.T) {
	t.Parallel()
	d, ref, dir := egressDriver(t)
	n := agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: rules("site.test", "*.wild.test:443")}
	if err := d.UpdateNetwork(t.Context(), ref, n); err != nil {
		t.Fatal(err)
	}
	h, err := readHandle(dir)
	if err != nil || len(h.Spec.Network.Allow) != 2 || h.Spec.Network.Mode != n.Mode {
		t.Errorf("%+v, %v", h.Spec.Network, err)
	}
	for _, bad := range []agentlab.Network{{}, {Mode: "bridge"}, {Mode: agentlab.NetworkAllowlist, Allow: rules("no rule")}} {
		if err := d.UpdateNetwork(t.Context(), ref, bad); err == nil {
			t.Errorf("%+v is taken", bad)
		}
	}
	if again, _ := readHandle(dir); len(again.Spec.Network.Allow) != 2 {
		t.Errorf("a refused policy was kept: %+v", again.Spec.Network)
	}
	// A supervisor that does not answer: an error, and nothing is changed.
	lock, err := d.takeShimLock(dir)
	if err != nil || lock == nil {
		t.Fatalf("%v, %v", lock, err)
	}
	defer func() { _ = lock.Close() }()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := d.UpdateNetwork(ctx, ref, agentlab.Network{Mode: agentlab.NetworkOff}); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("without an answer: %v", err)
	}
	if again, _ := readHandle(dir); again.Spec.Network.Mode != agentlab.NetworkAllowlist {
		t.Errorf("an unanswered policy was kept: %+v", again.Spec.Network)
	}
}

// A change that is held up until its asker has given up is not made: it would
// undo what was asked for since.
func TestALateChangeOfTheNetworkIsNotMade(t *testing.T) {
	t.Parallel()
	_, _, dir := egressDriver(t)
	h, err := readHandle(dir)
	if err != nil {
		t.Fatal(err)
	}
	s := &shim{dir: dir, handle: h}
	gone, leave := context.WithCancel(t.Context())
	leave()
	s.netMu.Lock() // an earlier change waits for the disk
	late := make(chan error)
	go func() { late <- s.setNetwork(gone, agentlab.Network{Mode: agentlab.NetworkNAT}) }()
	s.netMu.Unlock()
	if err := <-late; agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("the late change: %v", err)
	}
	if err := s.setNetwork(t.Context(), agentlab.Network{Mode: agentlab.NetworkOff}); err != nil {
		t.Fatal(err)
	}
	if h, err = readHandle(dir); err != nil || h.Spec.Network.Mode != agentlab.NetworkOff || s.network().Mode != agentlab.NetworkOff {
		t.Errorf("%+v, %v", h.Spec.Network, err)
	}
}
