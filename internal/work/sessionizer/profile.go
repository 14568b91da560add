package sessionizer

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
)

// putProfile writes the profile of a repository and returns its name. A session that
// was made with another profile keeps that.
func (s *Sessionizer) putProfile(ctx context.Context, e Entry) (string, error) {
	name := e.repo.sessionName()
	if e.Session != "" && e.at.Profile != name {
		s.Progressf("note: session %s keeps its profile %s, so the files in %s do not apply", e.Session, e.at.Profile, s.dir)
		return e.at.Profile, nil
	}
	plan, err := s.cfg.planFor(e.Repo)
	if err != nil {
		return "", err
	}
	var rules []string
	if plan.allowlist {
		text, err := readFile(s.dir, allowlistFile)
		if err == nil {
			rules, err = parseAllowlist(text)
		}
		if err != nil {
			return "", err
		}
	}
	base, err := s.C.Profile(ctx, plan.profile)
	if err != nil {
		return "", err
	}
	text, err := plan.profileText(name, base.YAML, rules)
	if err != nil {
		return "", err
	}
	if old, err := s.C.Profile(ctx, name); err == nil && old.YAML == text {
		return name, nil
	}
	_, err = s.C.PutProfile(ctx, name, text)
	return name, err
}

// removeProfile removes the profile that the starts of a repository have written, after
// its session was deleted. A profile that was changed since, or that something else uses,
// stays, with a note.
func (s *Sessionizer) removeProfile(ctx context.Context, e Entry) error {
	name := e.repo.sessionName()
	p, err := s.C.Profile(ctx, name)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return nil
	}
	if err != nil {
		return err
	}
	if !written(p.YAML) {
		s.Progressf("note: profile %s stays: it is not as 'agentlab sessionizer' wrote it", name)
		return nil
	}
	sessions, err := s.C.Sessions(ctx)
	if err != nil {
		return err
	}
	used := slices.ContainsFunc(sessions.Items, func(v api.Session) bool { return v.Profile == name })
	for sb, err := range s.C.EachSandbox(ctx, client.SandboxQuery{}) {
		if err != nil {
			return err
		}
		used = used || sb.Profile == name && !agentlab.SandboxState(sb.State).Final()
	}
	if used {
		s.Progressf("note: profile %s stays: another session or sandbox uses it", name)
		return nil
	}
	sum := sha256.Sum256([]byte(p.YAML))
	if err := s.C.RemoveProfile(ctx, name, hex.EncodeToString(sum[:])); err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound {
		return err
	}
	return nil
}
