package config

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

func TestDefaultIsValidAndWhatAMissingOrEmptyFileMeans(t *testing.T) {
	want := Default()
	if err := want.Validate(); err != nil {
		t.Fatal(err)
	}
	got, err := Load(filepath.Join(t.TempDir(), "config.yaml"))
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("missing file: %+v, %v", got, err)
	}
	got, err = Parse([]byte("# nothing yet\n"))
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("empty file: %+v, %v", got, err)
	}
}

func TestEveryKeyIsDocumentedAndReadable(t *testing.T) {
	for _, k := range keys() {
		if k.doc == "" || k.path == "" {
			t.Errorf("key %q has no doc", k.path)
		}
		parts := strings.Split(k.path, ".")
		text := strings.Repeat("  ", len(parts)-1) + parts[len(parts)-1] + ": " + k.def + "\n"
		if len(parts) == 2 {
			text = parts[0] + ":\n" + text
		}
		c, err := Parse([]byte(text))
		if err != nil || !reflect.DeepEqual(c, Default()) {
			t.Errorf("%q: %v", text, err)
		}
	}
	if n := len(keys()); n < 15 {
		t.Errorf("only %d keys", n)
	}
}

func TestParse(t *testing.T) {
	c, err := Parse([]byte("limits:\n  max_sandboxes: 3\n  max_ttl_minutes: 120\nqemu: {accel: tcg, binary: /opt/q}\nvmid_range: {first: 200, last: 200}\nbootstrap_ttl_minutes: 5\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := Default()
	want.Limits = Limits{MaxSandboxes: 3, MinFreeMB: 1024, MaxTTLMinutes: 120, BootMinutes: 3, EgressRecords: 5000}
	want.QEMU = QEMU{Binary: "/opt/q", Accel: "tcg"}
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
		{"backend: qemu\ndefault_profil: x", "default_profil", "line 2: unknown key", `"default_profile"`},
		{"limits:\n  max_sandbox: 1", "limits.max_sandbox", "line 2: unknown key", `"limits.max_sandboxes"`},
		{"debug_listen: 127.0.0.1:8845", "debug_listen", "unknown key", ""},
		{"backend: kubernetes", "backend", `line 1: "kubernetes" is not known`, "choose one of qemu, proxmox"},
		{"backend: qmeu", "backend", "", `did you mean "qemu"?`},
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
		{"qemu: {accel: hvf}", "qemu.accel", "", "auto, kvm, tcg"},
		{"qemu: {binary: bin/qemu}", "qemu.binary", "absolute", ""},
		{"limits: 3", "limits", "line 1: a mapping", ""},
		{"api: {listen: \"8843\"}", "api.listen", "not an address with a port", "127.0.0.1:8843"},
		{"api: {listen: \"localhost:8843\"}", "api.listen", "not an address with a port", "numbers"},
		{"api: {listen: \"0.0.0.0:8843\"}", "api.listen", "there is no TLS", "api.tls_cert"},
		{"api: {listen: \"[::]:8843\"}", "api.listen", "there is no TLS", ""},
		{"api: {listen: \"192.0.2.1:8843\"}", "api.listen", "there is no TLS", ""},
		{"api: {listen: \"192.0.2.1:8843\", tls_cert: /c}", "api.tls_cert", "stands alone", "api.tls_key"},
		{"api: {listen: \"192.0.2.1:8843\", tls_key: /k}", "api.tls_key", "stands alone", ""},
		{"api: {tls_cert: /c, tls_key: /k}", "api.tls_cert", "nothing listens", "api.listen"},
		{"api: {listen: \"192.0.2.1:8843\", tls_cert: c, tls_key: /k}", "api.tls_cert", "absolute path", ""},
		{"api: {groups: {agentlab: owner}}", "api.groups.agentlab", `"owner" is not known`, "read, write, admin"},
		{"api: {groups: {\"a b\": read}}", "api.groups", "not the name of a group", ""},
		{"upstream_proxy: {url: \"http://joe:secret@proxy.corp:3128\"}", "upstream_proxy.url", "line 1: credentials", "credentials_file"},
		{"upstream_proxy: {url: \"http://joe:secret%@proxy.corp:3128\"}", "upstream_proxy.url", "line 1: not a URL", "proxy.corp"},
		{"upstream_proxy: {url: \"socks4://proxy.corp:1080\"}", "upstream_proxy.url", "known kind", "socks5://"},
		{"upstream_proxy: {url: \"proxy.corp:3128\"}", "upstream_proxy.url", "known kind", "http://"},
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
		_, err := Parse([]byte(tc.in))
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
	c, err := Parse([]byte(text))
	if want := (UpstreamProxy{URL: "https://proxy.corp:3128", CredentialsFile: "/c", CAFile: "/a", DNS: "https://[2606:4700::1111]:8443/dns-query"}); err != nil || c.UpstreamProxy != want {
		t.Errorf("%+v, %v", c.UpstreamProxy, err)
	}
	c.Backend = testBackend // as every backend but qemu
	e, ok := errors.AsType[*agentlab.Error](c.Validate())
	if !ok || e.Code != agentlab.CodeUnsupported || e.Field != "upstream_proxy.url" || !strings.Contains(e.Hint, "backend: qemu") {
		t.Errorf("another backend: %+v", e)
	}
}

func TestAPI(t *testing.T) {
	for _, text := range []string{
		"api: {listen: \"127.0.0.1:8843\"}", "api: {listen: \"[::1]:8843\"}", "api: {listen: \"127.0.0.1:0\"}",
		"api: {listen: \"0.0.0.0:8843\", tls_cert: /c, tls_key: /k}",
	} {
		if _, err := Parse([]byte(text)); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
	c, err := Parse([]byte("api: {groups: {ops: admin, auditors: read}}"))
	if err != nil {
		t.Fatal(err)
	}
	if got := c.API.GroupRoles(); !reflect.DeepEqual(got, map[string]agentlab.Role{"ops": agentlab.RoleAdmin, "auditors": agentlab.RoleRead}) {
		t.Errorf("groups %v", got)
	}
	if got := Default().API.GroupRoles(); !reflect.DeepEqual(got, map[string]agentlab.Role{DefaultGroup: agentlab.RoleWrite}) {
		t.Errorf("groups by default %v", got)
	}
}

func TestLoadNamesTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, []byte("nope: 1"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(path); err == nil || !strings.Contains(err.Error(), path+": line 1") {
		t.Errorf("got %v", err)
	}
	if _, err := Load(filepath.Dir(path)); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Errorf("a directory: got %v, want denied", err)
	}
}
