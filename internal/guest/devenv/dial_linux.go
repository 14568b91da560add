package devenv

import (
	"context"
	"fmt"
	"net"
	"os"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// dialIn connects to a port of the loopback in the network namespace of a process.
func dialIn(ctx context.Context, pid int, port uint16) (net.Conn, error) {
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		return nil, err
	}
	defer func() { _ = ns.Close() }()
	type answer struct {
		conn net.Conn
		err  error
	}
	got := make(chan answer, 1)
	go func() {
		runtime.LockOSThread() // the thread ends with this goroutine: it stays in the namespace
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			got <- answer{nil, err}
			return
		}
		var conn net.Conn
		var err error
		for _, host := range []string{"127.0.0.1", "::1"} {
			// A dialer with one address uses only this thread.
			d := net.Dialer{Timeout: dialLimit, FallbackDelay: -1}
			if conn, err = d.DialContext(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(int(port)))); err == nil {
				break
			}
		}
		got <- answer{conn, err}
	}()
	a := <-got
	return a.conn, a.err
}
