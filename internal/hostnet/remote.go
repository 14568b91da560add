package hostnet

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/egress/nft"
)

// RemoteConfig configures the connection to the agent of another machine.
// Network and Command are required.
type RemoteConfig struct {
	Network func() (nft.Config, error)
	// Command runs the agent: ssh and its arguments. Its standard streams are
	// the agent's.
	Command []string
	Logger  *slog.Logger // nil means none
}

// Remote is the network of another machine, through the agent there
// (ServeAgent). It has the methods of Local. If the connection to the agent
// fails, it is opened again, and the agent gets the sandboxes on the bridge
// again. Until then calls return unavailable, the rules there stay in force,
// and guests cannot resolve names.
type Remote struct {
	cfg RemoteConfig
	log *slog.Logger

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	connecting sync.Mutex // held while connecting

	mu        sync.Mutex
	mux       *yamux.Session
	restored  bool
	guests    map[int]Guest
	listeners map[ID]*listener
}

// NewRemote returns the network of another machine. The first call connects to
// it.
func NewRemote(cfg RemoteConfig) *Remote {
	r := &Remote{cfg: cfg, log: cfg.Logger, guests: map[int]Guest{}, listeners: map[ID]*listener{}}
	if r.log == nil {
		r.log = slog.New(slog.DiscardHandler)
	}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

// Close closes the connection. The rules stay in force.
func (r *Remote) Close() error {
	r.cancel()
	r.mu.Lock()
	mux := r.mux
	r.mu.Unlock()
	if mux != nil {
		_ = mux.Close()
	}
	r.wg.Wait()
	return nil
}

// connectTimeout limits connecting; the agent may wait for an older agent.
const connectTimeout = agentLockTimeout + 15*time.Second

// session returns the session with the agent, and connects if there is none.
func (r *Remote) session() (*yamux.Session, error) {
	live := func() *yamux.Session {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.mux != nil && !r.mux.IsClosed() {
			return r.mux
		}
		return nil
	}
	if mux := live(); mux != nil {
		return mux, nil
	}
	r.connecting.Lock()
	defer r.connecting.Unlock()
	if mux := live(); mux != nil {
		return mux, nil
	}
	if r.ctx.Err() != nil {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "this process is stopping")
	}
	ctx, cancel := context.WithTimeout(r.ctx, connectTimeout)
	defer cancel()
	mux, err := r.connect()
	if err != nil {
		return nil, err
	}
	if err := r.handshake(ctx, mux); err != nil {
		_ = mux.Close()
		return nil, err
	}
	r.mu.Lock()
	r.mux = mux
	r.mu.Unlock()
	r.wg.Go(func() { r.acceptGuests(mux) })
	return mux, nil
}

// agentStopTimeout is how long an agent, and processes with its streams open, may
// take to end.
const agentStopTimeout = 5 * time.Second

// connect starts the agent. The agent's standard error is logged when it ends.
func (r *Remote) connect() (*yamux.Session, error) {
	cmd := exec.CommandContext(r.ctx, r.cfg.Command[0], r.cfg.Command[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// A child process of it may keep its standard error open forever.
	cmd.WaitDelay = agentStopTimeout
	end := func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.Cancel = end
	words := bounded.Tail{Max: agentlab.MaxReasonBytes}
	cmd.Stderr = &words
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, r.unreachable(err.Error())
	}
	mux, err := yamux.Client(rw{out, in, func() error { return in.Close() }}, muxConfig())
	if err != nil {
		_ = end()
		_ = cmd.Wait()
		return nil, err
	}
	r.wg.Go(func() {
		<-mux.CloseChan()
		t := time.AfterFunc(agentStopTimeout, func() { _ = end() })
		err := cmd.Wait()
		t.Stop()
		if err != nil && r.ctx.Err() == nil {
			text := agentlab.Reason(words.String())
			r.log.Error("the connection to another node's network ended", "command", strings.Join(r.cfg.Command, " "), "err", err, "stderr", text)
		}
	})
	return mux, nil
}

func (r *Remote) unreachable(why string) error {
	return agentlab.Errorf(agentlab.CodeUnavailable, "the network of the other node is not reachable: %s", why).
		WithHint("this command must work without a password: %s", strings.Join(r.cfg.Command, " "))
}

// handshake sends the hello call to a new agent, and the guests on the bridge
// if they are known.
func (r *Remote) handshake(ctx context.Context, mux *yamux.Session) error {
	network, err := r.cfg.Network()
	if err != nil {
		return err
	}
	if _, err := r.ask(ctx, mux, call{Op: opHello, Version: agentVersion, Network: &network}); err != nil {
		return err
	}
	r.mu.Lock()
	restored := r.restored
	var guests []Guest
	for _, g := range r.guests {
		guests = append(guests, g)
	}
	var ids []ID
	for id := range r.listeners {
		ids = append(ids, id)
	}
	r.mu.Unlock()
	if restored {
		if _, err := r.ask(ctx, mux, call{Op: opRestore, Guests: guests}); err != nil {
			return err
		}
	}
	for _, id := range ids {
		if _, err := r.ask(ctx, mux, call{Op: opListen, ID: id}); err != nil {
			return err
		}
	}
	return nil
}

// acceptGuests accepts guests' connections, and reconnects when the session ends.
func (r *Remote) acceptGuests(mux *yamux.Session) {
	taking := make(chan struct{}, maxPendingConns)
	for {
		stream, err := mux.AcceptStream()
		if err != nil {
			break
		}
		select {
		case taking <- struct{}{}:
			r.wg.Go(func() {
				defer func() { <-taking }()
				r.dispatch(stream)
			})
		default: // that many silent streams are not from guests
			_ = stream.Close()
		}
	}
	_ = mux.Close()
	for pause := time.Second; r.ctx.Err() == nil; pause = min(2*pause, time.Minute) {
		if _, err := r.session(); err == nil {
			return
		}
		select {
		case <-time.After(pause):
		case <-r.ctx.Done():
		}
	}
}

// maxPendingConns limits the connections for which the agent has not sent the guest
// yet, which it normally sends at once.
const maxPendingConns = 256

// dispatch passes a guest's connection to its listener.
func (r *Remote) dispatch(stream net.Conn) {
	var c call
	_ = stream.SetReadDeadline(time.Now().Add(connectTimeout))
	if err := readFrameOf(stream, &c, maxGuestFrame); err != nil || c.Op != opGuest {
		_ = stream.Close()
		return
	}
	_ = stream.SetReadDeadline(time.Time{})
	r.mu.Lock()
	ln := r.listeners[c.ID]
	r.mu.Unlock()
	if ln == nil || !ln.offer(stream) {
		_ = stream.Close()
	}
}

// ask makes a call on a session.
func (r *Remote) ask(ctx context.Context, mux *yamux.Session, c call) (answer, error) {
	stream, a, err := r.open(ctx, mux, c)
	if stream != nil {
		_ = stream.Close()
	}
	return a, err
}

// open makes a call and also returns its stream.
func (r *Remote) open(ctx context.Context, mux *yamux.Session, c call) (net.Conn, answer, error) {
	var a answer
	if ctx.Err() != nil {
		return nil, a, agentlab.Errorf(agentlab.CodeUnavailable, "cancelled: %w", context.Cause(ctx))
	}
	stream, err := mux.OpenStream()
	if err != nil {
		return nil, a, r.unreachable(err.Error())
	}
	stop := context.AfterFunc(ctx, func() { _ = stream.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err = writeFrame(stream, c); err == nil {
		err = readFrame(stream, &a)
	}
	switch {
	case err != nil && ctx.Err() != nil:
		_ = stream.Close()
		return nil, a, agentlab.Errorf(agentlab.CodeUnknownOutcome, "the other node's agent did not answer in time: %w", context.Cause(ctx))
	case err != nil:
		_ = stream.Close()
		return nil, a, agentlab.Errorf(agentlab.CodeUnknownOutcome, "the connection to the other node was lost: %w", err)
	}
	return stream, a, a.Failed.err()
}

func (r *Remote) do(ctx context.Context, c call) (answer, error) {
	mux, err := r.session()
	if err != nil {
		return answer{}, err
	}
	return r.ask(ctx, mux, c)
}

// Ready is Local.Ready on the other machine.
func (r *Remote) Ready(ctx context.Context) error {
	_, err := r.do(ctx, call{Op: opReady})
	return err
}

// Put is Local.Put on the other machine.
func (r *Remote) Put(ctx context.Context, g Guest) error {
	_, err := r.do(ctx, call{Op: opPut, Guests: []Guest{g}})
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		r.guests[g.ID.VMID] = g
	} else {
		delete(r.guests, g.ID.VMID)
	}
	return err
}

// Restore is Local.Restore on the other machine.
func (r *Remote) Restore(ctx context.Context, guests []Guest) error {
	if _, err := r.do(ctx, call{Op: opRestore, Guests: guests}); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.restored, r.guests = true, map[int]Guest{}
	for _, g := range guests {
		r.guests[g.ID.VMID] = g
	}
	return nil
}

// Drop is Local.Drop on the other machine.
func (r *Remote) Drop(ctx context.Context, id ID) error {
	r.mu.Lock()
	if g, ok := r.guests[id.VMID]; ok && g.ID == id {
		delete(r.guests, id.VMID)
	}
	ln := r.listeners[id]
	r.mu.Unlock()
	if ln != nil {
		_ = ln.Close()
	}
	_, err := r.do(ctx, call{Op: opDrop, ID: id})
	return err
}

// Listen is Local.Listen on the other machine.
func (r *Remote) Listen(ctx context.Context, id ID) (net.Listener, error) {
	if err := validID(id); err != nil {
		return nil, err
	}
	ln := addListener(&r.mu, r.listeners, id, &net.TCPAddr{})
	if _, err := r.do(ctx, call{Op: opListen, ID: id}); err != nil {
		_ = ln.Close()
		return nil, err
	}
	return ln, nil
}

// Dial is Local.Dial on the other machine.
func (r *Remote) Dial(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
	mux, err := r.session()
	if err != nil {
		return nil, err
	}
	stream, _, err := r.open(ctx, mux, call{Op: opDial, To: to})
	if err != nil {
		if stream != nil {
			_ = stream.Close()
		}
		return nil, err
	}
	return stream, nil
}

// Lease is Local.Lease on the other machine.
func (r *Remote) Lease(ctx context.Context, mac net.HardwareAddr) (netip.Addr, error) {
	a, err := r.do(ctx, call{Op: opLease, MAC: mac})
	return a.Addr, err
}

// EgressLog is Local.EgressLog on the other machine.
func (r *Remote) EgressLog(ctx context.Context, id ID, after int64, limit int) ([]agentlab.EgressRecord, error) {
	a, err := r.do(ctx, call{Op: opRecords, ID: id, After: after, Limit: limit})
	return a.Records, err
}
