package vnet_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
)

// childEnv makes the test binary a shim's network and nothing else, with its
// link on standard input. The value is how many TCP flows to wait for.
const childEnv = "VNET_TEST_CHILD"

// childProcess reports its own resident memory, in kB, when the flows are open
// and idle.
func childProcess(flows string) {
	want, _ := strconv.Atoi(flows)
	p, err := egress.New(agentlab.Network{Mode: agentlab.NetworkNAT})
	if err != nil {
		panic(err)
	}
	link, err := net.FileConn(os.Stdin)
	if err != nil {
		panic(err)
	}
	n, err := vnet.New(vnet.Config{Link: link, Policy: p, Dialer: dialerFunc(firehose)})
	if err != nil {
		panic(err)
	}
	go func() {
		look := time.NewTicker(200 * time.Millisecond)
		defer look.Stop()
		for last := ^uint64(0); n.Stats().TCPFlows < want || n.Stats().FramesOut != last; <-look.C {
			last = n.Stats().FramesOut
		}
		if want == 0 {
			debug.FreeOSMemory()
		}
		status, _ := os.ReadFile("/proc/self/status")
		for line := range strings.Lines(string(status)) {
			if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
				fmt.Println(strings.Fields(rest)[0])
			}
		}
		n.Close()
	}()
	_ = n.Run(context.Background())
}

// firehose connects to a host that never stops sending.
func firehose(context.Context, string, string) (net.Conn, error) {
	near, far := net.Pipe()
	go func() {
		block := make([]byte, 32<<10)
		for {
			if _, err := far.Write(block); err != nil {
				return
			}
		}
	}()
	return near, nil
}

// measure starts a child and returns its memory in kB.
func measure(t *testing.T, flows int) int {
	t.Helper()
	ours, theirs := linkPair(t)
	f, err := ours.(interface{ File() (*os.File, error) }).File()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+strconv.Itoa(flows))
	cmd.Stdin = f
	var out strings.Builder
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	guest := newGuest(t, theirs, vnet.DefaultMTU)
	for i := range flows {
		guest.mustTCP(t, netip.AddrPortFrom(netip.AddrFrom4([4]byte{11, 0, 0, 1}), uint16(i+1000))) // and never reads
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	kb, err := strconv.Atoi(strings.TrimSpace(out.String()))
	if err != nil {
		t.Fatal(err)
	}
	return kb
}

// The race detector's shadow memory would be counted too, so nothing is
// measured with it.
func TestMemory(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector changes how much memory a process takes")
	}
	for flows, limit := range map[int]int{
		0:   20 << 10,  // of the 25 MB that a whole shim may take
		512: 200 << 10, // all the flows there may be, and a guest that reads none
	} {
		t.Run(fmt.Sprintf("flows=%d", flows), func(t *testing.T) {
			kb := measure(t, flows)
			t.Logf("%d kB resident", kb)
			if kb > limit {
				t.Errorf("%d kB resident, more than %d", kb, limit)
			}
		})
	}
}
