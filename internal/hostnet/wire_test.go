//go:build linux

package hostnet

import (
	"bytes"
	"encoding/binary"
	"io"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

// What an agent does not know it refuses: an older one would enforce a part of
// a policy and say that it is in force.
func TestAgentRefusesWhatItDoesNotKnow(t *testing.T) {
	frame := func(text string) *bytes.Buffer {
		return bytes.NewBuffer(append(binary.BigEndian.AppendUint32(nil, uint32(len(text))), text...))
	}
	var c call
	for _, text := range []string{
		`{"op":"put","guests":[{"Ref":{"VMID":1},"Network":{"mode":"nat","never_at_night":true}}]}`,
		`{"op":"hello","version":1,"network":{"Bridge":"vmbr1","NoIPv6":true}}`,
		`{"op":"ready","at_once":true}`,
	} {
		if err := readCall(frame(text), &c); agentlab.CodeOf(err) != agentlab.CodeUnsupported || agentlab.HintOf(err) == "" {
			t.Errorf("%s: %v", text, err)
		}
	}
	for _, b := range []*bytes.Buffer{frame(`{"op":`), bytes.NewBufferString("\xff\xff\xff\xff{}"), bytes.NewBufferString("\x00")} {
		if err := readCall(b, &c); agentlab.CodeOf(err) != agentlab.CodeInvalid {
			t.Errorf("no call: %v", err)
		}
	}
	var whole bytes.Buffer
	must(t, writeFrame(&whole, call{Op: opPut, Guests: []Guest{{ID: ID{VMID: 1, UID: "u"}, Network: all}}}))
	if text := whole.String(); !strings.Contains(text, `"guests":[{"Ref":{"VMID":1,"UID":"u"},`) { // what an agent of another version reads
		t.Error(text)
	}
	if err := readCall(&whole, &c); err != nil {
		t.Error(err)
	}
}

// A length is no reason to make room for it.
func TestFramesAreBounded(t *testing.T) {
	for most, read := range map[uint32]func(io.Reader, any) error{
		maxFrame:      readFrame,
		maxGuestFrame: func(r io.Reader, v any) error { return readFrameOf(r, v, maxGuestFrame) },
	} {
		var c call
		whole := append(binary.BigEndian.AppendUint32(nil, most+1), bytes.Repeat([]byte(" "), int(most)+1)...)
		if err := read(bytes.NewReader(whole), &c); err == nil || err.Error() != "a frame is too long" {
			t.Errorf("%d bytes: %v", most+1, err)
		}
	}
}
