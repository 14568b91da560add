package vnet

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

const (
	lengthSize = 4
	// maxFrame is the largest frame that QEMU's socket netdevs ever send
	// (NET_BUFSIZE). A larger length means that the stream is not valid,
	// and the data after it cannot be parsed.
	maxFrame = 4096 + 65536
	// readBuffer is enough for many small frames, or several large ones.
	readBuffer = 64 << 10
)

// ErrFrame is returned by Run if the data of the link is not length-prefixed
// frames.
var ErrFrame = errors.New("vnet: malformed frame on the link")

// linkEndpoint is the stack's network device: it frames outgoing packets, and
// receive passes incoming ones to the stack.
type linkEndpoint struct {
	link  io.ReadWriteCloser
	mac   tcpip.LinkAddress
	mtu   uint32
	stats *counters
	close sync.Once

	mu         sync.RWMutex
	dispatcher stack.NetworkDispatcher

	writeMu sync.Mutex
	lengths []byte
	iov     net.Buffers
}

var _ stack.LinkEndpoint = (*linkEndpoint)(nil)

func newLinkEndpoint(link io.ReadWriteCloser, mtu int, mac tcpip.LinkAddress, stats *counters) *linkEndpoint {
	return &linkEndpoint{link: link, mac: mac, mtu: uint32(mtu), stats: stats}
}

// shut closes the link; running reads and writes return.
func (e *linkEndpoint) shut() { e.close.Do(func() { _ = e.link.Close() }) }

// receive reads frames and passes those that the filter accepts to the stack,
// until the link fails.
func (e *linkEndpoint) receive(pass func(frame []byte) bool) error {
	r := bufio.NewReaderSize(e.link, readBuffer)
	largest := int(e.mtu) + header.EthernetMinimumSize
	var head [lengthSize]byte
	for {
		if _, err := io.ReadFull(r, head[:]); err != nil {
			return linkError(err)
		}
		size := binary.BigEndian.Uint32(head[:])
		if size > maxFrame {
			return fmt.Errorf("%w: length %d", ErrFrame, size)
		}
		if n := int(size); n < header.EthernetMinimumSize || n > largest {
			e.stats.framesDropped.Add(1)
			if _, err := r.Discard(n); err != nil {
				return linkError(err)
			}
			continue
		}
		view := buffer.NewViewSize(int(size))
		if _, err := io.ReadFull(r, view.AsSlice()); err != nil {
			view.Release()
			return linkError(err)
		}
		if !pass(view.AsSlice()) {
			e.stats.framesDropped.Add(1)
			view.Release()
			continue
		}
		e.stats.framesIn.Add(1)
		e.deliver(view)
	}
}

func linkError(err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("%w: truncated", ErrFrame)
	}
	return err
}

func (e *linkEndpoint) deliver(view *buffer.View) {
	e.mu.RLock()
	d := e.dispatcher
	e.mu.RUnlock()
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithView(view)})
	defer pkt.DecRef()
	if d != nil {
		d.DeliverNetworkPacket(0, pkt) // the Ethernet layer above reads the type itself
	}
}

// WritePackets writes a batch of frames in one call to the link. The queueing
// discipline calls it from one goroutine, so that a guest that does not read
// blocks that goroutine and no other.
func (e *linkEndpoint) WritePackets(pkts stack.PacketBufferList) (int, tcpip.Error) {
	e.writeMu.Lock()
	defer e.writeMu.Unlock()
	list := pkts.AsSlice()
	if need := len(list) * lengthSize; cap(e.lengths) < need {
		e.lengths = make([]byte, need)
	}
	iov := e.iov[:0]
	for i, pkt := range list {
		length := e.lengths[i*lengthSize : (i+1)*lengthSize : (i+1)*lengthSize]
		binary.BigEndian.PutUint32(length, uint32(pkt.Size()))
		iov = append(iov, length)
		iov = append(iov, pkt.AsSlices()...)
	}
	e.iov = iov // WriteTo consumes its receiver; keep the backing array
	_, err := iov.WriteTo(e.link)
	clear(e.iov)
	if err != nil {
		e.shut()
		return 0, &tcpip.ErrClosedForSend{}
	}
	e.stats.framesOut.Add(uint64(len(list)))
	return len(list), nil
}

// Attach implements stack.LinkEndpoint.
func (e *linkEndpoint) Attach(d stack.NetworkDispatcher) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.dispatcher = d
}

// IsAttached implements stack.LinkEndpoint.
func (e *linkEndpoint) IsAttached() bool {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.dispatcher != nil
}

// MTU implements stack.LinkEndpoint. The Ethernet layer subtracts its header.
func (e *linkEndpoint) MTU() uint32 { return e.mtu + header.EthernetMinimumSize }

// SetMTU implements stack.LinkEndpoint; the MTU is fixed.
func (e *linkEndpoint) SetMTU(uint32) {}

// MaxHeaderLength implements stack.LinkEndpoint.
func (e *linkEndpoint) MaxHeaderLength() uint16 { return 0 }

// LinkAddress implements stack.LinkEndpoint.
func (e *linkEndpoint) LinkAddress() tcpip.LinkAddress { return e.mac }

// SetLinkAddress implements stack.LinkEndpoint; the address is fixed.
func (e *linkEndpoint) SetLinkAddress(tcpip.LinkAddress) {}

// Capabilities implements stack.LinkEndpoint.
func (e *linkEndpoint) Capabilities() stack.LinkEndpointCapabilities { return 0 }

// Wait implements stack.LinkEndpoint; the endpoint has no goroutines.
func (e *linkEndpoint) Wait() {}

// ARPHardwareType implements stack.LinkEndpoint.
func (e *linkEndpoint) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareNone }

// AddHeader implements stack.LinkEndpoint.
func (e *linkEndpoint) AddHeader(*stack.PacketBuffer) {}

// ParseHeader implements stack.LinkEndpoint.
func (e *linkEndpoint) ParseHeader(*stack.PacketBuffer) bool { return true }

// Close implements stack.LinkEndpoint.
func (e *linkEndpoint) Close() { e.shut() }

// SetOnCloseAction implements stack.LinkEndpoint.
func (e *linkEndpoint) SetOnCloseAction(func()) {}
