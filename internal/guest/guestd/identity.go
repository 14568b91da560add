//go:build linux

package guestd

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/sshkey"
)

const (
	minEntropy = 32
	maxHostKey = 4 << 10
	// netWait is how long the network device may take to appear.
	netWait = 10 * time.Second
	// nameWatch is how long the hostname is restored if an init that read
	// the old one before the change overwrites it.
	nameWatch = 20 * time.Second
)

func (s *Server) handleIdentity(w http.ResponseWriter, r *http.Request) {
	var id guestapi.Identity
	if !decode(w, r, &id) {
		return
	}
	if err := s.setIdentity(id); err != nil {
		s.log.Error("identity refused", "err", err)
		fail(w, err)
		return
	}
	reply(w, s.health())
}

func checkIdentity(id guestapi.Identity) error {
	bad := func(field, format string, args ...any) error {
		return agentlab.Errorf(agentlab.CodeInvalid, format, args...).WithField(field)
	}
	if !made(id.UID, 1, 64, lower+"-") {
		return bad("uid", "%q is not a UID", id.UID)
	}
	if err := agentlab.ValidateName(id.Hostname); err != nil {
		return err
	}
	if len(id.Entropy) < minEntropy || len(id.Entropy) > 4096 {
		return bad("entropy", "%d bytes are not between %d and 4096", len(id.Entropy), minEntropy)
	}
	if n := agentlab.Nested(id.Nested); n != "" && !n.Wanted() {
		return bad("nested", "%q is not auto or on", id.Nested)
	}
	if id.Time.Year() < 2020 || id.Time.Year() > 2200 {
		return bad("time", "%s is not the present", id.Time)
	}
	if k := id.HostKey; k != nil {
		pub, err := parseKey(k.Public)
		if err != nil || pub.kind != sshkey.TypeEd25519 || !strings.HasPrefix(k.Private, "-----BEGIN OPENSSH PRIVATE KEY-----\n") || len(k.Private) > maxHostKey {
			return bad("host_key", "not an SSH host key")
		}
	}
	if id.Network != nil {
		if err := validNetwork(*id.Network); err != nil {
			return bad("network", "%w", err)
		}
	}
	return nil
}

// setIdentity gives the guest the identity id. Every step may be repeated; the
// UID of this boot is written last, so that after a crash the identity counts as
// missing. An identity is valid for one boot: after the next boot, the controller sends
// network, clock and token again. A guest that continues from a template or from
// another sandbox shares nothing with it afterwards that has to be unique.
func (s *Server) setIdentity(id guestapi.Identity) error {
	if err := checkIdentity(id); err != nil {
		return err
	}
	s.idMu.Lock()
	defer s.idMu.Unlock()
	// Entropy comes first, because keys are generated from it.
	if err := s.cfg.Kernel.AddEntropy(id.Entropy); err != nil {
		return agentlab.Errorf(agentlab.CodeInternal, "entropy: %w", err)
	}
	if err := s.cfg.Kernel.SetTime(id.Time); err != nil {
		return agentlab.Errorf(agentlab.CodeInternal, "clock: %w", err)
	}
	type step struct {
		what string
		do   func() error
	}
	var steps []step
	continues := s.continues(id.UID)
	prepared := s.prepared
	s.prepared = false
	if continues {
		steps = []step{
			{"old identity", s.forget},
			{"boot ID", func() error { return s.newBootID(prepared) }},
			{"root disk", func() error { return s.growRoot(id.RootBytes) }},
		}
	}
	steps = append(steps, []step{
		{"machine-id", func() error { return s.setMachineID(id.UID, continues) }},
		{"hostname", func() error { return s.setHostname(id.Hostname) }},
		{"git", func() error {
			if err := s.setGitIdentity(); err != nil { // not worth a guest that does not start, such as one with a full disk
				s.log.Warn("git has no identity for commits", "err", err)
			}
			return nil
		}},
		{"network", func() error {
			if continues && s.network.Equal(id.Network) {
				return nil // a copy continues with the network of its source
			}
			return s.setNetwork(id.Network)
		}},
		{"host key", func() error { return s.setHostKey(id.UID, id.HostKey, continues, prepared) }},
		{"nested virtualization", func() error {
			usable, err := s.setNested(id.Nested)
			if !usable {
				id.Bootstrap = nil // nor does a later server start the runner
			}
			return err
		}},
		{"bootstrap", func() error { return s.setBootstrap(id.Bootstrap) }},
		{"uid", func() error {
			if s.cfg.KeepAfter > 0 {
				s.keepLater()
				return nil
			}
			return s.writeUID(id.UID)
		}},
		{"uid of this boot", func() error { return s.overwriteFile(bootUIDFile, []byte(id.UID+"\n"), 0o644) }},
	}...)
	for _, step := range steps {
		if err := step.do(); err != nil {
			if _, ok := errors.AsType[*agentlab.Error](err); ok {
				return err
			}
			return agentlab.Errorf(agentlab.CodeInternal, "%s: %w", step.what, err)
		}
	}
	if id.Bootstrap != nil {
		s.startRunner(false)
	} else {
		s.staleParked()
	}
	return nil
}

// keepLater calls keepIdentity after KeepAfter, until it succeeds.
func (s *Server) keepLater() {
	s.wg.Go(func() {
		t := time.NewTicker(s.cfg.KeepAfter)
		defer t.Stop()
		for {
			select {
			case <-t.C:
			case <-s.ctx.Done():
				return
			}
			err := s.keepIdentity()
			if err == nil {
				return
			}
			s.log.Warn("the next boot would renew the identity", "err", err)
		}
	})
}

// keepNow calls keepIdentity before the guest may be stopped.
func (s *Server) keepNow() {
	if err := s.keepIdentity(); err != nil {
		s.log.Warn("the next boot renews the identity", "err", err)
	}
}

// keepIdentity writes the UID of this boot to the disk, after the files of the identity.
// Without the UID, the next boot renews them.
func (s *Server) keepIdentity() error {
	s.idMu.Lock()
	defer s.idMu.Unlock()
	uid := s.line(bootUIDFile)
	if uid == "" {
		return nil
	}
	return s.writeUID(uid)
}

// writeUID writes the UID to the disk when the files of the identity have reached it.
// The caller holds idMu.
func (s *Server) writeUID(uid string) error {
	if s.line(uidFile) == uid {
		return nil
	}
	for _, name := range []string{machineIDFile, hostKeyFile, publicKeyFile} {
		if err := syncFile(s.path(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return s.writeFile(uidFile, []byte(uid+"\n"), 0o644, 0, 0)
}

// syncFile waits until a file is on the disk. It ignores what is not a file: a user of
// the guest has replaced it.
func syncFile(path string) error {
	if fi, err := os.Lstat(path); err != nil || !fi.Mode().IsRegular() {
		return err
	}
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// has reports whether the guest has the identity uid: from this boot, or from an
// earlier one on the disk.
func (s *Server) has(uid string) bool {
	return s.line(bootUIDFile) == uid || s.line(uidFile) == uid
}

// setMachineID creates a new machine-id for a new identity. It also replaces a
// machine-id that neither initd in this boot nor guestd created, because such a
// machine-id comes from the image.
func (s *Server) setMachineID(uid string, continues bool) error {
	old := s.line(machineIDFile)
	if continues && old == "" { // of a template
		old = s.line(freshFile)
	}
	valid := made(old, 32, 32, "0123456789abcdef")
	if !continues && valid && (s.has(uid) || s.line(uidFile) == "" && s.line(freshFile) == old) {
		return nil
	}
	id := newMachineID()
	if err := s.overwriteFile(freshFile, []byte(id+"\n"), 0o644); err != nil {
		return err
	}
	if err := s.overwriteFile(machineIDFile, []byte(id+"\n"), 0o444); err != nil || !continues || old == "" {
		return err
	}
	return s.renewMachineID(old, id)
}

func (s *Server) setHostname(name string) error {
	if err := s.overwriteFile(hostnameFile, []byte(name+"\n"), 0o644); err != nil {
		return err
	}
	old, _ := s.readFile(hostsFile) // what is not a file is replaced
	if err := s.overwriteFile(hostsFile, hosts(old, name), 0o644); err != nil {
		return err
	}
	if err := s.cfg.Kernel.SetHostname(name); err != nil {
		return err
	}
	s.wg.Go(func() { s.holdHostname(name) })
	return nil
}

// setGitIdentity gives git a name and an address for commits, unless the system has one.
// Every other configuration of git precedes that of the system.
func (s *Server) setGitIdentity() error {
	old, err := s.readFile(gitConfigFile)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if bytes.Contains(old, []byte("[user]")) {
		return nil
	}
	if len(old) > 0 && !bytes.HasSuffix(old, []byte("\n")) {
		old = append(old, '\n')
	}
	text := fmt.Sprintf("%s[user]\n\tname = %s\n\temail = %s\n", old, guestapi.AgentName, guestapi.AgentEmail)
	return s.overwriteFile(gitConfigFile, []byte(text), 0o644)
}

// hosts returns old with the name of this machine in the line of 127.0.1.1, or
// without such a line if name is "".
func hosts(old []byte, name string) []byte {
	var b bytes.Buffer
	for line := range bytes.Lines(old) {
		if f := bytes.Fields(line); len(f) == 0 || string(f[0]) != "127.0.1.1" {
			b.Write(bytes.TrimRight(line, "\n"))
			b.WriteByte('\n')
		}
	}
	if b.Len() == 0 {
		b.WriteString("127.0.0.1 localhost\n")
	}
	if name != "" {
		b.WriteString("127.0.1.1 " + name + "\n")
	}
	return b.Bytes()
}

func (s *Server) holdHostname(name string) {
	t := time.NewTicker(time.Second)
	defer t.Stop()
	end := time.After(nameWatch)
	for {
		select {
		case <-t.C:
		case <-end:
			return
		case <-s.ctx.Done():
			return
		}
		if s.line(hostnameFile) != name {
			return // a user has renamed it
		}
		if got, err := s.cfg.Kernel.Hostname(); err == nil && got != name {
			_ = s.cfg.Kernel.SetHostname(name)
		}
	}
}

func (s *Server) setNetwork(n *guestapi.Network) error {
	if n == nil {
		return nil
	}
	s.network = nil
	if err := s.cfg.Kernel.ConfigureNetwork(*n, netWait); err != nil {
		return err
	}
	if len(n.DNS) > 0 {
		if err := s.overwriteFile("/etc/resolv.conf", []byte(resolvConf(*n)), 0o644); err != nil {
			return err
		}
	}
	s.network = n
	return nil
}

// setBootstrap writes the bootstrap document for the runner: in memory,
// readable only by the agent's user.
func (s *Server) setBootstrap(b *guestapi.Bootstrap) error {
	if b == nil {
		return nil
	}
	a, err := s.account("")
	if err != nil {
		return err
	}
	doc, err := json.Marshal(b)
	if err != nil {
		return err
	}
	if err := s.writeFile(bootstrapFile, append(doc, '\n'), 0o600, int(a.uid), int(a.gid)); err != nil {
		return err
	}
	return s.linkBootstrap()
}

func (s *Server) linkBootstrap() error {
	link := s.path(bootstrapLink)
	if to, err := os.Readlink(link); err == nil && to == bootstrapFile {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(link), 0o755); err != nil {
		return err
	}
	_ = os.Remove(link)
	return os.Symlink(bootstrapFile, link)
}

// writeFile replaces name atomically. A symlink is replaced, not followed. The
// owner is set only as root.
func (s *Server) writeFile(name string, content []byte, mode fs.FileMode, uid, gid int) error {
	name = s.path(name)
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+".*") // mode 0600
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil && os.Geteuid() == 0 {
		err = f.Chown(uid, gid)
	}
	if err == nil {
		err = f.Chmod(mode)
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}

// overwriteFile is writeFile for a file of root's whose content does not matter
// after a power cut, or before writeUID. It does not replace the file, if it can: ext4
// would write the content to the disk at once, and a full disk has no space for another
// file. A later boot of a guest thus needs no space for its identity.
func (s *Server) overwriteFile(name string, content []byte, mode fs.FileMode) error {
	f, err := os.OpenFile(s.path(name), os.O_WRONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return s.writeFile(name, content, mode, 0, 0)
	}
	defer func() { _ = f.Close() }()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok || !fi.Mode().IsRegular() || st.Nlink != 1 || int(st.Uid) != os.Geteuid() {
		return s.writeFile(name, content, mode, 0, 0)
	}
	if fi.Mode() != mode {
		err = f.Chmod(mode)
	}
	if err == nil {
		_, err = f.WriteAt(content, 0)
	}
	if err == nil && fi.Size() > int64(len(content)) {
		err = f.Truncate(int64(len(content)))
	}
	return errors.Join(err, f.Close())
}

const lower = "abcdefghijklmnopqrstuvwxyz0123456789"

// made reports whether text consists of least to most of the given characters.
// (Compiling regular expressions would delay the boot.)
func made(text string, least, most int, of string) bool {
	return len(text) >= least && len(text) <= most && strings.Trim(text, of) == ""
}

// oneLine reports whether text is a single line of printable characters.
func oneLine(text string) bool {
	return !strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r == 0x7f })
}
