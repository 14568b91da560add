// Package guestrun runs commands in a sandbox for workflows: their output is limited and
// their text is without control characters, and a guest that goes silent ends them.
package guestrun

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// Run runs a command in a sandbox with stdin, which may be nil. Its standard
// output goes to stdout, which limits it: an error of stdout ends the command. The
// error for another exit code than 0 has the end of its standard error.
func Run(ctx context.Context, c *client.Client, sandbox string, req guestapi.ExecRequest, stdin io.Reader, stdout io.Writer) error {
	return RunShown(ctx, c, sandbox, req, AnySilence, stdin, stdout, io.Discard)
}

// RunShown is Run with its own limits, that also copies standard error to progress.
func RunShown(ctx context.Context, c *client.Client, sandbox string, req guestapi.ExecRequest, limits Silence, stdin io.Reader, stdout, progress io.Writer) error {
	errOut := &bounded.Tail{Max: 4 << 10}
	status, inErr, err := Capture(ctx, c, sandbox, req, limits, stdin, stdout, io.MultiWriter(errOut, progress))
	if err != nil || status.Code == 0 {
		return err
	}
	if errOut.String() == "" && status.Error == "" && inErr != nil {
		return GuestFault(req, status.Code, inErr.Error())
	}
	return Failed(req, status, errOut.String())
}

// Failed returns the error for a command that failed and wrote errOut to standard error.
func Failed(req guestapi.ExecRequest, status stream.ExitStatus, errOut string) error {
	return GuestFault(req, status.Code, agentlab.WithoutControls(lastMessage(strings.TrimSpace(errOut+"\n"+status.Error))))
}

// Capture runs a command in a sandbox, and returns how it ended and the error of
// stdin, which may be nil. It returns after the last read of stdin: a stdin
// that can block is an io.Closer, which it closes. It ends a command that makes no
// progress.
func Capture(ctx context.Context, c *client.Client, sandbox string, req guestapi.ExecRequest, limits Silence, stdin io.Reader, stdout, stderr io.Writer) (status stream.ExitStatus, inErr, err error) {
	var moved atomic.Int64
	caller := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		alive := func(ctx context.Context) error { return guestAlive(ctx, c, sandbox) }
		if err := limits.watch(ctx, sandbox, &moved, alive); err != nil {
			cancel(err)
		}
	}()
	defer func() {
		cancel(nil)
		<-watched
	}()
	conn, err := c.Exec(ctx, sandbox, req)
	if err != nil {
		if ctx.Err() != nil && caller.Err() == nil {
			err = context.Cause(ctx)
		}
		return status, nil, err
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	w := stream.NewWriter(conn)
	sent := make(chan error, 1)
	go func() {
		var err error
		if stdin != nil {
			_, err = io.Copy(w.Data(stream.Stdin), movingReader{stdin, &moved})
		}
		_ = w.Frame(stream.StdinEOF, nil)
		sent <- err
	}()
	status, err = ReadOutput(movingReader{conn, &moved}, stdout, stderr)
	_ = conn.Close() // ends the goroutine
	if in, ok := stdin.(io.Closer); ok {
		_ = in.Close()
	}
	inErr = <-sent
	status.Code = ExitByte(status.Code)
	switch {
	case caller.Err() != nil:
		err = caller.Err()
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	case err != nil:
		err = agentlab.Errorf(agentlab.CodeUnavailable, "the connection to the sandbox was lost: %w", err)
	}
	return status, inErr, err
}

// Tool runs a program in a sandbox, and returns its exit code and the end of its standard
// error, without control characters, which progress also gets. in is as in Capture.
func Tool(ctx context.Context, c *client.Client, sandbox string, req guestapi.ExecRequest, in io.Reader, out, progress io.Writer) (code int, text string, err error) {
	said := &bounded.Tail{Max: MaxToolOutput}
	status, _, err := Capture(ctx, c, sandbox, req, AnySilence, in, out, io.MultiWriter(said, progress))
	return status.Code, strings.TrimSpace(work.SanitizeLines(said.String() + "\n" + status.Error)), err
}

// LastLine returns the last line of the text of Tool, which has the reason of a failure.
func LastLine(text string) string {
	return strings.TrimPrefix(text[strings.LastIndexByte(text, '\n')+1:], AgentMessage)
}

// Input is an archive that a guest reads. The end of the guest ends it.
type Input struct{ *io.PipeReader }

// Close ends the guest's input with ErrEnded.
func (g Input) Close() error { return g.CloseWithError(ErrEnded) }

// ErrEnded ends the transfer of an archive that the guest no longer reads.
var ErrEnded = errors.New("the guest ended before the end of the archive")

// lastMessage returns the last message of agentlab-agent in text, which other programs
// have written to as well, or text if there is none.
func lastMessage(text string) string {
	if i := strings.LastIndex(text, "\n"+AgentMessage); i >= 0 {
		return text[i+1:]
	}
	return text
}

// AgentMessage begins each message of agentlab-agent.
const AgentMessage = "agentlab-agent: "

// GuestFault is the error for a command of a guest that failed.
func GuestFault(req guestapi.ExecRequest, code int, text string) error {
	program := ""
	if len(req.Command) > 0 {
		program = req.Command[0]
	}
	switch {
	case code == 127 && program == "agentlab-agent" && strings.Contains(text, "is not installed"): // the message of agentlab-agent
		return agentlab.Errorf(agentlab.CodeUnsupported, "%s", strings.TrimPrefix(text, AgentMessage)).
			WithHint("choose an image that has it, in the profile, and start again with --fresh: agentlab image list")
	case code == 127 && program != "agentlab-agent":
		return agentlab.Errorf(agentlab.CodeUnsupported, "a program is missing in the sandbox; %s failed (exit code 127): %s", agentlab.WithoutControls(program), cmp.Or(text, "it is not installed")).
			WithHint("install %s in the sandbox, or choose an image that has it", agentlab.WithoutControls(program))
	case program == "agentlab-agent" && (code == 127 || code == 2):
		return agentlab.Errorf(agentlab.CodeUnsupported, "the sandbox has the programs of another version of AgentLab: %s", cmp.Or(text, "it lacks the command")).
			WithHint("stop and start it, which brings them up to date; if it has an image with programs of its own, build that again, and create a sandbox from it: agentlab image build NAME")
	}
	if text == "" {
		text = "no message"
	}
	if strings.Contains(text, "no space left on device") || strings.Contains(text, "No space left on device") {
		return agentlab.Errorf(agentlab.CodeNoSpace, "the disk of the sandbox is full: %s", text).
			WithHint("remove files in it, e.g. with: agentlab exec -ti SESSION -- bash")
	}
	return agentlab.Errorf(agentlab.CodeConflict, "%s failed in the sandbox (exit code %d): %s", agentlab.WithoutControls(strings.Join(req.Command, " ")), code, text)
}

// ReadOutput copies the output of a command until it ends.
func ReadOutput(conn io.Reader, stdout, stderr io.Writer) (status stream.ExitStatus, err error) {
	r := stream.NewReader(conn)
	for {
		t, p, err := r.Next()
		if err != nil {
			return status, err
		}
		switch t {
		case stream.Stdout:
			_, err = stdout.Write(p)
		case stream.Stderr:
			_, err = stderr.Write(p)
		case stream.Exit:
			return status, json.Unmarshal(p, &status)
		}
		if err != nil {
			return status, err
		}
	}
}

// ExitByte returns an exit code of a guest. Those that no process can have become 255:
// truncated, 256 would mean success.
func ExitByte(code int) int {
	if code < 0 || code > 255 {
		return 255
	}
	return code
}

// MaxGuestDocument limits a document of a guest about its terminals, in bytes.
const MaxGuestDocument = 4 << 10

// Document runs a command in a sandbox and decodes its output. Its standard error
// also goes to progress.
func Document(ctx context.Context, c *client.Client, sandbox string, req guestapi.ExecRequest, out any, progress io.Writer) error {
	got := bounded.Head{Max: MaxGuestDocument, Fail: errors.New("the answer is too large")}
	if err := RunShown(ctx, c, sandbox, req, AnySilence, nil, &got, progress); err != nil {
		return err
	}
	if err := json.Unmarshal([]byte(got.String()), out); err != nil {
		return Invalid("the answer is not valid JSON")
	}
	return nil
}

// Invalid is the error for an answer of a guest that no AgentLab gives.
func Invalid(format string, args ...any) error {
	return agentlab.Errorf(agentlab.CodeDenied, "the sandbox sent invalid data: %w", fmt.Errorf(format, args...)).
		WithHint("nothing was changed; inspect the sandbox: agentlab attach, or delete it")
}

// MaxToolOutput bounds the output of a tool that is shown, in bytes.
const MaxToolOutput = 64 << 10
