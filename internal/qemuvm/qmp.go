package qemuvm

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
)

// maxQMPLine bounds one message of QEMU, in bytes: a guest may control QEMU.
const maxQMPLine = 1 << 20

// QMP is a client of the QEMU machine protocol.
type QMP struct {
	conn   io.ReadWriteCloser
	events func(QMPEvent) // called in order, by one goroutine
	done   chan struct{}

	mu      sync.Mutex
	nextID  int
	waiting map[int]chan qmpMessage
	err     error
}

type qmpMessage struct {
	ID     int             `json:"id"`
	Return json.RawMessage `json:"return"`
	Error  *struct {
		Class string `json:"class"`
		Desc  string `json:"desc"`
	} `json:"error"`
	QMPEvent
}

// RefusedError is QEMU's answer to a command that it has not executed.
type RefusedError struct{ Class, Text string }

func (e RefusedError) Error() string { return e.Class + ": " + e.Text }

// QMPEvent has the fields of QEMU's events that are used.
type QMPEvent struct {
	Event string `json:"event"`
	Data  struct {
		Guest   bool   `json:"guest"`   // SHUTDOWN: requested by the guest
		Reason  string `json:"reason"`  // SHUTDOWN: e.g. "guest-reset"; BLOCK_IO_ERROR: text
		NoSpace bool   `json:"nospace"` // BLOCK_IO_ERROR
		Device  string `json:"device"`  // BLOCK_IO_ERROR
		Status  string `json:"status"`  // MIGRATION
		Action  string `json:"action"`  // BLOCK_IO_ERROR: "stop" if the guest was paused for it
	} `json:"data"`
}

// DiskError handles the event BLOCK_IO_ERROR: QEMU has paused the guest if the host's disk
// is full.
func (e QMPEvent) DiskError(h supervisor.Hooks) {
	h.Log.Error("disk error", "device", e.Data.Device, "reason", e.Data.Reason, "nospace", e.Data.NoSpace, "action", e.Data.Action)
	if e.Data.NoSpace && e.Data.Action == "stop" {
		h.Paused("the host's disk is full")
	}
}

// NewQMP returns a client on conn, which it owns. QEMU accepts commands after
// negotiate.
func NewQMP(conn io.ReadWriteCloser, events func(QMPEvent)) *QMP {
	q := &QMP{conn: conn, events: events, done: make(chan struct{}), waiting: map[int]chan qmpMessage{}}
	go q.read()
	return q
}

// Negotiate waits until QEMU accepts commands. read skips QEMU's greeting.
func (q *QMP) Negotiate(ctx context.Context) error {
	return q.Execute(ctx, "qmp_capabilities", nil, nil)
}

func (q *QMP) read() {
	sc := bufio.NewScanner(q.conn)
	sc.Buffer(make([]byte, 0, 4096), maxQMPLine)
	for sc.Scan() {
		m, err := parseQMP(sc.Bytes())
		switch {
		case err != nil:
		case m.Event != "":
			q.events(m.QMPEvent)
			continue
		default:
			q.reply(m)
			continue
		}
		q.fail(err)
		return
	}
	q.fail(errors.Join(sc.Err(), io.EOF))
}

func parseQMP(line []byte) (qmpMessage, error) {
	m := qmpMessage{ID: -1}
	if err := json.Unmarshal(bytes.TrimSpace(line), &m); err != nil {
		return m, fmt.Errorf("qmp: %w", err)
	}
	return m, nil
}

func (q *QMP) reply(m qmpMessage) {
	q.mu.Lock()
	ch := q.waiting[m.ID]
	delete(q.waiting, m.ID)
	q.mu.Unlock()
	if ch != nil {
		ch <- m
	}
}

func (q *QMP) fail(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.err == nil {
		q.err = err
		close(q.done)
	}
}

// Execute runs a command and stores what it returns in result, if not nil.
func (q *QMP) Execute(ctx context.Context, command string, arguments, result any) error {
	return q.send(ctx, command, arguments, result, q.conn.Write)
}

// ExecuteWith is execute for a command with which QEMU gets an open file.
func (q *QMP) ExecuteWith(ctx context.Context, command string, arguments any, f *os.File, result any) error {
	conn, ok := q.conn.(*net.UnixConn)
	if !ok {
		return fmt.Errorf("qmp %s: files need a UNIX socket", command)
	}
	return q.send(ctx, command, arguments, result, func(b []byte) (int, error) {
		n, _, err := conn.WriteMsgUnix(b, unix.UnixRights(int(f.Fd())), nil)
		return n, err
	})
}

// ExecuteAll runs commands without arguments, which QEMU gets in one message.
func (q *QMP) ExecuteAll(ctx context.Context, commands ...string) error {
	list := make([]qmpCommand, len(commands))
	for i, name := range commands {
		list[i].Execute = name
	}
	answers, err := q.post(list, q.conn.Write)
	for i, answer := range answers {
		if err == nil {
			err = q.receive(ctx, commands[i], answer, nil)
		}
	}
	return err
}

func (q *QMP) send(ctx context.Context, command string, arguments, result any, write func([]byte) (int, error)) error {
	answers, err := q.post([]qmpCommand{{Execute: command, Arguments: arguments}}, write)
	if err != nil {
		return err
	}
	return q.receive(ctx, command, answers[0], result)
}

// qmpCommand is a command as QEMU reads it.
type qmpCommand struct {
	Execute   string `json:"execute"`
	ID        int    `json:"id"`
	Arguments any    `json:"arguments,omitempty"`
}

// post writes commands in one message, and returns where their answers arrive.
func (q *QMP) post(commands []qmpCommand, write func([]byte) (int, error)) ([]<-chan qmpMessage, error) {
	var answers []<-chan qmpMessage
	var text []byte
	q.mu.Lock() // one message at a time
	defer q.mu.Unlock()
	for _, c := range commands {
		q.nextID++
		c.ID = q.nextID
		b, err := json.Marshal(c)
		if err != nil {
			return nil, fmt.Errorf("qmp %s: %w", c.Execute, err)
		}
		ch := make(chan qmpMessage, 1)
		q.waiting[c.ID] = ch
		answers, text = append(answers, ch), append(append(text, b...), '\n')
	}
	if _, err := write(text); err != nil {
		return nil, fmt.Errorf("qmp %s: %w", commands[0].Execute, err)
	}
	return answers, nil
}

// receive waits for the answer to a command, and stores what it has in result, if
// not nil.
func (q *QMP) receive(ctx context.Context, command string, answer <-chan qmpMessage, result any) error {
	select {
	case m := <-answer:
		if m.Error != nil {
			return fmt.Errorf("qmp %s: %w", command, RefusedError{m.Error.Class, m.Error.Desc})
		}
		if result == nil {
			return nil
		}
		return json.Unmarshal(m.Return, result)
	case <-q.done:
		q.mu.Lock()
		defer q.mu.Unlock()
		return fmt.Errorf("qmp %s: %w", command, q.err)
	case <-ctx.Done():
		return fmt.Errorf("qmp %s: %w", command, context.Cause(ctx))
	}
}

// Running returns an error unless the guest's CPUs run.
func (q *QMP) Running(ctx context.Context) error {
	var st struct {
		Running bool   `json:"running"`
		Status  string `json:"status"`
	}
	err := q.Execute(ctx, "query-status", nil, &st)
	if err == nil && !st.Running {
		err = errors.New("the guest's CPUs do not run: " + agentlab.OneLine(st.Status, MaxReason))
	}
	return err
}

// Done returns a channel that is closed when the connection has ended.
func (q *QMP) Done() <-chan struct{} { return q.done }

// Close closes the connection.
func (q *QMP) Close() error { return q.conn.Close() }
