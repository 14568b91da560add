package hostnet

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/netip"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress/nft"
)

// agentVersion is the version of the protocol below; both ends must have the
// same one.
const agentVersion = 1

// The calls of a controller to an agent, each on a separate stream. After the
// answer to opDial the stream is the connection. The agent itself opens
// streams, with opGuest, for connections of guests.
const (
	opHello   = "hello"
	opReady   = "ready"
	opPut     = "put"
	opRestore = "restore"
	opDrop    = "drop"
	opListen  = "listen"
	opDial    = "dial"
	opLease   = "lease"
	opRecords = "records"
	opGuest   = "guest"
)

// call is the first message of a stream.
type call struct {
	Op      string           `json:"op"`
	Version int              `json:"version,omitempty"`
	Network *nft.Config      `json:"network,omitempty"`
	Guests  []Guest          `json:"guests,omitempty"`
	ID      ID               `json:"ref,omitzero"`
	MAC     net.HardwareAddr `json:"mac,omitempty"`
	To      netip.AddrPort   `json:"to,omitzero"`
	After   int64            `json:"after,omitempty"`
	Limit   int              `json:"limit,omitempty"`
}

// answer is the answer to a call.
type answer struct {
	Failed  *failure                `json:"failed,omitempty"`
	Addr    netip.Addr              `json:"addr,omitzero"`
	Records []agentlab.EgressRecord `json:"records,omitempty"`
}

// failure is the wire form of an error.
type failure struct {
	Code                 agentlab.Code
	Message, Field, Hint string
}

func failureOf(err error) *failure {
	if err == nil {
		return nil
	}
	f := &failure{Code: agentlab.CodeOf(err), Message: err.Error(), Hint: agentlab.HintOf(err)}
	if e, ok := errors.AsType[*agentlab.Error](err); ok && e.Field != "" && e.Error() == f.Message {
		f.Field, f.Message = e.Field, (&agentlab.Error{Message: e.Message, Err: e.Err}).Error()
	}
	return f
}

func (f *failure) err() error {
	if f == nil {
		return nil
	}
	return &agentlab.Error{Code: f.Code, Message: f.Message, Field: f.Field, Hint: f.Hint}
}

// maxFrame is the maximum size of one call or answer, in bytes.
const maxFrame = 16 << 20

// writeFrame writes v with its length as prefix, so that a reader reads no
// byte more.
func writeFrame(w io.Writer, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = w.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(text))), text...))
	return err
}

// maxGuestFrame is the maximum size of an opGuest, in bytes.
const maxGuestFrame = 4 << 10

func readFrame(r io.Reader, v any) error { return readFrameOf(r, v, maxFrame) }

// readCall reads a call in an agent. It rejects a call with an unknown field,
// which may be part of a policy.
func readCall(r io.Reader, c *call) error {
	var text json.RawMessage
	if err := readFrame(r, &text); err != nil {
		return agentlab.Errorf(agentlab.CodeInvalid, "cannot read a call: %w", err)
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(c); err != nil {
		return agentlab.Errorf(agentlab.CodeUnsupported, "invalid request from the controller: %w", err).
			WithHint("install the same agentlabd on both")
	}
	return nil
}

func readFrameOf(r io.Reader, v any, most uint32) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > most {
		return errors.New("a frame is too long")
	}
	text := make([]byte, n)
	if _, err := io.ReadFull(r, text); err != nil {
		return err
	}
	return json.Unmarshal(text, v)
}

func muxConfig() *yamux.Config {
	c := yamux.DefaultConfig()
	c.LogOutput = io.Discard
	c.KeepAliveInterval = 10 * time.Second
	c.ConnectionWriteTimeout = 10 * time.Second
	return c
}

// rw combines two halves, such as a program's standard streams.
type rw struct {
	io.Reader
	io.Writer
	close func() error
}

func (s rw) Close() error { return s.close() }
