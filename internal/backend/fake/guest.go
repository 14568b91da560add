package fake

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/stream"
)

// guest is the running VM of an instance: its control server and its runner.
type guest struct {
	in    *instance
	ctx   lifetime // done after power-off
	off   sync.Once
	conns conns

	mu       sync.Mutex
	sessions map[string]*session
	frozen   time.Time // until when its workspace is; zero if it is not
	ports    ports
}

func newGuest(in *instance) *guest {
	return &guest{in: in, ctx: lifetime{make(chan struct{})}}
}

// lifetime is the context of a guest. It stores nothing about the contexts that are made
// of it, because there are thousands of guests.
type lifetime struct{ ended chan struct{} }

// Deadline implements context.Context: there is none.
func (lifetime) Deadline() (time.Time, bool) { return time.Time{}, false }

// Done implements context.Context.
func (l lifetime) Done() <-chan struct{} { return l.ended }

// Err implements context.Context.
func (l lifetime) Err() error {
	select {
	case <-l.ended:
		return context.Canceled
	default:
		return nil
	}
}

// Value implements context.Context: there is none.
func (lifetime) Value(any) any { return nil }

// stop ends everything in the guest. It does not wait.
func (g *guest) stop() {
	g.off.Do(func() { close(g.ctx.ended) })
	g.conns.close()
}

// newControlServer returns the server of guest control for the connections of
// all guests; the connection identifies the guest.
func newControlServer() *http.Server {
	return &http.Server{
		Handler:           controlMux(),
		ReadHeaderTimeout: 30 * time.Second,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, guestKey{}, c.(*conn).guest)
		},
	}
}

type guestKey struct{}

func controlMux() http.Handler {
	mux := http.NewServeMux()
	handle := func(pattern string, fn func(*guest, http.ResponseWriter, *http.Request)) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			fn(r.Context().Value(guestKey{}).(*guest), w, r)
		})
	}
	handle("GET "+guestapi.PathHealth, (*guest).health)
	handle("POST "+guestapi.PathPrepare, (*guest).prepare)
	handle("PUT "+guestapi.PathIdentity, (*guest).identity)
	handle("POST "+guestapi.PathExec, (*guest).exec)
	handle("POST "+guestapi.PathAttach, (*guest).attach)
	handle("POST "+guestapi.PathSSHKey, (*guest).sshKey)
	handle("POST "+guestapi.PathPower, (*guest).power)
	handle("PUT "+guestapi.PathWorkspace, (*guest).mount)
	handle("DELETE "+guestapi.PathWorkspace, (*guest).unmount)
	handle("PUT "+guestapi.PathFreeze, (*guest).freeze)
	handle("DELETE "+guestapi.PathFreeze, (*guest).thaw)
	handle("POST "+guestapi.PathSync, (*guest).sync)
	handle("POST "+guestapi.PathListeners, (*guest).listeners)
	handle("POST "+guestapi.PathDial, (*guest).dialLocal)
	return mux
}

// dialControl opens a connection to the control server after it has started.
func (g *guest) dialControl(d *Driver) (net.Conn, error) {
	mem, ok := g.in.memory(g)
	since := g.in.h.cfg.Clock().Sub(mem.StartedAt)
	if !ok || since < g.in.h.cfg.BootDelay || g.in.hangs() {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the guest of sandbox %d does not answer yet", g.in.rec.Spec.VMID)
	}
	guestEnd, hostEnd, err := g.pipe(d)
	if err != nil {
		return nil, err
	}
	// Serve handles the connection in a new goroutine and returns.
	_ = g.in.h.control.Serve(serveOne(guestEnd))
	return hostEnd, nil
}

// dialPort connects to a service of the guest.
func (g *guest) dialPort(d *Driver, port uint16) (net.Conn, error) {
	web := g.listens(port)
	if port != 7 && port != 22 && !web {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "nothing listens on port %d of sandbox %d", port, g.in.rec.Spec.VMID)
	}
	guestEnd, hostEnd, err := g.pipe(d)
	if err != nil {
		return nil, err
	}
	g.in.h.spawn(func() {
		defer guestEnd.Close()
		if web {
			g.serveWeb(guestEnd, port)
			return
		}
		if port == 22 {
			if _, err := io.WriteString(guestEnd, "SSH-2.0-fake\r\n"); err != nil {
				return
			}
		}
		_, _ = io.Copy(guestEnd, guestEnd)
	})
	return hostEnd, nil
}

func reply(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}

func refuse(w http.ResponseWriter, status int, code agentlab.Code, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(guestapi.ErrorBody{Code: string(code), Message: message})
}

func request[T any](w http.ResponseWriter, r *http.Request) (v T, ok bool) {
	if err := json.NewDecoder(io.LimitReader(r.Body, 1<<20)).Decode(&v); err != nil {
		refuse(w, http.StatusBadRequest, agentlab.CodeInvalid, err.Error())
		return v, false
	}
	return v, true
}

const (
	// fileSystem is the file that a volume has once a guest has made its file system.
	fileSystem = volumePath + "lost+found"
	// unwritten is a file that is only in the memory of the guest, until it syncs or
	// unmounts the volume, which then has the file written. The guest's own disk has the
	// files of these names without the path.
	unwritten, written = volumePath + "unwritten", volumePath + "written"
)

func (g *guest) mount(w http.ResponseWriter, r *http.Request) {
	req, ok := request[guestapi.WorkspaceRequest](w, r)
	if !ok {
		return
	}
	g.setFrozen(time.Time{})
	out, broken := guestapi.Workspace{}, false
	found := g.in.h.volumeFiles(g.in.rec.Spec.UID, func(v *volume) {
		out.Bytes, out.Used = int64(v.SizeGB)<<30, sizeOf(v.Files)
		_, whole := v.Files[fileSystem]
		if broken = !whole && (!req.Format || len(v.Files) > 0); !broken && !whole {
			v.Files[fileSystem], out.New = "", true
		}
	})
	switch {
	case !found || out.Bytes < req.Bytes:
		refuse(w, http.StatusNotFound, agentlab.CodeNotFound, "the guest has no workspace")
	case broken:
		refuse(w, http.StatusConflict, agentlab.CodeConflict, "the workspace has no file system")
	default:
		reply(w, out)
	}
}

func (g *guest) unmount(w http.ResponseWriter, _ *http.Request) {
	g.setFrozen(time.Time{})
	busy := false
	g.in.h.volumeFiles(g.in.rec.Spec.UID, func(v *volume) {
		if _, busy = v.Files[volumePath+"busy"]; busy { // as a process that works there
			return
		}
		v.write()
	})
	if busy {
		refuse(w, http.StatusConflict, agentlab.CodeBusy, "the workspace is used by sleep (42)")
		return
	}
	reply(w, struct{}{})
}

// write writes what is in memory to the volume.
func (v *volume) write() { writeFile(v.Files, unwritten, written) }

func writeFile(files map[string]string, from, to string) {
	if text, ok := files[from]; ok {
		delete(files, from)
		files[to] = text
	}
}

func (g *guest) sync(w http.ResponseWriter, _ *http.Request) {
	g.in.h.volumeFiles(g.in.rec.Spec.UID, (*volume).write)
	g.in.files(func(disk map[string]string) {
		writeFile(disk, path.Base(unwritten), path.Base(written))
	})
	reply(w, struct{}{})
}

func (g *guest) status() guestapi.Health {
	mem, _ := g.in.memory(g)
	return guestapi.Health{
		Version: "fake", BootID: mem.BootID, Uptime: g.in.h.cfg.Clock().Sub(mem.StartedAt),
		Identity: mem.Identity, System: "running", Bootstrapped: mem.Runner != nil, Nested: mem.Nested,
	}
}

func (g *guest) health(w http.ResponseWriter, _ *http.Request) { reply(w, g.status()) }

func (g *guest) prepare(w http.ResponseWriter, r *http.Request) {
	if _, ok := request[guestapi.PrepareRequest](w, r); ok {
		reply(w, struct{}{})
	}
}

func (g *guest) identity(w http.ResponseWriter, r *http.Request) {
	id, ok := request[guestapi.Identity](w, r)
	if !ok {
		return
	}
	switch {
	case id.UID == "" || id.Hostname == "" || id.Time.IsZero():
		refuse(w, http.StatusBadRequest, agentlab.CodeInvalid, "uid, hostname and time are needed")
		return
	case len(id.Entropy) < 32:
		refuse(w, http.StatusBadRequest, agentlab.CodeInvalid, "at least 32 bytes of entropy are needed")
		return
	}
	begin, state := false, g.nestedState(id)
	without := id.Nested == string(agentlab.NestedOn) && state != agentlab.NestedWorks // its job needs it
	g.in.update(g, func(mem *guestRecord) {
		mem.Identity, mem.Hostname, mem.Nested = id.UID, id.Hostname, string(state)
		if without {
			return
		}
		if id.Bootstrap != nil && mem.Runner == nil && (mem.Bootstrap == nil || mem.Bootstrap.Token != id.Bootstrap.Token) {
			mem.Bootstrap, begin = id.Bootstrap, true
		}
	})
	if begin && !strings.HasPrefix(g.in.rec.Spec.Name, "no-runner") {
		g.in.console.line("[fake] runner starts")
		g.startRunner()
	}
	reply(w, g.status())
}

func (g *guest) sshKey(w http.ResponseWriter, r *http.Request) {
	req, ok := request[guestapi.SSHKeyRequest](w, r)
	if !ok {
		return
	}
	if req.Seconds < 1 || req.Seconds > 86400 || !strings.HasPrefix(req.PublicKey, "ssh-") && !strings.HasPrefix(req.PublicKey, "ecdsa-") {
		refuse(w, http.StatusBadRequest, agentlab.CodeInvalid, "not a public key, or not 1 to 86400 seconds")
		return
	}
	user := req.User
	if user == "" {
		user = "agent"
	}
	reply(w, guestapi.SSHKeyResponse{User: user, Port: 22, HostKeys: []string{
		"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBdEDKlEZqHUWrL9MGzjnqWmnSKdZnJWRyvMNDM4xRUd fake",
	}})
}

func (g *guest) power(w http.ResponseWriter, r *http.Request) {
	req, ok := request[guestapi.PowerRequest](w, r)
	if !ok {
		return
	}
	var act func() error
	switch req.Action {
	case "poweroff":
		act = func() error { return g.in.cut(backend.PowerStopped, "") }
	case "reboot":
		act = g.in.reboot
	default:
		refuse(w, http.StatusBadRequest, agentlab.CodeInvalid, "unknown action")
		return
	}
	reply(w, struct{}{})
	_ = http.NewResponseController(w).Flush()
	g.in.h.spawn(func() { _ = act() })
}

// upgrade answers 101 and returns the connection with buffered data.
func (g *guest) upgrade(w http.ResponseWriter, r *http.Request) (net.Conn, *stream.Reader, bool) {
	if !strings.EqualFold(r.Header.Get("Upgrade"), guestapi.StreamProtocol) {
		refuse(w, http.StatusUpgradeRequired, agentlab.CodeInvalid, "upgrade to "+guestapi.StreamProtocol)
		return nil, nil, false
	}
	c, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return nil, nil, false
	}
	_ = c.SetDeadline(time.Time{})
	_, err = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+guestapi.StreamProtocol+"\r\n\r\n")
	if err != nil {
		_ = c.Close()
		return nil, nil, false
	}
	var in io.Reader = c
	if n := rw.Reader.Buffered(); n > 0 {
		ahead, _ := rw.Peek(n)
		in = io.MultiReader(strings.NewReader(string(ahead)), c)
	}
	return c, stream.NewReader(bufio.NewReader(in)), true
}

func (g *guest) exec(w http.ResponseWriter, r *http.Request) {
	req, ok := request[guestapi.ExecRequest](w, r)
	if !ok {
		return
	}
	c, frames, ok := g.upgrade(w, r)
	if !ok {
		return
	}
	defer c.Close()
	out := stream.NewWriter(c)
	p := g.newProcess(out.Data(stream.Stdout), out.Data(stream.Stderr), req.Env)
	defer p.cancel(nil)
	g.in.h.spawn(func() { p.feed(frames) })
	_ = out.JSON(stream.Exit, p.run(req.Command))
}

func (g *guest) attach(w http.ResponseWriter, r *http.Request) {
	req, ok := request[guestapi.AttachRequest](w, r)
	if !ok {
		return
	}
	c, frames, ok := g.upgrade(w, r)
	if !ok {
		return
	}
	defer c.Close()
	name := req.Session
	if name == "" {
		name = "main"
	}
	g.session(name).join(stream.NewWriter(c), frames)
}
