package vnet_test

import (
	"testing"

	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
)

// Frames that a guest sends before Hold is closed are dropped, not delayed.
func TestHold(t *testing.T) {
	hold := make(chan struct{})
	l := newLab(t, func(c *vnet.Config) { c.Hold = hold })
	for range 3 {
		l.guest.send(t, pingFrame(vnet.DefaultGateway))
	}
	eventually(t, "the frames are dropped", func() bool { return l.Stats().FramesDropped == 3 })
	if s := l.Stats(); s.FramesIn != 0 || s.FramesOut != 0 {
		t.Errorf("held, the network has received %d frames and sent %d", s.FramesIn, s.FramesOut)
	}
	close(hold)
	l.guest.send(t, pingFrame(vnet.DefaultGateway))
	l.guest.sees(t, "a reply", func(f []byte) bool { return isICMP(f, vnet.DefaultGateway, header.ICMPv4EchoReply) })
}
