package store

import (
	"context"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
)

var tokens = newTable("bootstrap_tokens", []string{"token_sha256"}, func(t *agentlab.BootstrapToken) []field {
	return []field{
		{"token_sha256", &t.Hash},
		{"vmid", &t.VMID},
		{"expires_at", timeCol{&t.ExpiresAt}},
		{"consumed_at", timeCol{&t.ConsumedAt}},
	}
}, func(t *agentlab.BootstrapToken) error { return checkToken(t.Hash, t.ExpiresAt) })

var grants = newTable("grants", []string{"token_sha256"}, func(g *agentlab.Grant) []field {
	return []field{
		{"token_sha256", &g.Hash},
		{"kind", &g.Kind},
		{"vmid", &g.VMID},
		{"job_id", &g.JobID},
		{"expires_at", timeCol{&g.ExpiresAt}},
	}
}, func(g *agentlab.Grant) error {
	if g.Kind != agentlab.GrantRunner && g.Kind != agentlab.GrantUpload && g.Kind != agentlab.GrantMessages {
		return invalid("kind", "unknown grant %q", g.Kind)
	}
	return checkToken(g.Hash, g.ExpiresAt)
})

func checkToken(hash string, expires time.Time) error {
	if !isSHA256(hash) {
		return invalid("hash", "not a SHA-256 checksum in lower-case hexadecimal")
	}
	if expires.IsZero() {
		return invalid("expires_at", "it is missing")
	}
	return nil
}

func isSHA256(s string) bool { return len(s) == 64 && strings.Trim(s, "0123456789abcdef") == "" }

// PutBootstrapToken stores a one-time token of a sandbox. It must expire
// within agentlab.MaxBootstrapTTL from now. Codes: invalid, exists, conflict
// if there is no such sandbox. If check is not nil, it gets the sandbox and its
// job (nil if it has none) in the same transaction, and its error is returned.
func (s *Store) PutBootstrapToken(ctx context.Context, t agentlab.BootstrapToken, check func(agentlab.Sandbox, *agentlab.Job) error) error {
	return s.write(ctx, func(w *tx) error {
		if !t.ConsumedAt.IsZero() || !t.ExpiresAt.After(w.now) || t.ExpiresAt.After(w.now.Add(agentlab.MaxBootstrapTTL)) {
			return invalid("expires_at", "a new bootstrap token must expire in the future, after at most %s", agentlab.MaxBootstrapTTL)
		}
		if check != nil {
			sb, job, err := sandboxAndJob(w, t.VMID)
			if err == nil {
				err = check(sb, job)
			}
			if err != nil {
				return err
			}
		}
		return tokens.insert(w, &t)
	})
}

// ConsumeBootstrap exchanges a one-time token for grants in one transaction:
// the token is marked as consumed, every other open token and older grant of
// the sandbox is deleted, grants are inserted for vmid, and fn, if not nil,
// may change the sandbox and its job (nil if it has none) by the rules of
// UpdateSandbox and UpdateJob. After an error the token can still be used. Of
// concurrent calls one succeeds.
//
// Code denied unless the token exists, is open and not expired, belongs to
// vmid, and the sandbox has a VM.
func (s *Store) ConsumeBootstrap(ctx context.Context, hash string, vmid int, newGrants []agentlab.Grant,
	fn func(*agentlab.Sandbox, *agentlab.Job) ([]agentlab.Event, error)) error {
	return s.write(ctx, func(w *tx) error {
		t, err := openToken(w.ctx, w, hash, vmid, w.now)
		if err != nil {
			return err
		}
		if err := s.changeForBootstrap(w, vmid, fn); err != nil {
			return err
		}
		return s.replaceGrants(w, t, newGrants)
	})
}

// CheckBootstrap checks, without a change, whether a bootstrap token could be
// exchanged now. Code denied if not.
func (s *Store) CheckBootstrap(ctx context.Context, hash string, vmid int) error {
	_, err := openToken(ctx, s.r, hash, vmid, s.now())
	return err
}

// BootstrapOpen reports whether a sandbox has a bootstrap token that could be
// exchanged now.
func (s *Store) BootstrapOpen(ctx context.Context, vmid int) (bool, error) {
	now := s.now()
	_, ok, err := tokens.one(ctx, s.r, "WHERE vmid = ? AND consumed_at = '' AND expires_at > ?", vmid, timeCol{&now})
	return ok, err
}

func openToken(ctx context.Context, q querier, hash string, vmid int, now time.Time) (agentlab.BootstrapToken, error) {
	t, ok, err := tokens.one(ctx, q, "WHERE token_sha256 = ?", hash)
	switch {
	case err != nil:
	case !ok || t.VMID != vmid:
		err = denied("it is not known")
	case !t.ConsumedAt.IsZero():
		err = denied("it was used before")
	case !now.Before(t.ExpiresAt):
		err = denied("it has expired")
	}
	return t, err
}

func denied(why string) error {
	return agentlab.Errorf(agentlab.CodeDenied, "the bootstrap token is not valid: %s", why)
}

func (s *Store) changeForBootstrap(w *tx, vmid int, fn func(*agentlab.Sandbox, *agentlab.Job) ([]agentlab.Event, error)) error {
	sb, oldJob, err := sandboxAndJob(w, vmid)
	if err != nil {
		return err
	}
	if !sb.State.HasVM() {
		return denied("its sandbox is " + string(sb.State))
	}
	if fn == nil {
		return nil
	}
	var job *agentlab.Job
	if oldJob != nil {
		clone := cloneJob(*oldJob)
		job = &clone
	}
	oldSandbox := sb
	evs, err := fn(&sb, job)
	if err != nil {
		return err
	}
	if job != nil {
		if err := saveJob(w, *oldJob, job, nil); err != nil {
			return err
		}
	}
	return saveSandbox(w, oldSandbox, &sb, fillTarget(evs, 0, sb.JobID))
}

// sandboxAndJob returns a sandbox and its job, nil if it has none or the job has
// no row.
func sandboxAndJob(w *tx, vmid int) (agentlab.Sandbox, *agentlab.Job, error) {
	sb, err := sandboxByVMID(w.ctx, w, vmid)
	if err != nil || sb.JobID == "" {
		return sb, nil, err
	}
	j, err := jobByID(w.ctx, w, sb.JobID)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return sb, nil, nil
	}
	return sb, &j, err
}

func (s *Store) replaceGrants(w *tx, t agentlab.BootstrapToken, newGrants []agentlab.Grant) error {
	t.ConsumedAt = w.now
	if err := tokens.update(w, &t); err != nil {
		return err
	}
	if err := w.exec("DELETE FROM bootstrap_tokens WHERE vmid = ? AND token_sha256 <> ? AND consumed_at = ''", t.VMID, t.Hash); err != nil {
		return err
	}
	if err := w.exec("DELETE FROM grants WHERE vmid = ?", t.VMID); err != nil {
		return err
	}
	for _, g := range newGrants {
		if g.VMID != t.VMID {
			return invalid("vmid", "a grant for sandbox %d cannot come from a token of sandbox %d", g.VMID, t.VMID)
		}
		if err := grants.insert(w, &g); err != nil {
			return err
		}
	}
	return nil
}

// GrantByHash returns the grant of that kind whose token has that hash. Code
// denied if there is none or it has expired.
func (s *Store) GrantByHash(ctx context.Context, hash, kind string) (agentlab.Grant, error) {
	g, ok, err := grants.one(ctx, s.r, "WHERE token_sha256 = ? AND kind = ?", hash, kind)
	if err == nil && (!ok || !s.now().Before(g.ExpiresAt)) {
		err = agentlab.Errorf(agentlab.CodeDenied, "the token is not valid")
	}
	if err != nil {
		return agentlab.Grant{}, err
	}
	return g, nil
}

// RevokeGrants deletes every grant and every bootstrap token of a sandbox.
func (s *Store) RevokeGrants(ctx context.Context, vmid int) error {
	return s.write(ctx, func(w *tx) error {
		if err := w.exec("DELETE FROM bootstrap_tokens WHERE vmid = ?", vmid); err != nil {
			return err
		}
		return w.exec("DELETE FROM grants WHERE vmid = ?", vmid)
	})
}

// DeleteExpiredTokens deletes grants, bootstrap tokens and API tokens that have
// expired and returns their number.
func (s *Store) DeleteExpiredTokens(ctx context.Context, now time.Time) (n int, err error) {
	err = s.write(ctx, func(w *tx) error {
		n = 0
		for _, table := range []string{"bootstrap_tokens", "grants", "api_tokens"} {
			deleted, err := w.execN("DELETE FROM "+table+" WHERE expires_at <= ?", timeCol{&now})
			if err != nil {
				return err
			}
			n += int(deleted)
		}
		return nil
	})
	return n, err
}
