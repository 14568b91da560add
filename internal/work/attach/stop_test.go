package attach

import (
	"encoding/json"
	"io"
	"net"
	"os"
	"reflect"
	"slices"
	"testing"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/agentlab-vm/agentlab/internal/stream"
)

// After a stop of the process, for example by 'kill -STOP' or the shell, 'fg' makes the
// terminal raw again, and programs in the guest draw again, because their size changes.
func TestTerminalAfterStop(t *testing.T) {
	ptmx, tty, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = ptmx.Close(), tty.Close() }()
	if err := pty.Setsize(tty, &pty.Winsize{Rows: 30, Cols: 90}); err != nil {
		t.Fatal(err)
	}
	fd := int(tty.Fd())
	cooked, err := term.GetState(fd)
	if err != nil {
		t.Fatal(err)
	}
	here, there := net.Pipe()
	defer func() { _ = there.Close() }()
	restore, err := Terminal{In: tty, Out: tty, Err: io.Discard}.rawTerminal(stream.NewWriter(here))
	if err != nil {
		t.Fatal(err)
	}
	sizes := stream.NewReader(there)
	rows := func() uint16 {
		var size stream.WindowSize
		kind, p, err := sizes.Next()
		if err == nil {
			err = json.Unmarshal(p, &size)
		}
		if err != nil || kind != stream.Resize || size.Cols != 90 {
			t.Fatalf("%v %s: %v", kind, p, err)
		}
		return size.Rows
	}
	if got := rows(); got != 30 {
		t.Errorf("%d rows at the begin", got)
	}
	raw, err := term.GetState(fd)
	if err != nil || reflect.DeepEqual(raw, cooked) {
		t.Fatalf("the terminal is not raw: %v", err)
	}
	if err := term.Restore(fd, cooked); err != nil { // as a shell does it
		t.Fatal(err)
	}
	if err := unix.Kill(os.Getpid(), unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if got := []uint16{rows(), rows()}; !slices.Equal(got, []uint16{29, 30}) {
		t.Errorf("sizes %d", got)
	}
	if now, err := term.GetState(fd); err != nil || !reflect.DeepEqual(now, raw) {
		t.Errorf("the terminal is not raw: %+v, %v", now, err)
	}
	restore()
	if now, err := term.GetState(fd); err != nil || !reflect.DeepEqual(now, cooked) {
		t.Errorf("the terminal is not as before: %+v, %v", now, err)
	}
}
