package supervisor

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/control"
	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
	"github.com/agentlab-vm/agentlab/internal/link"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// arpRequest is a frame that asks for the address of the gateway.
func arpRequest() []byte {
	card := []byte{0x52, 0x54, 0, 0x77, 0, 2}
	f := append(bytes.Repeat([]byte{0xff}, 6), card...)
	f = append(f, 8, 6, 0, 1, 8, 0, 6, 4, 0, 1)
	f = append(append(f, card...), vnet.DefaultGuest.AsSlice()...)
	f = append(append(f, make([]byte, 6)...), vnet.DefaultGateway.AsSlice()...)
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(f))), f...)
}

// heldGuest is a guest that continues from the memory of another one.
type heldGuest struct {
	*testing.T
	dir      Dir
	identity atomic.Value // that it reports
	asked    atomic.Int64 // questions about it
	status   atomic.Int64 // of its answers to a new identity; 0 means none
	net      net.Conn
	replies  chan struct{}
}

func newHeldGuest(t *testing.T, start Start) *heldGuest {
	t.Helper()
	vm := newFakeVM()
	g := &heldGuest{T: t, dir: testDir(t), replies: make(chan struct{}, 1)}
	g.identity.Store("of-the-source")
	hostLink, guestLink := net.Pipe()
	hostNet, guestNet := net.Pipe()
	vm.wires.Control, vm.wires.Network, g.net = hostLink, hostNet, guestNet
	l := link.Guest(guestLink)
	srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(g.serve)}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close(); _ = l.Close() })
	go func() {
		for one := make([]byte, 1); ; {
			if _, err := io.ReadFull(guestNet, one); err != nil {
				return
			}
			select {
			case g.replies <- struct{}{}:
			default:
			}
		}
	}()
	supervisedWith(t, g.dir, vm, start)
	return g
}

func (g *heldGuest) serve(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPut {
		g.asked.Add(1)
	} else if status := g.status.Load(); status == 0 {
		panic(http.ErrAbortHandler)
	} else if status != http.StatusOK {
		w.WriteHeader(int(status))
		return
	}
	_ = json.NewEncoder(w).Encode(guestapi.Health{Identity: g.identity.Load().(string)})
}

// set sends a new identity. The guest answers with a status.
func (g *heldGuest) set(status int64) {
	g.Helper()
	g.status.Store(status)
	g.identity.Store("own")
	_, err := control.New(g.dir.DialControl).SetIdentity(g.Context(), guestapi.Identity{UID: "own"})
	if (err == nil) != (status == http.StatusOK) {
		g.Fatal(err)
	}
}

// open waits until the network answers.
func (g *heldGuest) open() {
	g.Helper()
	guard.Until(g.T, "the network answers", func() bool { return g.answers(1) })
}

// answers reports whether the network answers one of some frames, which are sent
// one after the other.
func (g *heldGuest) answers(frames int) bool {
	g.Helper()
	for range frames {
		if _, err := g.net.Write(arpRequest()); err != nil {
			g.Fatal(err)
		}
		select {
		case <-g.replies:
			return true
		case <-time.After(10 * time.Millisecond):
		}
	}
	return false
}

// The network of a guest that continues from the memory of another one opens when
// the guest has accepted the identity of its sandbox, without a question to the
// guest. A guest that continues from its own memory is asked. The network of a
// guest that boots is open.
func TestNetworkOpensWithTheIdentity(t *testing.T) {
	t.Run("boots", func(t *testing.T) {
		newHeldGuest(t, Start{}).open()
	})
	t.Run("continues from its own memory", func(t *testing.T) {
		g := newHeldGuest(t, Start{Identity: "of-the-source", Own: true})
		if g.open(); g.asked.Load() == 0 {
			t.Error("the guest was not asked")
		}
	})
	t.Run("continues from the memory of another", func(t *testing.T) {
		g := newHeldGuest(t, Start{Identity: "own"})
		if _, err := control.New(g.dir.DialControl).Health(t.Context()); err != nil {
			t.Fatal(err)
		}
		if g.answers(20) {
			t.Fatal("the network of a guest with the identity of another sandbox answers")
		}
		asked := g.asked.Load()
		g.set(http.StatusOK)
		if err := g.dir.AwaitIdentity(t.Context()); err != nil {
			t.Error(err)
		}
		g.open()
		if n := g.asked.Load() - asked; n != 0 {
			t.Errorf("the guest was asked %d times", n)
		}
	})
}

// After a lost or a bad answer to an identity, the guest is asked whether it has
// the identity.
func TestLostIdentity(t *testing.T) {
	for name, status := range map[string]int64{"lost": 0, "failed": http.StatusInternalServerError} {
		t.Run(name, func(t *testing.T) {
			g := newHeldGuest(t, Start{Identity: "own"})
			g.set(status)
			g.open()
			if g.asked.Load() == 0 {
				t.Error("the guest was not asked")
			}
		})
	}
	t.Run("refused", func(t *testing.T) {
		g := newHeldGuest(t, Start{Identity: "another"})
		g.set(http.StatusInternalServerError)
		if g.answers(50) {
			t.Error("the network of a guest with another identity answers")
		}
	})
}
