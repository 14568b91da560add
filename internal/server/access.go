package server

import (
	"context"
	"errors"
	"net"
	"os/user"
	"slices"
	"strconv"
	"syscall"

	"github.com/danielgtaylor/huma/v2"
	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
)

// Access is what a caller needs to use a route. Each level includes the ones
// below it. The zero value is no access and is refused in the route table.
type Access int

// The levels of access.
const (
	AccessRead  Access = iota + 1 // look
	AccessWrite                   // make, change and use sandboxes and jobs
	AccessAdmin                   // change what all sandboxes are made from, stop the daemon
)

func (a Access) String() string {
	switch a {
	case AccessRead:
		return "read"
	case AccessWrite:
		return "write"
	case AccessAdmin:
		return "admin"
	}
	return "none"
}

// Peer is the process at the other end of a control connection, as the kernel
// recorded it when the connection was made.
type Peer struct {
	PID int32
	UID uint32
	GID uint32
}

// PeerOf asks the kernel who is at the other end of a unix socket.
func PeerOf(c net.Conn) (Peer, error) {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return Peer{}, errors.New("not a socket")
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return Peer{}, err
	}
	var cred *unix.Ucred
	var credErr error
	err = raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err = errors.Join(err, credErr); err != nil {
		return Peer{}, err
	}
	return Peer{PID: cred.Pid, UID: cred.Uid, GID: cred.Gid}, nil
}

// Rules say what a peer may do.
type Rules struct {
	// OwnUID is the user that the daemon runs as. It and root may do
	// everything.
	OwnUID uint32
	// Group is the name of the group whose members may read and write;
	// "" means that no group may do anything. It is set in system mode.
	Group string
}

// Level returns the highest access that p has, 0 for none. A group or user
// that cannot be looked up gives none.
func (r Rules) Level(p Peer) Access {
	if p.UID == 0 || p.UID == r.OwnUID {
		return AccessAdmin
	}
	if r.Group != "" && inGroup(p, r.Group) {
		return AccessWrite
	}
	return 0
}

func inGroup(p Peer, group string) bool {
	g, err := user.LookupGroup(group)
	if err != nil {
		return false
	}
	if g.Gid == strconv.FormatUint(uint64(p.GID), 10) {
		return true
	}
	u, err := user.LookupId(strconv.FormatUint(uint64(p.UID), 10))
	if err != nil {
		return false
	}
	ids, err := u.GroupIds()
	return err == nil && slices.Contains(ids, g.Gid)
}

// caller is what authentication found about a connection.
type caller struct {
	peer  Peer
	level Access
	err   error // why the peer is not known
}

type callerKey struct{}

// connContext authenticates a new connection once, for all its requests.
func (s *Server) connContext(ctx context.Context, c net.Conn) context.Context {
	p, err := s.cfg.PeerOf(c)
	who := caller{peer: p, err: err}
	if err == nil {
		who.level = s.cfg.Rules.Level(p)
	}
	return context.WithValue(ctx, callerKey{}, who)
}

// authorize refuses a caller that may not use the route.
func (s *Server) authorize(hc huma.Context, r route) error {
	return permit(hc.Context(), r.access)
}

// permit refuses a caller that has less than want.
func permit(ctx context.Context, want Access) error {
	who, ok := ctx.Value(callerKey{}).(caller)
	switch {
	case !ok || who.err != nil:
		return agentlab.Errorf(agentlab.CodeDenied, "the caller is not known").
			WithHint("connect through the daemon's unix socket")
	case who.level == 0:
		return agentlab.Errorf(agentlab.CodeDenied, "user %d may not use this daemon", who.peer.UID).
			WithHint("run it as the user that the daemon runs as, or in system mode as a member of group agentlab")
	case who.level < want:
		return agentlab.Errorf(agentlab.CodeDenied, "this needs %s access, user %d has %s", want, who.peer.UID, who.level).
			WithHint("ask root, or run it as the user that the daemon runs as")
	}
	return nil
}
