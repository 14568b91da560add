package job

import (
	"context"
	"fmt"
	"net"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/secret"
)

// preflight checks that a job's agent has a key and that its profile lets it
// reach its model: without either it would only wait for its time to be over.
// References are not resolved: of them only the names are looked at. Codes:
// preflight; of a secrets bundle that cannot be read, those of Secrets.
func (s *Service) preflight(ctx context.Context, j agentlab.Job, prof agentlab.Profile, skip bool) error {
	var plain secret.Bundle
	var references []string
	var err error
	if prof.SecretsBundle != "" {
		if plain, references, err = s.cfg.Secrets.Outline(ctx, prof.SecretsBundle); err != nil {
			return err
		}
	}
	if skip {
		return nil
	}
	n, bad := needsOf(j.Agent, envOf(j.Agent, plain, references))
	if bad != "" {
		return preflightError(prof, "env."+bad+" of secrets bundle "+prof.SecretsBundle+" is not an http or https URL").
			WithHint("set it again: %s", setSecret(prof, bad))
	}
	if n.known && !n.found {
		return noKey(j, prof, n.keys)
	}
	if n.local != "" && len(n.hosts) == 0 {
		return notInSandbox(j, prof, n.local)
	}
	return checkReach(j, prof, n.hosts)
}

func preflightError(prof agentlab.Profile, what string) *agentlab.Error {
	return agentlab.Errorf(agentlab.CodePreflight, "profile %s: %s", prof.Name, what)
}

// anywayHint ends the hints of errors that the caller may know better about.
const anywayHint = "; --no-preflight starts the job without this check"

func setSecret(prof agentlab.Profile, name string) string {
	bundle := ""
	if prof.SecretsBundle != secret.DefaultBundle {
		bundle = "--bundle " + prof.SecretsBundle + " "
	}
	return "agentlab secrets set " + bundle + "env." + name
}

func noKey(j agentlab.Job, prof agentlab.Profile, keys []string) error {
	if prof.SecretsBundle == "" {
		return preflightError(prof, "agent "+j.Agent+" has no key for its model: the profile names no secrets bundle").
			WithHint("add secrets_bundle to the profile, or choose another with --profile%s", anywayHint)
	}
	return preflightError(prof, "agent "+j.Agent+" has no key for its model: secrets bundle "+prof.SecretsBundle+" has none of "+strings.Join(keys, ", ")).
		WithHint("%s%s", setSecret(prof, keys[0]), anywayHint)
}

// notInSandbox refuses a job whose model is at an address of the loopback. There
// the agent finds its own sandbox, in which no model runs unless the image
// brings one.
func notInSandbox(j agentlab.Job, prof agentlab.Profile, local string) error {
	e := preflightError(prof, "agent "+j.Agent+" cannot reach its model: "+local+" is the sandbox itself, not this host")
	port := local[strings.LastIndexByte(local, ':')+1:]
	here := net.JoinHostPort(egress.HostName, port)
	t, err := egress.ParseTarget(here)
	if err != nil {
		return e.WithHint("%s%s", agentlab.HintOf(err), anywayHint)
	}
	if p, err := egress.New(prof.Network); err == nil && p.Explain(t).Allow {
		return e.WithHint("the profile opens that port of this host: write %s into the URL%s", here, anywayHint)
	}
	return e.WithHint("%s%s", orText(openHint(egress.Explanation{Target: t, Rule: egress.RuleLoopback}), "choose another port"), anywayHint)
}

// checkReach refuses a job when its profile's policy denies every endpoint of
// its model.
func checkReach(j agentlab.Job, prof agentlab.Profile, hosts []string) error {
	p, err := egress.New(prof.Network)
	if err != nil || len(hosts) == 0 {
		return err
	}
	var denied egress.Explanation
	for _, host := range hosts {
		t, err := egress.ParseTarget(host)
		if err != nil {
			return preflightError(prof, "agent "+j.Agent+" cannot reach its model: "+err.Error()).WithHint("%s", agentlab.HintOf(err))
		}
		e := p.Explain(t)
		if e.Allow {
			return nil
		}
		denied = e
	}
	e := preflightError(prof, "agent "+j.Agent+" cannot reach its model: "+denied.Target.String()+" is denied by rule "+denied.Rule+" ("+egress.Means(denied.Rule)+")")
	if denied.Rule == egress.RuleAllowlist {
		return e.WithHint("add %s to network.allow of the profile, or choose another with --profile%s", denied.Target, anywayHint)
	}
	if hint := openHint(denied); hint != "" {
		return e.WithHint("%s%s", hint, anywayHint)
	}
	return e.WithHint("choose another profile with --profile, or change its network; see 'agentlab policy explain %s --profile %s'%s", denied.Target, prof.Name, anywayHint)
}

// openHint says how the operator opens a private model endpoint; "" when the
// denied target is none that can be opened.
func openHint(denied egress.Explanation) string {
	t := denied.Target
	host := strings.TrimSuffix(t.Name, ".")
	switch denied.Rule {
	case egress.RuleLoopback:
		host = egress.HostName
	case egress.RulePrivate, egress.RuleCGNAT, egress.RuleULA, egress.RuleTailnet:
		if host == "" {
			host = t.Addr.String()
		}
	default:
		return ""
	}
	if _, err := egress.ParsePrivate(agentlab.PrivateTarget{Host: host, Port: int(t.Port), Reason: "-"}); err != nil || t.Proto != egress.TCP {
		return ""
	}
	hint := fmt.Sprintf("if it is yours, open it in the profile, network.private: {host: %s, port: %d, reason: our model gateway}", host, t.Port)
	if host == egress.HostName {
		hint = "a sandbox calls this host " + host + ": write that into the URL, and " + hint
	}
	return hint
}
