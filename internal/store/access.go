package store

import (
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
)

var apiTokens = newTable("api_tokens", []string{"token_id"}, func(t *agentlab.APIToken) []field {
	return []field{
		{"token_id", &t.ID},
		{"name", &t.Name},
		{"token_sha256", &t.Hash},
		{"role", &t.Role},
		{"any_verb", &t.AnyVerb},
		{"verbs_json", jsonCol{&t.Verbs}},
		{"any_sandbox", &t.AnySandbox},
		{"sandboxes_json", jsonCol{&t.Sandboxes}},
		{"created_at", timeCol{&t.CreatedAt}},
		{"expires_at", timeCol{&t.ExpiresAt}},
		{"last_used_at", timeCol{&t.LastUsedAt}},
	}
}, func(t *agentlab.APIToken) error { return t.Validate() })

// maxAPITokens is the maximum number of tokens.
const maxAPITokens = 1000

// PutAPIToken stores a new token and its events. Codes: invalid; exists if the
// name is taken; limit if there are too many.
func (s *Store) PutAPIToken(ctx context.Context, t agentlab.APIToken, evs ...agentlab.Event) error {
	return s.write(ctx, func(w *tx) error {
		var n, taken int
		err := w.QueryRowContext(w.ctx, "SELECT count(*), count(CASE WHEN name = ? THEN 1 END) FROM api_tokens", t.Name).Scan(&n, &taken)
		switch {
		case err != nil:
			return fault(err)
		case taken > 0:
			return agentlab.Errorf(agentlab.CodeExists, "a token named %q exists", t.Name).WithField("name").
				WithHint("choose another name, or revoke it: agentlab token revoke %s", t.Name)
		case n >= maxAPITokens:
			return agentlab.Errorf(agentlab.CodeLimit, "%d tokens exist, which is the maximum", n).
				WithHint("revoke some: agentlab token list")
		}
		if err := apiTokens.insert(w, &t); err != nil {
			return err
		}
		return w.emit(evs)
	})
}

const tokenList = "ORDER BY name"

// APITokens lists the tokens by name, including expired ones.
func (s *Store) APITokens(ctx context.Context) ([]agentlab.APIToken, error) {
	return apiTokens.query(ctx, s.r, tokenList)
}

// APITokenByHash returns the token with that hash, even if it has expired.
// Code not_found.
func (s *Store) APITokenByHash(ctx context.Context, hash string) (agentlab.APIToken, error) {
	t, ok, err := apiTokens.one(ctx, s.r, "WHERE token_sha256 = ?", hash)
	if err == nil && !ok {
		err = agentlab.Errorf(agentlab.CodeNotFound, "there is no such token")
	}
	return t, err
}

// DeleteAPIToken deletes the token with that ID or name, writes the events
// that events returns, and returns the token. Code not_found.
func (s *Store) DeleteAPIToken(ctx context.Context, idOrName string, events func(agentlab.APIToken) []agentlab.Event) (agentlab.APIToken, error) {
	var t agentlab.APIToken
	err := s.write(ctx, func(w *tx) error {
		var ok bool
		var err error
		// An ID takes precedence over a name that looks like one.
		t, ok, err = apiTokens.one(w.ctx, w, "WHERE token_id = ? OR name = ? ORDER BY token_id <> ?", idOrName, idOrName, idOrName)
		switch {
		case err != nil:
			return err
		case !ok:
			return agentlab.Errorf(agentlab.CodeNotFound, "there is no token %q", idOrName).WithHint("see 'agentlab token list'")
		}
		if err := w.exec("DELETE FROM api_tokens WHERE token_id = ?", t.ID); err != nil {
			return err
		}
		return w.emit(events(t))
	})
	return t, err
}

// DeleteTokens deletes the API tokens and the bootstrap tokens, and returns the
// number of API tokens. It is for a restored backup: tokens may have been
// revoked or used after the backup.
func (s *Store) DeleteTokens(ctx context.Context) (n int64, err error) {
	err = s.write(ctx, func(w *tx) error {
		if err := w.exec("DELETE FROM bootstrap_tokens"); err != nil {
			return err
		}
		n, err = w.execN("DELETE FROM api_tokens")
		return err
	})
	return n, err
}

// TouchAPIToken stores when a token was last used. A deleted token is not an
// error.
func (s *Store) TouchAPIToken(ctx context.Context, id string, at time.Time) error {
	return s.write(ctx, func(w *tx) error {
		return w.exec("UPDATE api_tokens SET last_used_at = ? WHERE token_id = ?", timeCol{&at}, id)
	})
}
