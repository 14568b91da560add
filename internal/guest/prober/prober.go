// Package prober makes network connections as 'agent-runner probe' in a sandbox
// and reports their results. Its input lists the connections; package
// internal/egress/probe judges the results.
package prober

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

const (
	defaultTimeout = 3 * time.Second
	maxTimeout     = time.Minute
	maxProbes      = 4096
	maxInput       = 16 << 20 // bytes of JSON
	maxAnswer      = 200      // bytes of ProbeResult.Answer
	maxParallel    = 24       // probes that run at the same time
)

// probeText is the data that a probe sends where its content does not matter. It is
// neither TLS nor HTTP.
const probeText = "AGENTLAB-PROBE\r\n\r\n"

// Main runs 'agent-runner probe'; args do not include the command's name.
func Main(args []string) int {
	fs := flag.NewFlagSet("agent-runner probe", flag.ContinueOnError)
	dns := fs.String("dns", "", "DNS server ADDR:PORT instead of the configured one")
	if err := fs.Parse(args); err != nil {
		return 2
	}
	if err := run(context.Background(), os.Stdin, os.Stdout, *dns); err != nil {
		fmt.Fprintln(os.Stderr, "agent-runner probe:", err)
		return 1
	}
	return 0
}

// run reads probes from in and writes a line for each to out.
func run(ctx context.Context, in io.Reader, out io.Writer, dns string) error {
	var probes []guestapi.Probe
	if err := json.NewDecoder(io.LimitReader(in, maxInput)).Decode(&probes); err != nil {
		return fmt.Errorf("standard input is not a JSON array of probes: %w", err)
	}
	if len(probes) > maxProbes {
		return fmt.Errorf("%d probes are more than %d", len(probes), maxProbes)
	}
	w := bufio.NewWriter(out)
	enc := json.NewEncoder(w)
	var failed error
	for r := range Run(ctx, probes, dns) {
		if err := errors.Join(enc.Encode(r), w.Flush()); err != nil && failed == nil {
			failed = fmt.Errorf("write results: %w", err)
		}
	}
	return failed
}

// Run runs probes, some in parallel, and sends a result for each. dns is the
// DNS server ADDR:PORT for names; "" means the configured one. The channel is
// closed after the last result and must be read until then.
func Run(ctx context.Context, probes []guestapi.Probe, dns string) <-chan guestapi.ProbeResult {
	p := &prober{dns: dns, wire: &wire{}}
	results := make(chan guestapi.ProbeResult)
	go func() {
		defer close(results)
		defer p.wire.close()
		var wg sync.WaitGroup
		slots := make(chan struct{}, maxParallel)
		for _, probe := range probes {
			slots <- struct{}{}
			wg.Go(func() {
				defer func() { <-slots }()
				results <- p.try(ctx, probe)
			})
		}
		wg.Wait()
	}()
	return results
}

type prober struct {
	dns  string
	wire *wire
}

// attempt is one running probe.
type attempt struct {
	guestapi.Probe
	host string // of Target, as an address
	port string
	res  guestapi.ProbeResult
}

func (p *prober) try(ctx context.Context, probe guestapi.Probe) guestapi.ProbeResult {
	limit := time.Duration(probe.TimeoutMS) * time.Millisecond
	if limit <= 0 {
		limit = defaultTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, min(limit, maxTimeout))
	defer cancel()
	a := &attempt{Probe: probe, res: guestapi.ProbeResult{ID: probe.ID}}
	began := time.Now()
	if err := p.attempt(ctx, a); err != nil {
		a.res.Error = reason(err)
	}
	a.res.Millis = time.Since(began).Milliseconds()
	return a.res
}

func (p *prober) attempt(ctx context.Context, a *attempt) error {
	kinds := map[string]func(context.Context, *attempt) error{
		"tcp": p.tcp, "udp": p.udp, "tls": p.tls, "http": p.http, "quic": p.quic, "ping": p.ping,
	}
	switch try := kinds[a.Kind]; {
	case a.Kind == "raw":
		return p.wire.send(ctx, a.Frame)
	case a.Kind == "dns", a.Kind == "dnstcp":
		return p.ask(ctx, a)
	case try == nil:
		return errors.New(guestapi.ProbeUnknown)
	default:
		if err := p.locate(ctx, a); err != nil {
			return err
		}
		return try(ctx, a)
	}
}

// locate splits the target and resolves a name in it.
func (p *prober) locate(ctx context.Context, a *attempt) error {
	a.host = a.Target
	if a.Kind != "ping" {
		var err error
		if a.host, a.port, err = net.SplitHostPort(a.Target); err != nil {
			return fmt.Errorf("%q is not HOST:PORT", a.Target)
		}
	}
	if _, err := netip.ParseAddr(a.host); err == nil {
		return nil
	}
	answer, err := p.lookup(ctx, "udp", p.dns, a.host, a.Type)
	if err != nil {
		return fmt.Errorf("name: %s", reason(err))
	}
	a.res.Addrs = answer.addrs
	if len(answer.addrs) == 0 {
		return errors.New("name: no address")
	}
	a.host = answer.addrs[0]
	return nil
}

// reason returns a short and stable text for an error.
func reason(err error) string {
	var dnsErr *net.DNSError
	for _, r := range []struct {
		is   error
		text string
	}{
		{syscall.ECONNREFUSED, "refused"}, {syscall.ECONNRESET, "reset"}, {syscall.EPIPE, "reset"},
		{syscall.EHOSTUNREACH, "unreachable"}, {syscall.ENETUNREACH, "unreachable"}, {syscall.EADDRNOTAVAIL, "unreachable"},
		{syscall.ETIMEDOUT, "timeout"}, {context.DeadlineExceeded, "timeout"}, {os.ErrDeadlineExceeded, "timeout"},
		{syscall.EACCES, "not permitted"}, {syscall.EPERM, "not permitted"}, {io.EOF, "closed"}, {io.ErrUnexpectedEOF, "closed"},
	} {
		if errors.Is(err, r.is) {
			return r.text
		}
	}
	if errors.As(err, &dnsErr) {
		return dnsErr.Err
	}
	return agentlab.OneLine(err.Error(), maxAnswer)
}
