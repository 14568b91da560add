package backendtest

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/control"
	"github.com/agentlab-vm/agentlab/internal/stream"
)

// vm runs all tests that need a running VM: one sandbox, three boots.
func (s *suite) vm() {
	if s.cfg.NoVM != "" {
		s.Skip("skipped: " + s.cfg.NoVM)
	}
	sp := s.create(1)
	ref := sp.Ref()
	l := s.listen(ref) // it works from Create on
	s.ok("Start", s.d.Start(s.ctx(), ref))
	s.wantPower(ref, backend.PowerRunning)
	s.ok("Start again", s.d.Start(s.ctx(), ref))
	s.ok("Create while it runs", s.d.Create(s.ctx(), sp))
	s.wantPower(ref, backend.PowerRunning)
	s.awaitControl(ref)

	if in := s.wantPower(ref, backend.PowerRunning); s.d.Info().Addresses != nil && in.IP != sp.IPv4.String() {
		s.Errorf("the address of a running sandbox is %q, and it was leased %s", in.IP, sp.IPv4)
	}

	s.sub("Control", func(s *suite) { s.control(sp) })
	boot := s.awaitControl(ref).BootID // the identity may have replaced it
	s.sub("Nested", func(s *suite) { s.nestedGuest(sp) })
	s.sub("DialGuest", func(s *suite) { s.dialGuest(ref) })
	s.sub("ListenGuest", func(s *suite) { s.listenGuest(ref, l) })
	s.sub("Connections", func(s *suite) { s.connections(ref) })
	s.sub("ConsoleLog", func(s *suite) { s.consoleLog(ref) })
	s.sub("Network", func(s *suite) { s.networkRunning(sp) })
	s.sub("EgressLog", func(s *suite) { s.egressLog(ref) })
	s.sub("Memory", func(s *suite) { s.memory(ref) })
	s.sub("Room", (*suite).room)
	s.sub("Suspend", func(s *suite) { s.suspend(ref, boot) })
	s.sub("SuspendToDisk", func(s *suite) { s.suspendToDisk(ref, boot) })
	s.sub("WrongMark", func(s *suite) { s.wrongMarkRunning(ref) })
	s.sub("Reopen", func(s *suite) { s.reopenRunning(ref, boot) })
	s.sub("Deadline", func(s *suite) { s.deadline(sp) })
	boot = s.awaitControl(ref).BootID
	s.sub("Stop", func(s *suite) { s.stop(ref, boot) })
	s.sub("EgressLogLives", func(s *suite) { s.egressLogLives(ref) })
	s.sub("Killed", func(s *suite) { s.killed(ref) })
	s.sub("Destroy", func(s *suite) { s.destroyRunning(ref) })
}

func (s *suite) client(ref backend.Ref) *control.Client {
	return control.New(func(ctx context.Context) (net.Conn, error) { return s.d.DialControl(ctx, ref) })
}

// awaitControl waits until the guest answers.
func (s *suite) awaitControl(ref backend.Ref) guestapi.Health {
	s.Helper()
	var h guestapi.Health
	s.eventually("guest control answers", func() (err error) {
		h, err = s.client(ref).Health(s.ctx())
		if c := agentlab.CodeOf(err); err != nil && c != agentlab.CodeUnavailable && c != agentlab.CodeTimeout {
			s.Fatalf("DialControl of a booting guest: %v, want code unavailable", err)
		}
		return err
	})
	return h
}

func (s *suite) control(sp backend.Spec) {
	for range 2 { // it is idempotent
		s.identify(sp)
	}
	for _, test := range []struct {
		argv []string
		code int
		out  string
	}{
		{[]string{"true"}, 0, ""},
		{[]string{"false"}, 1, ""},
		{[]string{"sh", "-c", "exit 7"}, 7, ""},
		{[]string{"echo", "hello", "guest"}, 0, "hello guest\n"},
		{[]string{"hostname"}, 0, sp.Name + "\n"},
	} {
		out, code := s.exec(sp.Ref(), test.argv...)
		if code != test.code || out != test.out {
			s.Errorf("%q: exit code %d and output %q, want %d and %q", test.argv, code, out, test.code, test.out)
		}
	}
	a, err := s.d.DialControl(s.ctx(), sp.Ref())
	s.ok("DialControl", err)
	b, err := s.d.DialControl(s.ctx(), sp.Ref())
	s.ok("DialControl while a stream is open", err)
	s.ok("close", errors.Join(a.Close(), b.Close()))
	_, err = s.client(sp.Ref()).Health(s.ctx())
	s.ok("health on a fresh stream", err)
}

// exec runs a command in the guest to its end.
func (s *suite) exec(ref backend.Ref, argv ...string) (string, int) {
	s.Helper()
	return s.execAs(ref, "", argv...)
}

// execAs is exec for a user of the guest; "" is the default one.
func (s *suite) execAs(ref backend.Ref, user string, argv ...string) (string, int) {
	s.Helper()
	conn, err := s.client(ref).Exec(s.ctx(), guestapi.ExecRequest{Command: argv, User: user})
	s.ok("exec", err)
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(s.cfg.Patience))
	var out bytes.Buffer
	frames := stream.NewReader(conn)
	s.ok("close standard input", stream.NewWriter(conn).Frame(stream.StdinEOF, nil))
	for {
		t, p, err := frames.Next()
		s.ok(fmt.Sprintf("output of %q", argv), err)
		switch t {
		case stream.Stdout:
			out.Write(p)
		case stream.Exit:
			var code int
			if _, err := fmt.Sscanf(string(p), `{"code":%d`, &code); err != nil {
				s.Fatalf("exit frame %q", p)
			}
			return out.String(), code
		default:
		}
	}
}

func (s *suite) dialGuest(ref backend.Ref) {
	// A request for a key starts the guest's sshd.
	raw, _, err := ed25519.GenerateKey(rand.Reader)
	s.ok("make a key", err)
	key, err := ssh.NewPublicKey(raw)
	s.ok("make a key", err)
	line := strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key)))
	resp, err := s.client(ref).SSHKey(s.ctx(), guestapi.SSHKeyRequest{PublicKey: line, Seconds: 60})
	s.ok("ssh-key", err)
	conn, err := s.d.DialGuest(s.ctx(), ref, resp.Port)
	s.ok("DialGuest", err)
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(s.cfg.Patience))
	banner := make([]byte, 4)
	if _, err := io.ReadFull(conn, banner); err != nil || string(banner) != "SSH-" {
		s.Errorf("port %d greets with %q (%v)", resp.Port, banner, err)
	}
	if c, err := s.d.DialGuest(s.ctx(), ref, 1); err == nil {
		_ = c.SetDeadline(time.Now().Add(s.cfg.Patience))
		if _, err := c.Read(make([]byte, 1)); err == nil {
			s.Error("DialGuest reached a port on which nothing listens")
		}
		_ = c.Close()
	} else {
		s.wantCode("DialGuest of a closed port", err, agentlab.CodeUnavailable)
	}
}

func (s *suite) listen(ref backend.Ref) net.Listener {
	s.Helper()
	l, err := s.d.ListenGuest(s.ctx(), ref)
	s.ok("ListenGuest", err)
	s.Cleanup(func() { _ = l.Close() })
	return l
}

// answer serves text on l until it is closed.
func (s *suite) answer(l net.Listener, text string) {
	srv := &http.Server{
		ReadHeaderTimeout: time.Minute,
		Handler:           http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, text) }),
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(l)
	}()
	s.Cleanup(func() { _ = srv.Close(); <-done })
}

// wantAnswer makes the guest call the controller and checks the answer.
func (s *suite) wantAnswer(ref backend.Ref, base, want string) {
	s.Helper()
	s.eventually("the guest reaches "+base, func() error {
		out, code := s.exec(ref, "curl", "-s", "--max-time", "10", base+"/probe")
		if code != 0 || out != want {
			return fmt.Errorf("curl: exit code %d, answer %q, want %q", code, out, want)
		}
		return nil
	})
}

func (s *suite) listenGuest(ref backend.Ref, first net.Listener) {
	info := s.d.Info()
	s.answer(first, "one")
	s.wantAnswer(ref, info.ControllerURL, "one")
	s.wantAnswer(ref, strings.TrimSuffix(info.UploadURL, "/upload"), "one")
	second := s.listen(ref)
	s.answer(second, "two")
	s.wantAnswer(ref, info.ControllerURL, "two")
	s.ok("close", second.Close())
	third := s.listen(ref)
	s.answer(third, "three")
	s.wantAnswer(ref, info.ControllerURL, "three")
}

func (s *suite) consoleLog(ref backend.Ref) {
	cl := s.groups().Console
	if cl == nil {
		s.Skip("skipped: this driver keeps no console log")
	}
	rc, err := cl.ConsoleLog(s.ctx(), ref, false)
	s.ok("ConsoleLog", err)
	text, err := io.ReadAll(rc)
	s.ok("read", errors.Join(err, rc.Close()))
	if len(text) == 0 {
		s.Error("the console log of a booted VM is empty")
	}
	ctx, cancel := context.WithCancel(s.ctx())
	defer cancel()
	rc, err = cl.ConsoleLog(ctx, ref, true)
	s.ok("ConsoleLog with follow", err)
	defer rc.Close()
	_, err = io.ReadFull(rc, make([]byte, len(text)))
	s.ok("read with follow", err)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = io.Copy(io.Discard, rc)
	}()
	select {
	case <-ended:
		s.Error("follow ended while the VM runs")
	case <-time.After(500 * time.Millisecond): // it waits for more; a busy host is slow to see an end
	}
	cancel()
	select {
	case <-ended:
	case <-time.After(s.cfg.Patience):
		s.Error("follow continues after its context ended")
	}
}

func (s *suite) wrongMarkRunning(ref backend.Ref) {
	wrong := s.wrong(ref)
	s.wantCode("Stop", s.d.Stop(s.ctx(), wrong, 0), agentlab.CodeNotFound)
	s.ok("Destroy", s.d.Destroy(s.ctx(), wrong))
	_, err := s.d.DialControl(s.ctx(), wrong)
	s.wantCode("DialControl", err, agentlab.CodeNotFound)
	s.wantPower(ref, backend.PowerRunning)
}

// reopenRunning checks that VMs keep running after the driver's process has
// ended.
func (s *suite) reopenRunning(ref backend.Ref, boot string) {
	s.reopen()
	s.wantPower(ref, backend.PowerRunning)
	if h := s.awaitControl(ref); h.BootID != boot {
		s.Error("the guest booted again when the driver was opened again")
	}
	s.answer(s.listen(ref), "again")
	s.wantAnswer(ref, s.d.Info().ControllerURL, "again")
}

func (s *suite) stop(ref backend.Ref, boot string) {
	s.ok("Stop", s.d.Stop(s.ctx(), ref, s.cfg.Patience/2))
	s.wantPower(ref, backend.PowerStopped)
	s.ok("Stop again", s.d.Stop(s.ctx(), ref, s.cfg.Patience/2))
	_, err := s.d.DialControl(s.ctx(), ref)
	s.wantCode("DialControl of a stopped one", err, agentlab.CodeUnavailable)
	s.ok("Start after Stop", s.d.Start(s.ctx(), ref))
	if h := s.awaitControl(ref); h.BootID == boot || h.Identity != "" {
		s.Errorf("after a stop and a start: boot id %s as before, or identity %q kept", h.BootID, h.Identity)
	}
	s.ok("Stop without grace", s.d.Stop(s.ctx(), ref, 0))
	s.wantPower(ref, backend.PowerStopped)
}

func (s *suite) killed(ref backend.Ref) {
	if s.h.KillVM == nil {
		s.Skip("skipped: this harness cannot kill a VM")
	}
	s.ok("Start", s.d.Start(s.ctx(), ref))
	s.h.KillVM(s.T, ref)
	s.eventually("the crash is seen", func() error {
		in, err := s.d.Inspect(s.ctx(), ref)
		switch {
		case err != nil:
			return err
		case in.Power != backend.PowerCrashed:
			return fmt.Errorf("power is %s", in.Power)
		case in.Reason == "":
			return errors.New("no reason is given")
		}
		return nil
	})
	s.ok("Stop of a crashed one", s.d.Stop(s.ctx(), ref, 0))
	s.wantPower(ref, backend.PowerStopped)
	s.ok("Start of one that crashed", s.d.Start(s.ctx(), ref))
	s.h.KillVM(s.T, ref)
	s.ok("Destroy of a crashed one", s.d.Destroy(s.ctx(), ref))
	s.wantAbsent(ref)
}

func (s *suite) destroyRunning(ref backend.Ref) {
	sp := s.h.Spec(1)
	s.ok("Create", s.d.Create(s.ctx(), sp))
	s.ok("Start", s.d.Start(s.ctx(), ref))
	l := s.listen(ref)
	s.ok("Destroy of a running one", s.d.Destroy(s.ctx(), ref))
	s.wantAbsent(ref)
	_, err := s.d.DialControl(s.ctx(), ref)
	s.wantCode("DialControl of what is gone", err, agentlab.CodeNotFound)
	_ = l.Close()
	s.ok("Destroy again", s.d.Destroy(s.ctx(), ref))
}
