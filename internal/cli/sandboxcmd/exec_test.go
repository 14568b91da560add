package sandboxcmd

import (
	"bufio"
	"errors"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// A command that has ended before it has read its input, or the end of it, ends with its
// own exit code, though nothing more can be written to it.
func TestExecEndsBeforeItsInput(t *testing.T) {
	for name, stdin := range map[string]bool{"large input": true, "no input": false} {
		t.Run(name, func(t *testing.T) {
			conn, far := net.Pipe()
			go func() {
				w := stream.NewWriter(far)
				_ = w.Frame(stream.Stdout, []byte("out"))
				_ = w.JSON(stream.Exit, stream.ExitStatus{Code: 7})
				_ = far.Close()
			}()
			text, err := io.ReadAll(conn)
			if err != nil {
				t.Fatal(err)
			}
			ahead := bufio.NewReaderSize(io.MultiReader(strings.NewReader(string(text)), conn), len(text))
			if _, err := ahead.Peek(len(text)); err != nil {
				t.Fatal(err)
			}
			var out strings.Builder
			app := &cli.App{Stdin: strings.NewReader(strings.Repeat("x", 3<<20)), Stdout: &out, Stderr: io.Discard}
			var in io.Reader
			if stdin {
				in = app.Stdin
			}
			err = app.Attached().Run(t.Context(), stream.Unread(conn, ahead), in, false)
			if code := work.ExitStatus(0); !errors.As(err, &code) || code != 7 || out.String() != "out" {
				t.Errorf("%v, output %q", err, out.String())
			}
		})
	}
}
