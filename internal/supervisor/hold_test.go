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
	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
	"github.com/agentlab-vm/agentlab/internal/link"
)

// arpRequest is a frame that asks for the address of the gateway.
func arpRequest() []byte {
	card := []byte{0x52, 0x54, 0, 0x77, 0, 2}
	f := append(bytes.Repeat([]byte{0xff}, 6), card...)
	f = append(f, 8, 6, 0, 1, 8, 0, 6, 4, 0, 1)
	f = append(append(f, card...), vnet.DefaultGuest.AsSlice()...)
	f = append(append(f, make([]byte, 6)...), vnet.DefaultGateway.AsSlice()...)
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(f))), f...) //nolint:gosec // 42
}

// The network of a guest that continues from a saved memory opens when the guest
// has the identity of its sandbox. That of a guest that boots is open.
func TestNetworkOpensWithTheIdentity(t *testing.T) {
	for name, own := range map[string]string{"boots": "", "continues": "own"} {
		t.Run(name, func(t *testing.T) {
			d, vm := testDir(t), newFakeVM()
			var identity atomic.Value
			identity.Store("of-the-source")
			asked := make(chan struct{}, 100)
			hostLink, guestLink := net.Pipe()
			hostNet, guestNet := net.Pipe()
			vm.wires.Control, vm.wires.Network = hostLink, hostNet
			l := link.Guest(guestLink)
			srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				_ = json.NewEncoder(w).Encode(guestapi.Health{Identity: identity.Load().(string)})
				select {
				case asked <- struct{}{}:
				default:
				}
			})}
			go func() { _ = srv.Serve(l) }()
			t.Cleanup(func() { _ = srv.Close(); _ = l.Close() })
			replies := make(chan struct{}, 1)
			go func() {
				for one := make([]byte, 1); ; {
					if _, err := io.ReadFull(guestNet, one); err != nil {
						return
					}
					select {
					case replies <- struct{}{}:
					default:
					}
				}
			}()
			supervisedWith(t, d, vm, Start{Identity: own})
			send := func() {
				if _, err := guestNet.Write(arpRequest()); err != nil {
					t.Fatal(err)
				}
			}
			if own != "" {
				for range 20 { // the guest has the identity of another sandbox
					send()
					select {
					case <-asked:
					case <-replies:
						t.Fatal("the network answers")
					}
				}
				identity.Store(own)
			}
			for open := false; !open; {
				send()
				select {
				case <-replies:
					open = true
				case <-time.After(10 * time.Millisecond):
				case <-t.Context().Done():
					t.Fatal("the network does not answer")
				}
			}
		})
	}
}
