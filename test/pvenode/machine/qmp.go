package machine

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"time"
)

// monitor is a client of QEMU's machine protocol, on one connection. Commands
// go one by one.
type monitor struct {
	conn   net.Conn
	events func(name string)

	mu      sync.Mutex // held for one command
	last    int        // number of the last command
	answers chan message
}

type message struct {
	ID     int             `json:"id"`
	Return json.RawMessage `json:"return"`
	Error  *struct {
		Class string `json:"class"`
		Desc  string `json:"desc"`
	} `json:"error"`
	Event string `json:"event"`
	QMP   any    `json:"QMP"`
}

// newMonitor negotiates on conn, which it owns. events is called in order by
// one goroutine and must not wait for a command.
func newMonitor(ctx context.Context, conn net.Conn, events func(string)) (*monitor, error) {
	m := &monitor{conn: conn, events: events, answers: make(chan message, 16)}
	go m.read()
	if _, err := m.do(ctx, "qmp_capabilities", nil); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return m, nil
}

func (m *monitor) read() {
	defer close(m.answers)
	sc := bufio.NewScanner(m.conn)
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		var msg message
		if json.Unmarshal(sc.Bytes(), &msg) != nil {
			return
		}
		switch {
		case msg.Event != "":
			m.events(msg.Event)
		case msg.QMP == nil:
			m.answers <- msg
		}
	}
}

func (m *monitor) do(ctx context.Context, command string, args any) (json.RawMessage, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.last++
	if err := send(m.conn, command, args, m.last); err != nil {
		return nil, err
	}
	for {
		select {
		case msg, ok := <-m.answers:
			switch {
			case !ok:
				return nil, net.ErrClosed
			case msg.ID == m.last: // others are answers to commands without a waiting caller
				return msg.result()
			}
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (msg message) result() (json.RawMessage, error) {
	if msg.Error != nil {
		return nil, errors.New(msg.Error.Desc)
	}
	return msg.Return, nil
}

// send writes one command; number 0 means that it has none.
func send(conn net.Conn, command string, args any, number int) error {
	text, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
		ID        int    `json:"id,omitempty"`
	}{command, args, number})
	if err != nil {
		return err
	}
	_, err = conn.Write(append(text, '\n'))
	return err
}

// ErrAgent is why a guest agent gave no answer within the time that Proxmox
// VE gives it.
var ErrAgent = errors.New("got timeout")

// askAgent has one conversation with the guest agent: it finds the beginning
// of the agent's answers first, as what was said before may still be in the
// channel.
func askAgent(ctx context.Context, path, command string, args any) (json.RawMessage, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	answer, err := converse(conn, command, args)
	if ctx.Err() != nil {
		return nil, ErrAgent
	}
	return answer, err
}

func converse(conn net.Conn, command string, args any) (json.RawMessage, error) {
	id := rand.Int64N(1 << 48)
	if _, err := conn.Write([]byte{0xff}); err != nil {
		return nil, err
	}
	if err := send(conn, "guest-sync-delimited", map[string]int64{"id": id}, 0); err != nil {
		return nil, err
	}
	r := bufio.NewReaderSize(conn, 64<<10)
	for {
		if _, err := r.ReadBytes(0xff); err != nil {
			return nil, err
		}
		msg, err := readMessage(r)
		if err != nil {
			return nil, err
		}
		if strings.TrimSpace(string(msg.Return)) == fmt.Sprint(id) {
			break
		}
	}
	if err := send(conn, command, args, 0); err != nil || command == "guest-shutdown" {
		return nil, err // a shutdown that was taken is not answered
	}
	msg, err := readMessage(r)
	if err != nil {
		return nil, err
	}
	return msg.result()
}

func readMessage(r *bufio.Reader) (message, error) {
	var msg message
	line, err := r.ReadBytes('\n')
	if err != nil {
		return msg, err
	}
	err = json.Unmarshal(line, &msg)
	return msg, err
}
