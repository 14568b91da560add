package attach

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"strings"

	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/internal/termfilter"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/guestrun"
)

// detachKey is Ctrl-], as in telnet and virsh console.
const detachKey = 0x1d

// Size returns the size of the terminal and the name of its type, or usual ones.
func (t Terminal) Size() (rows, cols uint16, name string) {
	rows, cols = 24, 80
	if f, tty := work.TerminalOf(t.Out); tty {
		if w, h, err := term.GetSize(int(f.Fd())); err == nil {
			rows, cols = uint16(h), uint16(w)
		}
	}
	return rows, cols, cmp.Or(os.Getenv("TERM"), "xterm-256color")
}

// Run connects in, unless it is nil, and the standard output streams with a
// process over conn, and returns its exit code as an error.
func (t Terminal) Run(ctx context.Context, conn net.Conn, in io.Reader, tty bool) error {
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	w := stream.NewWriter(conn)
	if tty {
		restore, err := t.rawTerminal(w)
		if err != nil {
			return err
		}
		defer restore()
	}
	detached := make(chan struct{})
	if in != nil {
		go pumpStdin(in, conn, w, tty, detached)
	} else {
		_ = w.Frame(stream.StdinEOF, nil) // fails if the command has ended; its exit code is read below
	}
	stdout, stderr := FilteredWriter(t.Out), FilteredWriter(t.Err)
	status, err := guestrun.ReadOutput(conn, outputWriter{stdout}, outputWriter{stderr})
	for _, w := range []io.Writer{stdout, stderr} { // the guest's program may still run, or be lost
		if f, ok := w.(*termfilter.Writer); ok {
			_ = f.Reset() // the terminal is gone
		}
	}
	select {
	case <-detached:
		return nil
	default:
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "the connection to the sandbox was lost: %w", err)
	}
	if status.Error != "" {
		t.UI.Progressf("agentlab: %s", agentlab.WithoutControls(status.Error))
	}
	return GuestStatus(status.Code)
}

// GuestStatus returns the exit code of a guest's process as an error, nil for 0.
func GuestStatus(code int) error {
	if code == 0 {
		return nil
	}
	return work.ExitStatus(guestrun.ExitByte(code))
}

func pumpStdin(in io.Reader, conn io.Closer, w *stream.Writer, tty bool, detached chan<- struct{}) {
	buf := make([]byte, 32<<10)
	for {
		n, err := in.Read(buf)
		data := buf[:n]
		if tty {
			if i := strings.IndexByte(string(data), detachKey); i >= 0 {
				close(detached)
				_ = conn.Close()
				return
			}
		}
		if n > 0 && w.Frame(stream.Stdin, data) != nil {
			return
		}
		if err != nil {
			_ = w.Frame(stream.StdinEOF, nil)
			return
		}
	}
}

// outputWriter names the fault of a standard stream.
type outputWriter struct{ io.Writer }

func (w outputWriter) Write(p []byte) (int, error) {
	n, err := w.Writer.Write(p)
	if err != nil {
		err = fmt.Errorf("cannot write output: %w", err)
	}
	return n, err
}

// FilteredWriter returns w for the output of a guest. A terminal gets no sequence that makes
// it act for the guest; other files get each byte.
func FilteredWriter(w io.Writer) io.Writer {
	if _, tty := work.TerminalOf(w); tty {
		return termfilter.New(w, termfilter.Options{Clipboard: true})
	}
	return w
}

// rawMode sets the terminal to raw mode, also again when this process continues after a
// stop: the shell has used the terminal in between. Then it calls resumed. Without a
// terminal it does nothing.
func (t Terminal) rawMode(resumed func()) (restore func(), err error) {
	in, tty := work.TerminalOf(t.In)
	if !tty {
		return func() {}, nil
	}
	fd := int(in.Fd())
	old, err := term.MakeRaw(fd)
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInternal, "cannot set the terminal to raw mode: %w", err)
	}
	continued, done := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(continued, unix.SIGCONT)
	go func() {
		defer close(done)
		for range continued {
			_, _ = term.MakeRaw(fd) // in the background it stops this process until 'fg'
			resumed()
		}
	}()
	return func() {
		signal.Stop(continued)
		close(continued)
		<-done
		_ = term.Restore(fd, old)
	}, nil
}

// rawTerminal sets the terminal to raw mode and forwards size changes. Without a
// terminal it does nothing.
func (t Terminal) rawTerminal(w *stream.Writer) (restore func(), err error) {
	redraw := make(chan struct{}, 1)
	leave, err := t.rawMode(func() {
		select {
		case redraw <- struct{}{}:
		default:
		}
	})
	if _, tty := work.TerminalOf(t.In); err != nil || !tty {
		return leave, err
	}
	changes := make(chan os.Signal, 1)
	signal.Notify(changes, unix.SIGWINCH)
	ended := make(chan struct{})
	go func() {
		for {
			rows, cols, _ := t.Size()
			_ = w.JSON(stream.Resize, stream.WindowSize{Rows: rows, Cols: cols})
			select {
			case <-changes:
			case <-redraw: // programs draw when the size changes
				rows, cols, _ := t.Size()
				_ = w.JSON(stream.Resize, stream.WindowSize{Rows: max(rows, 2) - 1, Cols: cols})
			case <-ended:
				return
			}
		}
	}()
	return func() {
		signal.Stop(changes)
		close(ended)
		leave()
	}, nil
}
