package job_test

import (
	"context"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/audit"
	"github.com/agentlab-vm/agentlab/internal/fleet"
)

// A job whose agent has no key, or whose profile denies its model, is refused
// before anything is made for it.
func TestPreflight(t *testing.T) {
	const key = "env.ANTHROPIC_API_KEY"
	list := agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: []agentlab.NetworkRule{{Rule: "github.com"}, {Rule: "llm.example.com:8443"}}}
	off := agentlab.Network{Mode: agentlab.NetworkOff}
	barred := agentlab.Network{Mode: agentlab.NetworkNAT, Deny: []agentlab.NetworkRule{{Rule: "*.anthropic.com"}}}
	ports := agentlab.Network{Mode: agentlab.NetworkNAT, Ports: []string{"80"}}
	nat := agentlab.Network{Mode: agentlab.NetworkNAT}
	chat := agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: []agentlab.NetworkRule{{Rule: "chatgpt.com"}}}
	noChat := agentlab.Network{Mode: agentlab.NetworkNAT, Deny: []agentlab.NetworkRule{{Rule: "chatgpt.com"}}}
	opened := agentlab.Network{Mode: agentlab.NetworkNAT, Private: []agentlab.PrivateTarget{{Host: "host.agentlab.internal", Port: 11434, Reason: "Ollama"}}}
	atHost := []string{"network.private: {host: host.agentlab.internal, port: 11434", "--no-preflight"}
	localModel := func(url string) map[string]string {
		return map[string]string{"env.OPENAI_API_KEY": "sk", "env.OPENAI_BASE_URL": url}
	}
	for name, test := range map[string]struct {
		agent   string
		network agentlab.Network
		secrets map[string]string
		refs    map[string]string
		skip    bool
		wants   []string // in the error; none: there is no error
	}{
		"no key":                {agent: "claude", network: nat, wants: []string{"ANTHROPIC_API_KEY", "secrets bundle team", "agentlab secrets set --bundle team env.ANTHROPIC_API_KEY", "--no-preflight"}},
		"another agent's key":   {agent: "claude", network: nat, secrets: map[string]string{"env.OPENAI_API_KEY": "sk"}, wants: []string{"ANTHROPIC_API_KEY"}},
		"codex without key":     {agent: "codex", network: nat, wants: []string{"agentlab secrets set --bundle team env.OPENAI_API_KEY"}},
		"key":                   {agent: "claude", network: nat, secrets: map[string]string{key: "sk"}},
		"subscription":          {agent: "claude", network: nat, secrets: map[string]string{"env.CLAUDE_CODE_OAUTH_TOKEN": "sk"}},
		"key by reference":      {agent: "claude", network: nat, refs: map[string]string{key: "op://vault/item/never-asked-for"}},
		"key in settings":       {agent: "claude", network: nat, secrets: map[string]string{"claude_settings_json": `{"env":{"ANTHROPIC_AUTH_TOKEN":"sk"}}`}},
		"key helper":            {agent: "claude", network: nat, secrets: map[string]string{"claude_settings_json": `{"apiKeyHelper":"/bin/key"}`}},
		"settings by reference": {agent: "claude", network: off, refs: map[string]string{"claude_settings_json": "env:NEVER_SET"}},
		"not in the list":       {agent: "claude", network: list, secrets: map[string]string{key: "sk"}, wants: []string{"api.anthropic.com:443", "mode.allowlist", "network.allow", "or choose a profile that allows it with --profile: open;"}},
		"reference, not listed": {agent: "claude", network: list, refs: map[string]string{key: "env:NEVER_SET"}, wants: []string{"api.anthropic.com:443"}},
		"no network":            {agent: "claude", network: off, secrets: map[string]string{key: "sk"}, wants: []string{"mode.off", "choose a profile that allows it with --profile: open, or"}},
		"denied by name":        {agent: "claude", network: barred, secrets: map[string]string{key: "sk"}, wants: []string{"deny:*.anthropic.com"}},
		"codex with ChatGPT":    {agent: "codex", network: chat, secrets: map[string]string{"env.CODEX_AUTH_JSON": "{}"}},
		"ChatGPT denied":        {agent: "codex", network: noChat, secrets: map[string]string{"env.CODEX_AUTH_JSON": "{}"}, wants: []string{"chatgpt.com:443", "deny:chatgpt.com"}},
		"denied by port":        {agent: "codex", network: ports, secrets: map[string]string{"env.OPENAI_API_KEY": "sk"}, wants: []string{"api.openai.com:443", "rule ports"}},
		"gateway in the list":   {agent: "claude", network: list, secrets: map[string]string{key: "sk", "env.ANTHROPIC_BASE_URL": "https://llm.example.com:8443/v1"}},
		"gateway, other port":   {agent: "claude", network: list, secrets: map[string]string{key: "sk", "env.ANTHROPIC_BASE_URL": "https://llm.example.com/v1"}, wants: []string{"llm.example.com:443"}},
		"gateway by reference":  {agent: "claude", network: list, secrets: map[string]string{key: "sk"}, refs: map[string]string{"env.ANTHROPIC_BASE_URL": "env:NEVER_SET"}},
		"gateway in settings":   {agent: "claude", network: list, secrets: map[string]string{"claude_settings_json": `{"env":{"ANTHROPIC_AUTH_TOKEN":"sk","ANTHROPIC_BASE_URL":"http://deny.example.com"}}`}, wants: []string{"deny.example.com:80"}},
		"private gateway":       {agent: "codex", network: nat, secrets: map[string]string{"env.OPENAI_API_KEY": "sk", "env.OPENAI_BASE_URL": "http://10.1.2.3:8000/v1"}, wants: []string{"10.1.2.3:8000", "always.private"}},
		"localhost":             {agent: "codex", network: nat, secrets: localModel("http://localhost:11434/v1"), wants: append([]string{"localhost:11434 is the sandbox itself"}, atHost...)},
		"name of the loopback":  {agent: "codex", network: nat, secrets: localModel("http://ollama.localhost:11434/v1"), wants: append([]string{"ollama.localhost:11434 is"}, atHost...)},
		"IPv4 loopback":         {agent: "codex", network: nat, secrets: localModel("http://127.0.0.9:11434/v1"), wants: append([]string{"127.0.0.9:11434 is the sandbox itself"}, atHost...)},
		"IPv6 loopback":         {agent: "codex", network: off, secrets: localModel("http://[::1]:11434/v1"), wants: append([]string{"[::1]:11434 is the sandbox itself"}, atHost...)},
		"any address":           {agent: "codex", network: nat, secrets: localModel("http://0.0.0.0:11434/v1"), wants: append([]string{"0.0.0.0:11434 is the sandbox itself"}, atHost...)},
		"localhost, opened":     {agent: "codex", network: opened, secrets: localModel("http://localhost:11434/v1"), wants: []string{"write host.agentlab.internal:11434 into the URL"}},
		"the host, opened":      {agent: "codex", network: opened, secrets: localModel("http://host.agentlab.internal:11434/v1")},
		"model in the image":    {agent: "codex", network: off, secrets: localModel("http://localhost:11434/v1"), skip: true},
		"another local model":   {agent: "opencode", network: nat, secrets: map[string]string{"env.OPENROUTER_API_KEY": "sk", "env.OPENAI_API_KEY": "sk", "env.OPENAI_BASE_URL": "http://localhost:1/v1"}},
		"not a URL":             {agent: "codex", network: nat, secrets: map[string]string{"env.OPENAI_API_KEY": "sk", "env.OPENAI_BASE_URL": "llm.example.com"}, wants: []string{"env.OPENAI_BASE_URL", "not an http or https URL"}},
		"a cloud's model":       {agent: "claude", network: list, secrets: map[string]string{"env.CLAUDE_CODE_USE_BEDROCK": "1"}},
		"gemini":                {agent: "gemini", network: list, secrets: map[string]string{"env.GEMINI_API_KEY": "sk"}, wants: []string{"generativelanguage.googleapis.com:443"}},
		"opencode, own config":  {agent: "opencode", network: list},
		"opencode":              {agent: "opencode", network: list, secrets: map[string]string{"env.OPENROUTER_API_KEY": "sk"}, wants: []string{"openrouter.ai:443"}},
		"shell":                 {agent: "shell", network: off},
		"skipped":               {agent: "claude", network: off, skip: true},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				ctx := context.Background()
				if err := w.vault.Create(ctx, "team"); err != nil {
					w.Fatal(err)
				}
				for _, set := range []struct {
					values    map[string]string
					reference bool
				}{{test.secrets, false}, {test.refs, true}} {
					for k, v := range set.values {
						if err := w.vault.Set(ctx, "team", k, strings.NewReader(v), set.reference); err != nil {
							w.Fatal(err)
						}
					}
				}
				prof := w.profiles.get("secrets")
				prof.Network = test.network
				w.profiles.set("p", prof)
				prof.Network = nat
				w.profiles.set("open", prof)
				prof.SecretsBundle = "another"
				w.profiles.set("elsewhere", prof)
				w.profiles.remove("secrets")
				j, err := w.jobs.Create(ctx, agentlab.JobRequest{Profile: "p", Agent: test.agent, Task: "hang", NoPreflight: test.skip})
				if len(test.wants) == 0 {
					if err != nil {
						t.Fatal(err)
					}
					_, err := w.jobs.Cancel(ctx, j.ID)
					if err != nil {
						t.Fatal(err)
					}
					w.final(j.ID)
					return
				}
				wantCode(t, err, agentlab.CodePreflight)
				text := err.Error() + " → " + agentlab.HintOf(err)
				for _, want := range test.wants {
					if !strings.Contains(text, want) {
						t.Errorf("%q does not say %q", text, want)
					}
				}
				if all, err := w.store.Sandboxes(ctx, agentlab.SandboxFilter{}); err != nil || len(all) > 0 {
					t.Errorf("sandboxes were made: %v, %v", all, err)
				}
			})
		})
	}
}

// recorded makes jobs know what the backend records of the network.
func (w *world) recorded() (stop func()) {
	svc := &lateAudit{ready: make(chan struct{})}
	w.egress = svc
	w.restart()
	defer close(svc.ready)
	svc.Service = audit.New(audit.Config{Store: w.store, Log: fleet.Single(w.host.Open(), nil)})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = svc.Run(ctx) }()
	return func() { cancel(); <-done }
}

// lateAudit is the audit service of a daemon, which is made after its jobs.
type lateAudit struct {
	*audit.Service
	ready chan struct{}
}

func (l *lateAudit) List(ctx context.Context, f agentlab.EgressFilter) ([]agentlab.EgressEntry, error) {
	<-l.ready
	return l.Service.List(ctx, f)
}

// claude makes a running job of the agent claude, and tells the audit service.
func (w *world) claude(task string) agentlab.Job {
	w.Helper()
	if err := w.vault.Set(context.Background(), "team", "env.ANTHROPIC_API_KEY", strings.NewReader("sk-ant-0123456789"), false); err != nil {
		w.Fatal(err)
	}
	j := w.run(agentlab.JobRequest{Profile: "secrets", Agent: "claude", Task: task, RepoURL: "https://git.example.com:3000/x/y"})
	w.eventually("running", func() bool { return w.job(j.ID).Status == agentlab.JobRunning })
	w.egress.(*lateAudit).Committed(agentlab.Commit{Sandboxes: []agentlab.Sandbox{w.sandbox(j.ID)}})
	return w.job(j.ID)
}

func (w *world) wanted(j agentlab.Job, recs ...agentlab.EgressRecord) {
	w.Helper()
	if err := w.host.AddEgress(w.ref(j.ID), recs...); err != nil {
		w.Fatal(err)
	}
}

// A job whose model is denied again and again ends soon, FAILED, with the
// host and the rule, long before its time is over.
func TestDeniedModelEndsJob(t *testing.T) {
	dns := agentlab.EgressRecord{Proto: "dns", Name: "api.anthropic.com", Rule: "layer.mode.allowlist"}
	tcp := agentlab.EgressRecord{Proto: "tcp", Name: "api.anthropic.com", Addr: "8.8.8.8", Port: 443, Rule: "mode.off", Count: 3}
	allowed := agentlab.EgressRecord{Proto: "tcp", Name: "api.anthropic.com", Addr: "8.8.8.8", Port: 443, Allow: true, Rule: "mode.nat"}
	quic := agentlab.EgressRecord{Proto: "udp", Name: "api.anthropic.com", Addr: "8.8.8.8", Port: 443, Rule: "name.quic", Count: 100}
	busy := agentlab.EgressRecord{Proto: "tcp", Name: "api.anthropic.com", Addr: "8.8.8.8", Port: 443, Rule: "limit.flows", Count: 100}
	other := agentlab.EgressRecord{Proto: "dns", Name: "pastebin.com", Rule: "mode.allowlist", Count: 100}
	for name, test := range map[string]struct {
		recs  []agentlab.EgressRecord
		ended string // rule; "" goes on
	}{
		"questions":   {[]agentlab.EgressRecord{dns, dns, dns, dns, dns, dns}, "layer.mode.allowlist"},
		"connections": {[]agentlab.EgressRecord{tcp, tcp}, "mode.off"},
		"a few":       {[]agentlab.EgressRecord{dns, dns, dns, dns, dns}, ""},
		"then well":   {[]agentlab.EgressRecord{tcp, dns, dns, allowed, dns, dns}, ""},
		"QUIC":        {[]agentlab.EgressRecord{quic}, ""},
		"limits":      {[]agentlab.EgressRecord{busy}, ""},
		"other hosts": {[]agentlab.EgressRecord{other}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				defer w.recorded()()
				j := w.claude("hang")
				if want := []string{"api.anthropic.com:443"}; !reflect.DeepEqual(j.ModelHosts, want) {
					t.Fatalf("the model is at %q", j.ModelHosts)
				}
				began := time.Now()
				w.wanted(j, test.recs...)
				if test.ended == "" {
					time.Sleep(10 * time.Minute)
					if j = w.job(j.ID); j.Status != agentlab.JobRunning || j.StopRequested != "" {
						t.Fatalf("%s, %q: %s", j.Status, j.StopRequested, j.Reason)
					}
					_, _ = w.jobs.Cancel(context.Background(), j.ID)
					w.final(j.ID)
					return
				}
				j = w.final(j.ID)
				for _, want := range []string{"api.anthropic.com:443", test.ended} {
					if j.Status != agentlab.JobFailed || !strings.Contains(j.Reason, want) {
						t.Errorf("%s: %q lacks %s", j.Status, j.Reason, want)
					}
				}
				if took := time.Since(began); took > time.Minute {
					t.Errorf("after %s", took)
				}
				events, err := w.store.Events(context.Background(), agentlab.EventFilter{JobIDs: []string{j.ID}})
				done := slices.IndexFunc(events, func(e agentlab.Event) bool { return strings.HasPrefix(e.Message, "job "+j.ID+": done") })
				if err != nil || done < 0 || events[done].Message != "job "+j.ID+": done: "+j.Reason {
					t.Errorf("the events do not name the reason: %+v, %v", events, err)
				}
				w.gone(j.ID)
			})
		})
	}
}

// What was denied before the daemon died counts, once.
func TestDeniedModelIsRememberedAfterRestart(t *testing.T) {
	inWorld(t, func(w *world) {
		stop := w.recorded()
		j := w.claude("hang")
		dns := agentlab.EgressRecord{Proto: "dns", Name: "api.anthropic.com", Rule: "mode.allowlist"}
		w.wanted(j, dns, dns, dns, dns)
		time.Sleep(time.Minute)
		stop()
		stop = w.recorded()
		time.Sleep(10 * time.Minute)
		again, err := w.store.Egress(context.Background(), agentlab.EgressFilter{JobID: j.ID})
		if err != nil || len(again) != 4 {
			t.Fatalf("%d records, %v", len(again), err)
		}
		w.jobs.Committed(agentlab.Commit{Records: []string{j.ID}})
		time.Sleep(time.Minute)
		if j = w.job(j.ID); j.StopRequested != "" || j.Status != agentlab.JobRunning {
			t.Fatalf("%s: %s", j.Status, j.Reason)
		}
		w.wanted(j, dns, dns)
		w.egress.(*lateAudit).Committed(agentlab.Commit{Sandboxes: []agentlab.Sandbox{w.sandbox(j.ID)}})
		if j = w.final(j.ID); j.Status != agentlab.JobFailed || !strings.Contains(j.Reason, "api.anthropic.com:443") {
			t.Errorf("%s: %q", j.Status, j.Reason)
		}
		w.gone(j.ID)
		stop()
	})
}

// A runner that does not stop when it is asked to does not hold up the end.
func TestDeniedModelEndsStubbornJob(t *testing.T) {
	inWorld(t, func(w *world) {
		defer w.recorded()()
		j := w.claude("stubborn\necho deaf\nhang")
		w.eventually("it is deaf", func() bool { time.Sleep(time.Second); return strings.Contains(w.log(j.ID), "deaf") })
		began := time.Now()
		w.wanted(j, agentlab.EgressRecord{Proto: "dns", Name: "api.anthropic.com", Rule: "mode.allowlist", Count: 10})
		if j = w.final(j.ID); j.Status != agentlab.JobFailed || !strings.Contains(j.Reason, "api.anthropic.com:443") {
			t.Errorf("%s: %q", j.Status, j.Reason)
		}
		if took := time.Since(began); took > 5*time.Minute {
			t.Errorf("after %s", took)
		}
		w.gone(j.ID)
	})
}

// An agent that gives up by itself, before the job is ended for it, has the
// denial in its reason.
func TestReasonNamesDeniedModel(t *testing.T) {
	inWorld(t, func(w *world) {
		defer w.recorded()()
		j := w.claude("sleep 5m\nexit 3")
		w.wanted(j, agentlab.EgressRecord{Proto: "dns", Name: "api.anthropic.com", Rule: "mode.allowlist"})
		j = w.final(j.ID)
		for _, want := range []string{"code 3", "api.anthropic.com:443", "mode.allowlist"} {
			if j.Status != agentlab.JobFailed || !strings.Contains(j.Reason, want) {
				t.Errorf("%s: %q lacks %q", j.Status, j.Reason, want)
			}
		}
		w.gone(j.ID)
	})
}

// An agent whose model rejects its key: the reason names the key and the command.
func TestReasonNamesRejectedKey(t *testing.T) {
	inWorld(t, func(w *world) {
		if err := w.vault.Set(context.Background(), "team", "env.ANTHROPIC_API_KEY", strings.NewReader("sk-ant-0123456789"), false); err != nil {
			t.Fatal(err)
		}
		for report, want := range map[string]string{
			`{"status":"FAILED","phase":"done","exit_code":1,"message":"claude exited with code 1","key_rejected":true}`: "claude exited with code 1; the model rejects env.ANTHROPIC_API_KEY of secrets bundle team: store another key with 'agentlab login --bundle team claude'",
			`{"status":"FAILED","phase":"done","exit_code":1,"message":"claude exited with code 1"}`:                     "claude exited with code 1",
			`{"status":"COMPLETED","phase":"done","exit_code":0,"key_rejected":true}`:                                    "",
		} {
			j := w.final(w.run(agentlab.JobRequest{Profile: "secrets", Agent: "claude", Task: "report " + report + "\nsleep 10s"}).ID)
			if j.Reason != want {
				t.Errorf("%s: %q, want %q", report, j.Reason, want)
			}
		}
	})
}

// What a job needs stays reachable when its repository narrows the network,
// unless that is strict; a layer never widens the profile's policy.
func TestNarrowKeepsWhatTheJobNeeds(t *testing.T) {
	inWorld(t, func(w *world) {
		defer w.recorded()()
		ctx := context.Background()
		j := w.claude("hang")
		rule := func(r, source string) agentlab.NetworkRule { return agentlab.NetworkRule{Rule: r, Source: source} }
		needs := []agentlab.NetworkRule{rule("api.anthropic.com:443", "agent claude"), rule("git.example.com:3000", "agent claude")}
		own := rule("github.com", "the repository")
		for _, test := range []struct {
			name string
			n    guestapi.NetworkNarrow
			want agentlab.Network
		}{
			{"allow", guestapi.NetworkNarrow{Mode: "allowlist", Allow: []string{"github.com"}},
				agentlab.Network{Mode: "allowlist", Allow: append([]agentlab.NetworkRule{own}, needs...)}},
			{"strict", guestapi.NetworkNarrow{Mode: "allowlist", Allow: []string{"github.com"}, Strict: true},
				agentlab.Network{Mode: "allowlist", Allow: []agentlab.NetworkRule{own}}},
			{"off", guestapi.NetworkNarrow{Mode: "off"}, agentlab.Network{Mode: "allowlist", Allow: needs}},
			{"strictly off", guestapi.NetworkNarrow{Mode: "off", Strict: true}, agentlab.Network{Mode: "off"}},
			{"ports", guestapi.NetworkNarrow{Mode: "nat", Ports: []string{"443"}}, agentlab.Network{Mode: "nat", Ports: []string{"443", "3000"}}},
			{"deny", guestapi.NetworkNarrow{Mode: "nat", Deny: []string{"github.com"}}, agentlab.Network{Mode: "nat", Deny: []agentlab.NetworkRule{own}}},
		} {
			if err := w.jobs.NarrowNetwork(ctx, j.SandboxVMID, test.n); err != nil {
				t.Fatal(err)
			}
			layers := w.sandbox(j.ID).Network.Layers
			if got := layers[len(layers)-1]; !reflect.DeepEqual(got, test.want) {
				t.Errorf("%s: the layer is %+v, want %+v", test.name, got, test.want)
			}
		}
		_, err := w.jobs.Cancel(ctx, j.ID)
		if err != nil {
			t.Fatal(err)
		}
		w.final(j.ID)
	})
}
