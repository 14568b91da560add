package server

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os/user"
	"slices"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/sockpath"
)

// Access is the access level that a caller needs for a route. Each level
// includes the ones below it. The zero value is not valid in the route table.
type Access int

// The levels of access.
const (
	AccessRead  Access = iota + 1 // look
	AccessWrite                   // create, change and use sandboxes and jobs
	AccessAdmin                   // change profiles, images and secrets, stop the daemon
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
type Peer = sockpath.Peer

// Rules are the access rules for peers.
type Rules struct {
	// OwnUID is the user that the daemon runs as. This user and root have
	// full access.
	OwnUID uint32
	// Groups is the access of the members of groups, by the group's name. A
	// peer has the highest level of its groups. Nil means that no group has
	// access; it is set in system mode.
	Groups map[string]Access
}

// Level returns the highest access that p has, 0 for none. A group or user
// that cannot be looked up gives no access.
func (r Rules) Level(p Peer) Access {
	if p.UID == 0 || p.UID == r.OwnUID {
		return AccessAdmin
	}
	var level Access
	for group, gives := range r.Groups {
		if gives > level && inGroup(p, group) {
			level = gives
		}
	}
	return level
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

// AccessOf returns the access of a role, 0 for an unknown role.
func AccessOf(r agentlab.Role) Access { return Access(slices.Index(agentlab.Roles, r) + 1) }

// caller is the authenticated caller of a connection, and then of a call.
type caller struct {
	local    bool       // connected over the unix socket
	peer     Peer       // of the unix socket
	from     netip.Addr // over TCP
	source   string     // the same for the log
	level    Access
	token    *agentlab.APIToken // its token; nil means that it is authenticated as peer by the kernel
	tokenCtx context.Context    // with a token: ends when the token is revoked or expires
	err      error              // why authentication failed
}

// name identifies the caller: two callers with one name have the same rights.
func (c caller) name() string {
	if c.token != nil {
		return "token " + c.token.ID
	}
	return "user " + strconv.FormatUint(uint64(c.peer.UID), 10)
}

type callerKey struct{}

func callerOf(ctx context.Context) caller {
	who, ok := ctx.Value(callerKey{}).(caller)
	if !ok {
		who.err = errors.New("no connection")
	}
	return who
}

// connContext reads the peer of a connection to the unix socket once, for all
// its calls.
func (s *Server) connContext(ctx context.Context, c net.Conn) context.Context {
	p, err := s.cfg.PeerOf(c)
	who := caller{local: true, peer: p, source: "the unix socket", err: err}
	if err == nil {
		who.source = fmt.Sprintf("the unix socket, uid %d", p.UID)
		who.level = s.cfg.Rules.Level(p)
	}
	return context.WithValue(ctx, callerKey{}, who)
}

// authenticate identifies the caller of a call. A caller with a token has only
// the access of the token, even over the unix socket, so that a process can
// give up access of its user. The returned context ends when the token ends;
// leave must be called after the call.
func (s *Server) authenticate(r *http.Request) (_ context.Context, leave func(), err error) {
	ctx := r.Context()
	who := callerOf(ctx)
	header, borne := r.Header["Authorization"]
	if !borne {
		return ctx, func() {}, requireAccess(who, AccessRead)
	}
	secret, ok := strings.CutPrefix(header[0], "Bearer ")
	if !ok || len(header) != 1 {
		return ctx, nil, agentlab.Errorf(agentlab.CodeDenied, "the header Authorization is invalid").
			WithField("Authorization").WithHint("send Authorization: Bearer TOKEN, once")
	}
	if s.cfg.Services.Tokens == nil {
		return ctx, nil, agentlab.Errorf(agentlab.CodeDenied, "this daemon does not support tokens")
	}
	token, good, out, err := s.cfg.Services.Tokens.Authenticate(context.WithoutCancel(ctx), who.from, secret)
	if err != nil {
		return ctx, nil, err
	}
	who = caller{local: who.local, source: who.source, from: who.from, token: &token, tokenCtx: good, level: AccessOf(token.Role)}
	ctx, cancel := context.WithCancel(context.WithValue(ctx, callerKey{}, who))
	stop := context.AfterFunc(good, cancel)
	return ctx, func() { stop(); cancel(); out() }, requireAccess(who, AccessRead)
}

// requireAccess rejects a caller with less access than want.
func requireAccess(who caller, want Access) error {
	switch {
	case who.err != nil:
		return agentlab.Errorf(agentlab.CodeDenied, "unknown caller").
			WithHint("connect through the daemon's unix socket")
	case who.level >= want:
		return nil
	case who.token != nil:
		return agentlab.Errorf(agentlab.CodeDenied, "this needs %s access, the token has %s", want, who.level).
			WithHint("use a token with that role: agentlab token create NAME --role %s", want)
	case !who.local:
		return agentlab.Errorf(agentlab.CodeDenied, "over TCP a token is required").
			WithHint("send Authorization: Bearer TOKEN; create a token with: agentlab token create NAME")
	case who.level == 0:
		return agentlab.Errorf(agentlab.CodeDenied, "user %d has no access to this daemon", who.peer.UID).
			WithHint("run it as the user that the daemon runs as, or in system mode as a member of group agentlab")
	}
	return agentlab.Errorf(agentlab.CodeDenied, "this needs %s access, user %d has %s", want, who.peer.UID, who.level).
		WithHint("ask root, or run it as the user that the daemon runs as")
}

// authorize rejects a caller that may not use the route, or not for the
// sandbox of the call.
func (s *Server) authorize(hc huma.Context, r route) error {
	who := callerOf(hc.Context())
	if r.origin != anyOrigin && (!who.local || who.token != nil) {
		return agentlab.Errorf(agentlab.CodeDenied, "this is not possible with a token").
			WithHint("do it on the daemon's own machine, over its unix socket and without a token")
	}
	if err := requireAccess(who, r.access); err != nil {
		return err
	}
	if who.token == nil {
		return nil
	}
	if !who.token.May(r.verb) {
		return needsVerb(r.verb, r.access)
	}
	if who.token.AnySandbox {
		return nil
	}
	return s.inScope(hc, r.target, who.token)
}

func needsVerb(verb string, role Access) error {
	return agentlab.Errorf(agentlab.CodeDenied, "this needs the verb %s, which the token lacks", verb).
		WithHint("use a token that has it: agentlab token create NAME --role %s --verb %s", role, verb)
}
