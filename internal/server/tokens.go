package server

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/auth"
)

type createTokenInput struct{ Body api.TokenCreate }

func (s *Server) createToken(ctx context.Context, in *createTokenInput) (api.TokenCreated, error) {
	b := in.Body
	r := auth.Request{Name: b.Name, Role: agentlab.Role(b.Role), Verbs: b.Verbs, TTL: time.Duration(b.TTLMinutes) * time.Minute}
	for _, verb := range b.Verbs {
		if err := s.checkVerb(verb, r.Role, len(b.Sandboxes) > 0); err != nil {
			return api.TokenCreated{}, err
		}
	}
	for _, name := range b.Sandboxes {
		sb, err := s.cfg.Services.Sandboxes.Get(ctx, name)
		if err != nil {
			return api.TokenCreated{}, err
		}
		r.Sandboxes = append(r.Sandboxes, agentlab.TokenSandbox{UID: sb.UID, VMID: sb.VMID, Name: sb.Name})
	}
	t, secret, err := s.cfg.Services.Tokens.Create(ctx, r)
	return api.TokenCreated{Token: toToken(t), Secret: secret}, err
}

// checkVerb rejects a verb that has no effect for a token of that role: an
// unknown verb, one that needs more access, or one whose calls the token
// cannot make.
func (s *Server) checkVerb(verb string, role agentlab.Role, bound bool) error {
	useful := s.effectiveVerbs(role, bound)
	if slices.Contains(useful, verb) {
		return nil
	}
	e := agentlab.Errorf(agentlab.CodeInvalid, "%q is not a verb", verb)
	if knownVerb(verb) {
		e = agentlab.Errorf(agentlab.CodeInvalid, "%s has no effect for a token with role %s", verb, role)
		if bound {
			e = agentlab.Errorf(agentlab.CodeInvalid, "%s has no effect for a token with role %s that is restricted to sandboxes", verb, role)
		}
	}
	could := []string{fmt.Sprintf("role %s could have %s", role, strings.Join(useful, ", "))}
	for _, more := range agentlab.Roles[AccessOf(role):] {
		all := s.effectiveVerbs(more, bound)
		adds := slices.DeleteFunc(slices.Clone(all), func(v string) bool { return slices.Contains(useful, v) })
		if len(adds) > 0 {
			could = append(could, fmt.Sprintf("role %s also %s", more, strings.Join(adds, ", ")))
		}
		useful = all
	}
	return e.WithField("verbs").WithHint("%s (the role is read unless --role says otherwise)", strings.Join(could, "; "))
}

// effectiveVerbs returns the verbs that have an effect for a token of that role,
// sorted.
func (s *Server) effectiveVerbs(role agentlab.Role, bound bool) []string {
	var useful []string
	for _, r := range s.table {
		if r.origin == anyOrigin && r.access <= AccessOf(role) && (!bound || r.target != noTarget) {
			useful = append(useful, r.verb)
		}
	}
	slices.Sort(useful)
	return slices.Compact(useful)
}

func (s *Server) listTokens(ctx context.Context, _ *PageInput) ([]api.Token, error) {
	list, err := s.cfg.Services.Tokens.List(ctx)
	return mapSlice(list, toToken), err
}

type tokenInput struct {
	Token string `path:"token" doc:"ID or name of a token"`
}

func (s *Server) revokeToken(ctx context.Context, in *tokenInput) (api.Token, error) {
	t, err := s.cfg.Services.Tokens.Revoke(ctx, in.Token)
	return toToken(t), err
}

func toToken(t agentlab.APIToken) api.Token {
	return api.Token{
		ID: t.ID, Name: t.Name, Role: string(t.Role), Verbs: append([]string{}, t.Verbs...),
		Sandboxes: mapSlice(t.Sandboxes, func(s agentlab.TokenSandbox) api.TokenSandbox {
			return api.TokenSandbox{VMID: s.VMID, Name: s.Name}
		}),
		CreatedAt: t.CreatedAt, ExpiresAt: t.ExpiresAt, LastUsedAt: optionalTime(t.LastUsedAt),
	}
}
