package config

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

// stage is the section of a backend.
type stage struct {
	Speed string `yaml:"speed"`
	Seats struct {
		Rows int `yaml:"rows"`
	} `yaml:"seats"`
}

func (s *stage) Validate(c Config, used bool) error {
	if s.Seats.Rows > c.Limits.MaxSandboxes {
		return agentlab.Errorf(agentlab.CodeInvalid, "too many").WithField("stage.seats.rows")
	}
	if used && s.Speed == "" {
		return agentlab.Errorf(agentlab.CodeInvalid, "missing").WithField("stage.speed")
	}
	return nil
}

var known = []Backend{{Name: "stage", Section: func() Section { return &stage{Speed: "slow"} }}, {Name: "crowd"}}

func parse(text string) (Config, error) { return Parse([]byte(text), known...) }

func defaults() Config { return Default(known...) }

// The section of a backend is as strict as the rest of the file, and its
// checks get the whole configuration.
func TestSections(t *testing.T) {
	c, err := parse("stage: {seats: {rows: 3}}")
	if err != nil {
		t.Fatal(err)
	}
	if s := c.Section("stage").(*stage); s.Speed != "slow" || s.Seats.Rows != 3 {
		t.Errorf("%+v", s)
	}
	if s := c.Section("crowd"); s != nil {
		t.Errorf("%+v", s)
	}
	if _, err := parse("backend: crowd\nstage: {speed: \"\"}"); err != nil {
		t.Errorf("a backend that is not used: %v", err)
	}
	for text, want := range map[string]string{
		"stage: {sped: fast}":             `line 1: unknown key; did you mean "stage.speed"?`,
		"stage: {seats: {rows: x}}":       "line 1",
		"\nstage:\n  seats: {rows: 7000}": "line 3: too many",
		"stage:\n  speed: \"\"":           "line 2: missing",
		"stage: 3":                        "line 1: a mapping",
		"stagee: {}":                      `did you mean "stage"?`,
		"crowd: {size: 3}":                "unknown key",
		"limits: {max_sandboxes: 1}\nstage: {seats: {rows: 2}}": "line 2: too many",
	} {
		_, err := parse(text)
		if got := fmt.Sprint(err) + "; " + agentlab.HintOf(err); !strings.Contains(got, want) {
			t.Errorf("%q: %s", text, got)
		}
	}
}

func TestDefaultIsValidAndWhatAMissingOrEmptyFileMeans(t *testing.T) {
	want := defaults()
	if err := want.Validate(); err != nil {
		t.Fatal(err)
	}
	got, err := Load(filepath.Join(t.TempDir(), "config.yaml"), known...)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("missing file: %+v, %v", got, err)
	}
	got, err = parse("# nothing yet\n")
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("empty file: %+v, %v", got, err)
	}
}

func TestParse(t *testing.T) {
	c, err := parse("limits:\n  max_sandboxes: 3\n  max_ttl_minutes: 120\nvmid_range: {first: 200, last: 200}\nbootstrap_ttl_minutes: 5\n")
	if err != nil {
		t.Fatal(err)
	}
	want := defaults()
	want.Limits = Limits{MaxSandboxes: 3, MinFreeMB: 1024, MaxTTLMinutes: 120, BootMinutes: 3, MaxSnapshots: 50, SnapshotsGB: 100, MaxWorkspaces: 50, WorkspaceGB: 200, WorkspacesGB: 1000, SalvageGB: 100, EgressRecords: 5000}
	want.VMIDRange = VMIDRange{200, 200}
	want.BootstrapTTLMinutes = 5
	if !reflect.DeepEqual(c, want) {
		t.Errorf("got %+v, want %+v", c, want)
	}
	if c.MaxTTL().Hours() != 2 || c.BootstrapTTL() != agentlab.MinBootstrapTTL {
		t.Errorf("durations %s, %s", c.MaxTTL(), c.BootstrapTTL())
	}
}

func TestRefused(t *testing.T) {
	for _, tc := range []struct{ in, field, message, hint string }{
		{"backend: stage\ndefault_profil: x", "default_profil", "line 2: unknown key", `"default_profile"`},
		{"limits:\n  max_sandbox: 1", "limits.max_sandbox", "line 2: unknown key", `"limits.max_sandboxes"`},
		{"debug_listen: 127.0.0.1:8845", "debug_listen", "unknown key", ""},
		{"backend: kubernetes", "backend", `line 1: "kubernetes" is not known`, "choose one of stage, crowd"},
		{"backend: stgae", "backend", "", `did you mean "stage"?`},
		{"default_agent: cladue", "default_agent", "", `"claude"`},
		{"default_profile: ../x", "default_profile", "not a valid name", "lower-case"},
		{"images: {base: UPPER}", "images.base", "not a valid name", ""},
		{"limits: {max_sandboxes: 0}", "limits.max_sandboxes", "0 is not between 1 and 100000", ""},
		{"limits: {max_ttl_minutes: 43201}", "limits.max_ttl_minutes", "43200", ""},
		{"vmid_range: {first: 99}", "vmid_range.first", "", ""},
		{"vmid_range: {first: 500, last: 499}", "vmid_range.last", "between 500", ""},
		{"bootstrap_ttl_minutes: 4", "bootstrap_ttl_minutes", "between 5 and 15", ""},
		{"bootstrap_ttl_minutes: 16", "bootstrap_ttl_minutes", "between 5 and 15", ""},
		{"retention: {artifacts_days: 40, jobs_days: 39}", "retention.jobs_days", "between 40", ""},
		{"artifacts: {max_file_mb: 5000}", "artifacts.max_job_mb", "", ""},
		{"limits: 3", "limits", "line 1: a mapping", ""},
		{"api: {listen: \"8843\"}", "api.listen", "not an address with a port", "127.0.0.1:8843"},
		{"api: {listen: \"localhost:8843\"}", "api.listen", "not an address with a port", "IP address"},
		{"api: {listen: \"0.0.0.0:8843\"}", "api.listen", "TLS is not configured", "api.tls_cert"},
		{"api: {listen: \"[::]:8843\"}", "api.listen", "TLS is not configured", ""},
		{"api: {listen: \"192.0.2.1:8843\"}", "api.listen", "TLS is not configured", ""},
		{"api: {listen: \"192.0.2.1:8843\", tls_cert: /c}", "api.tls_cert", "must be set together", "both"},
		{"api: {listen: \"192.0.2.1:8843\", tls_key: /k}", "api.tls_key", "must be set together", ""},
		{"api: {tls_cert: /c, tls_key: /k}", "api.tls_cert", "is not set", "api.listen"},
		{"api: {listen: \"192.0.2.1:8843\", tls_cert: c, tls_key: /k}", "api.tls_cert", "absolute path", ""},
		{"metrics: {listen: \"9464\", token_file: /t}", "metrics.listen", "not an address with a port", "127.0.0.1:9464"},
		{"metrics: {listen: \"0.0.0.0:9464\", token_file: /t}", "metrics.listen", "not a loopback address", "api.listen"},
		{"metrics: {listen: \"[::]:9464\", token_file: /t}", "metrics.listen", "not a loopback address", ""},
		{"metrics: {listen: \"127.0.0.1:9464\"}", "metrics.listen", "needs a token", "metrics.token_file"},
		{"metrics: {listen: \"127.0.0.1:9464\", token_file: t}", "metrics.token_file", "absolute path", ""},
		{"metrics: {token_file: /t}", "metrics.token_file", "is not set", "metrics.listen"},
		{"api: {groups: {agentlab: owner}}", "api.groups.agentlab", `"owner" is not known`, "read, write, admin"},
		{"api: {groups: {\"a b\": read}}", "api.groups", "not the name of a group", ""},
		{"upstream_proxy: {url: \"http://joe:secret@proxy.corp:3128\"}", "upstream_proxy.url", "line 1: the URL must not", "credentials_file"},
		{"upstream_proxy: {url: \"http://joe:secret%@proxy.corp:3128\"}", "upstream_proxy.url", "line 1: not a URL", "proxy.corp"},
		{"upstream_proxy: {url: \"socks4://proxy.corp:1080\"}", "upstream_proxy.url", "unsupported scheme", "socks5://"},
		{"upstream_proxy: {url: \"proxy.corp:3128\"}", "upstream_proxy.url", "unsupported scheme", "http://"},
		{"upstream_proxy: {url: \"http://proxy.corp\"}", "upstream_proxy.url", "HOST:PORT", "3128"},
		{"upstream_proxy: {url: \"http://proxy.corp:0\"}", "upstream_proxy.url", "HOST:PORT", ""},
		{"upstream_proxy: {url: \"http://:3128\"}", "upstream_proxy.url", "HOST:PORT", ""},
		{"upstream_proxy: {url: \"http://proxy.corp:3128/x\"}", "upstream_proxy.url", "HOST:PORT", ""},
		{"upstream_proxy: {url: \"http://proxy.corp:3128?x\"}", "upstream_proxy.url", "HOST:PORT", ""},
		{"upstream_proxy: {dns: \"https://1.1.1.1/dns-query\"}", "upstream_proxy.url", "missing", "remove"},
		{"upstream_proxy: {url: \"http://p:1\", credentials_file: c}", "upstream_proxy.credentials_file", "absolute path", ""},
		{"upstream_proxy: {url: \"http://p:1\", ca_file: c}", "upstream_proxy.ca_file", "absolute path", ""},
		{"upstream_proxy: {url: \"http://p:1\", dns: \"https://dns.example/dns-query\"}", "upstream_proxy.dns", "not an IP address", "1.1.1.1"},
		{"upstream_proxy: {url: \"http://p:1\", dns: \"http://1.1.1.1/dns-query\"}", "upstream_proxy.dns", "https://", ""},
		{"upstream_proxy: {url: \"http://p:1\", user: joe}", "upstream_proxy.user", "unknown key", ""},
	} {
		_, err := parse(tc.in)
		if agentlab.CodeOf(err) != agentlab.CodeInvalid {
			t.Errorf("%q: got %v, want invalid", tc.in, err)
			continue
		}
		e, _ := errors.AsType[*agentlab.Error](err)
		if e.Field != tc.field || !strings.Contains(e.Message, tc.message) || !strings.Contains(e.Hint, tc.hint) {
			t.Errorf("%q: field %q, message %q, hint %q", tc.in, e.Field, e.Message, e.Hint)
		}
	}
}

func TestUpstreamProxy(t *testing.T) {
	const text = "upstream_proxy: {url: \"https://proxy.corp:3128\", credentials_file: /c, ca_file: /a, dns: \"https://[2606:4700::1111]:8443/dns-query\"}"
	c, err := parse(text)
	if want := (UpstreamProxy{URL: "https://proxy.corp:3128", CredentialsFile: "/c", CAFile: "/a", DNS: "https://[2606:4700::1111]:8443/dns-query"}); err != nil || c.UpstreamProxy != want {
		t.Errorf("%+v, %v", c.UpstreamProxy, err)
	}
	if err := c.UpstreamProxy.Refuse("stage"); agentlab.CodeOf(err) != agentlab.CodeUnsupported {
		t.Errorf("%v", err)
	}
	if err := defaults().UpstreamProxy.Refuse("stage"); err != nil {
		t.Errorf("without a proxy: %v", err)
	}
}

func TestAPI(t *testing.T) {
	for _, text := range []string{
		"api: {listen: \"127.0.0.1:8843\"}", "api: {listen: \"[::1]:8843\"}", "api: {listen: \"127.0.0.1:0\"}",
		"metrics: {listen: \"127.0.0.1:9464\", token_file: /t}", "metrics: {listen: \"[::1]:9464\", token_file: /t}",
		"api: {listen: \"0.0.0.0:8843\", tls_cert: /c, tls_key: /k}",
	} {
		if _, err := parse(text); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
	c, err := parse("api: {groups: {ops: admin, auditors: read}}")
	if err != nil {
		t.Fatal(err)
	}
	if got := c.API.GroupRoles(); !reflect.DeepEqual(got, map[string]agentlab.Role{"ops": agentlab.RoleAdmin, "auditors": agentlab.RoleRead}) {
		t.Errorf("groups %v", got)
	}
	if got := defaults().API.GroupRoles(); !reflect.DeepEqual(got, map[string]agentlab.Role{defaultGroup: agentlab.RoleWrite}) {
		t.Errorf("groups by default %v", got)
	}
}

func TestLoadNamesTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, []byte("nope: 1"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(path, known...); err == nil || !strings.Contains(err.Error(), path+": line 1") {
		t.Errorf("got %v", err)
	}
	if _, err := Load(filepath.Dir(path), known...); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Errorf("a directory: got %v, want denied", err)
	}
}

func TestWarmPool(t *testing.T) {
	c, err := parse("warm_pool: {base: 2, agents/large: 1, other: 0}")
	if err != nil {
		t.Fatal(err)
	}
	got, err := c.Pool()
	if want := []PoolEntry{{"agents", "large", 1}, {"base", "", 2}}; err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v, want %+v", got, err, want)
	}
	for text, want := range map[string]string{
		"warm_pool: {base: 101}":       "101 is not between 0 and 100",
		"warm_pool: {base: -1}":        "-1 is not between",
		"warm_pool: {base: two}":       "line 1",
		"warm_pool: {Base: 1}":         "neither an image nor IMAGE/PROFILE",
		"warm_pool: {base/: 1}":        "neither an image nor IMAGE/PROFILE",
		"warm_pool: {base/a/b: 1}":     "neither an image nor IMAGE/PROFILE",
		"\nwarm_pool:\n  base: 1000\n": "line 3",
	} {
		if _, err := parse(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", text, err)
		}
	}
}
