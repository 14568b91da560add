package profile

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

var qemu = backend.Info{Name: "qemu", UploadURL: "http://10.77.0.1:8846/upload", Capabilities: backend.Capabilities{NetworkOff: true}}

func fieldOf(err error) string {
	e, ok := errors.AsType[*agentlab.Error](err)
	if !ok {
		return ""
	}
	return e.Field
}

// seedSchema is the example of seed 000 §15.
const seedSchema = `name: yolo-ephemeral
template_vmid: 9000
network:
  bridge: vmbr1
  model: virtio
  firewall_group: agent_nat_default
resources:
  cores: 4
  memory_mb: 6144
  balloon: false
  cpulist: "0-7"           # optional: P-core threads
storage:
  root_size_gb: 40
  workspace: none          # or "attach"
behavior:
  mode: dangerous
  keepalive_default: false
  ttl_minutes_default: 180
  # inner_sandbox: bubblewrap
secrets_bundle: default
repo:
  clone_path: /tmp/repo    # workspace profile overrides to /work/repo
artifacts:
  upload: true
  endpoint: http://10.77.0.1:8846/upload
`

// options are the keys of the backend bridged, which has every key of the seed.
var options = []backend.Option{
	{Path: "template_vmid", Zero: 0, Valid: func(v string) bool { return len(v) > 2 }, Image: func(v string) string { return "template-" + v }},
	{Path: "network.bridge", Name: "bridge", Zero: "", Valid: regexp.MustCompile(`^[a-z0-9]+$`).MatchString},
	{Path: "network.model", Name: "nic_model", Zero: ""},
	{Path: "network.firewall_group", Name: "firewall_group", Zero: ""},
	{Path: "resources.balloon", Name: "balloon", Zero: false},
	{Path: "resources.cpulist", Name: "cpulist", Zero: ""},
}

var bridged = backend.Info{Name: "bridged", UploadURL: qemu.UploadURL, Options: options}

// parseText reads a profile on the backend qemu, which has none of the options.
func parseText(text []byte) (*Doc, error) {
	return parse(text, noLists, NewLibrary("", qemu).Options(map[string][]backend.Option{"bridged": options, "qemu": nil}).keys)
}

func TestSeedSchemaParsesWhole(t *testing.T) {
	d, err := parseText([]byte(seedSchema))
	if err != nil {
		t.Fatal(err)
	}
	want := agentlab.Profile{
		Name: "yolo-ephemeral", Image: "template-9000",
		Options:   `{"bridge":"vmbr1","cpulist":"0-7","firewall_group":"agent_nat_default","nic_model":"virtio"}`,
		Resources: agentlab.Resources{Cores: 4, MemoryMB: 6144, RootSizeGB: 40, Nested: agentlab.NestedOff}, Network: agentlab.Network{Mode: "nat"},
		Workspace: "none", Mode: "dangerous", TTL: 3 * time.Hour, SecretsBundle: "default", ClonePath: "/tmp/repo", UploadArtifacts: true, YAML: seedSchema,
	}
	if got := d.Profile(); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	err = d.Usable(qemu)
	if agentlab.CodeOf(err) != agentlab.CodeUnsupported || fieldOf(err) != "template_vmid" || !strings.Contains(err.Error(), "only backend bridged has this key") {
		t.Errorf("got %v, want unsupported template_vmid", err)
	}
	if err := d.Usable(bridged); err != nil {
		t.Errorf("not usable where it was written for: %v", err)
	}
	for _, o := range []backend.Option{options[0], options[1], options[2], options[3], options[5]} {
		less := bridged
		less.Options = slices.DeleteFunc(slices.Clone(options), func(x backend.Option) bool { return x.Path == o.Path })
		if err := d.Usable(less); agentlab.CodeOf(err) != agentlab.CodeUnsupported || fieldOf(err) != o.Path {
			t.Errorf("without %s: %v", o.Path, err)
		}
	}
	strict := bridged
	strict.OptionsOK = func(o agentlab.Options) error {
		return agentlab.Errorf(agentlab.CodeUnsupported, "not %s", o).WithField("network.bridge").WithHint("take another")
	}
	err = d.Usable(strict)
	if fieldOf(err) != "network.bridge" || agentlab.HintOf(err) != "take another" || !strings.Contains(err.Error(), "on backend bridged: not {") {
		t.Errorf("what the driver refuses: %v", err)
	}
}

func TestOptionsAreChecked(t *testing.T) {
	for yaml, field := range map[string]string{
		"template_vmid: 99":                  "template_vmid",
		"template_vmid: '9000'":              "template_vmid",
		"template_vmid: 9000\nimage: base":   "template_vmid",
		"network: {bridge: 'vmbr1,tag=7'}":   "network.bridge",
		"network: {bridge: ''}":              "network.bridge",
		"network: {bridge: {a: b}}":          "network.bridge",
		"resources: {balloon: 1}":            "resources.balloon",
		"'network.bridge': vmbr1":            "network.bridge",
		"network: {brige: vmbr1}":            "network.brige",
		"storage: {bridge: vmbr1}":           "storage.bridge",
		"network: {private: [{bridge: br}]}": "network.private[0].bridge",
	} {
		if _, err := parseText([]byte("name: x\n" + yaml)); agentlab.CodeOf(err) != agentlab.CodeInvalid || fieldOf(err) != field {
			t.Errorf("%s: got %v, want invalid %s", yaml, err, field)
		}
	}
	for yaml, want := range map[string]agentlab.Options{
		"network: {bridge: null, model: virtio}":           `{"nic_model":"virtio"}`,
		"resources: {balloon: false}":                      "",
		"resources: {balloon: true}\nnetwork: {bridge: 7}": `{"balloon":true,"bridge":"7"}`,
	} {
		if d, err := parseText([]byte("name: x\n" + yaml)); err != nil || d.Profile().Options != want {
			t.Errorf("%s: %+v, %v, want %s", yaml, d, err, want)
		}
	}
}

// TestTwoBackendsHaveAKey: the configured backend says what is valid.
func TestTwoBackendsHaveAKey(t *testing.T) {
	number := []backend.Option{{Path: "network.bridge", Name: "number", Zero: 0}}
	l := NewLibrary("", backend.Info{Name: "b", Options: number}).Options(map[string][]backend.Option{"a": options, "b": number})
	if e := l.Check("name: x\nnetwork: {bridge: 7}"); e.Err != nil || e.Profile.Options != `{"number":7}` {
		t.Errorf("%+v", e)
	}
	if e := l.Check("name: x\nnetwork: {bridge: br}"); agentlab.CodeOf(e.Err) != agentlab.CodeInvalid {
		t.Errorf("%+v", e)
	}
}

func TestDefaults(t *testing.T) {
	d, err := parseText([]byte("name: x"))
	if err != nil {
		t.Fatal(err)
	}
	want := agentlab.Profile{Name: "x", Resources: agentlab.Resources{Cores: 2, MemoryMB: 2048, Nested: agentlab.NestedOff}, Network: agentlab.Network{Mode: "nat"},
		Workspace: "none", Mode: "dangerous", TTL: 3 * time.Hour, UploadArtifacts: true, YAML: "name: x"}
	if got := d.Profile(); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if err := d.Usable(backend.Info{Name: "bare"}); err != nil {
		t.Errorf("a profile of defaults is not usable: %v", err)
	}
}

func TestUnsupportedKeysAreNamed(t *testing.T) {
	for _, tc := range []struct{ yaml, field string }{
		{"template_vmid: 9000", "template_vmid"},
		{"network: {mode: allowlist}", "network.mode"},
		{"network: {deny: [github.com]}", "network.deny"},
		{"network: {ports: [443]}", "network.ports"},
		{"network: {limits: {flows: 9}}", "network.limits"},
		{"network: {bridge: vmbr1}", "network.bridge"},
		{"network: {model: virtio}", "network.model"},
		{"network: {firewall_group: agent_nat}", "network.firewall_group"},
		{"resources: {balloon: true}", "resources.balloon"},
		{"resources: {cpulist: 0-7}", "resources.cpulist"},
		{"artifacts: {endpoint: 'https://elsewhere/upload'}", "artifacts.endpoint"},
	} {
		d, err := parseText([]byte("name: x\n" + tc.yaml))
		if err != nil {
			t.Errorf("%s: %v", tc.yaml, err)
			continue
		}
		err = d.Usable(qemu)
		if agentlab.CodeOf(err) != agentlab.CodeUnsupported || fieldOf(err) != tc.field || agentlab.HintOf(err) == "" {
			t.Errorf("%s: got %v, want unsupported %s", tc.yaml, err, tc.field)
		}
	}
	for _, yaml := range []string{"network: {mode: off}", "network: {deny: [], limits: {flows: 0}}", "resources: {balloon: false}", "artifacts: {endpoint: 'http://10.77.0.1:8846/upload/'}"} {
		d, err := parseText([]byte("name: x\n" + yaml))
		if err == nil {
			err = d.Usable(qemu)
		}
		if err != nil {
			t.Errorf("%s: %v", yaml, err)
		}
	}
	d, _ := parseText([]byte("name: x\nnetwork: {mode: off}"))
	if err := d.Usable(backend.Info{Name: "bare"}); agentlab.CodeOf(err) != agentlab.CodeUnsupported {
		t.Errorf("mode off on a backend without it: %v", err)
	}
}

func TestRefused(t *testing.T) {
	for _, tc := range []struct{ yaml, field, message, hint string }{
		{"", "name", "needs a name", ""},
		{"name: x\nresorces: {cores: 1}", "resorces", "line 2: unknown key", `"resources"`},
		{"name: x\nresources: {core: 1}", "resources.core", "unknown key", `"resources.cores"`},
		{"name: 'A b'", "name", "line 1: ", "lower-case"},
		{"name: '123'", "name", "", ""},
		{"name: x\nimage: ../../etc", "image", "line 2: ", ""},
		{"name: x\nsecrets_bundle: a/b", "secrets_bundle", "", ""},
		{"name: x\nresources: {cores: 0}", "resources.cores", "line 2: 0 is not between 1 and 256", ""},
		{"name: x\nresources: {memory_mb: 127}", "resources.memory_mb", "", ""},
		{"name: x\nresources: {nested: onn}", "resources.nested", "line 2: \"onn\" is not known", `"on"`},
		{"name: x\nresources: {nested: never}", "resources.nested", "", "off, auto, on"},
		{"name: x\nstorage: {root_size_gb: -1}", "storage.root_size_gb", "", ""},
		{"name: x\nstorage: {workspace: atach}", "storage.workspace", "", `"attach"`},
		{"name: x\nnetwork: {mode: bridge}", "network.mode", "", "nat, allowlist, off"},
		{"name: x\nnetwork:\n  allow: [github.com]", "network.allow", "line 3: an allow list has no effect in mode nat", "mode: allowlist"},
		{"name: x\nnetwork:\n  mode: allowlist\n  allow: ['https://github.com']", "network.allow", "line 4: ", "github.com:443"},
		{"name: x\nnetwork: {mode: allowlist, allow: ['preset:gitbub']}", "network.allow", "there is no preset", "policy presets"},
		{"name: x\nnetwork: {mode: allowlist, allow: [{host: x}]}", "network.allow[0]", "text is expected", ""},
		{"name: x\nnetwork: {mode: allowlist, allow: ['file:list.txt']}", "network.allow", "only a profile in the directory", ""},
		{"name: x\nnetwork: {mode: allowlist, allow: [192.168.0.0/16]}", "network.allow", "never be allowed (always.private)", ""},
		{"name: x\nnetwork: {ports: [https]}", "network.ports", "", "443/udp"},
		{"name: x\nnetwork: {limits: {flows: -1}}", "network.limits.flows", "", ""},
		{"name: x\nbehavior: {mode: safe}", "behavior.mode", "", "dangerous"},
		{"name: x\nbehavior: {ttl_minutes_default: 0}", "behavior.ttl_minutes_default", "", ""},
		{"name: x\nbehavior: {ttl_minutes_default: 43201}", "behavior.ttl_minutes_default", "", ""},
		{"name: x\nrepo: {clone_path: tmp/repo}", "repo.clone_path", "absolute", ""},
		{"name: x\nrepo: {clone_path: /tmp/../etc}", "repo.clone_path", "absolute", ""},
		{"name: x\nrepo: {clone_path: /}", "repo.clone_path", "absolute", ""},
		{"name: x\nartifacts: {ttl_days: -1}", "artifacts.ttl_days", "", ""},
	} {
		_, err := parseText([]byte(tc.yaml))
		if agentlab.CodeOf(err) != agentlab.CodeInvalid {
			t.Errorf("%q: got %v, want invalid", tc.yaml, err)
			continue
		}
		e, _ := errors.AsType[*agentlab.Error](err)
		if e.Field != tc.field || !strings.Contains(e.Message, tc.message) || !strings.Contains(e.Hint, tc.hint) {
			t.Errorf("%q: field %q, message %q, hint %q", tc.yaml, e.Field, e.Message, e.Hint)
		}
	}
}

func TestHostMountsAreRefusedInEverySpelling(t *testing.T) {
	for _, key := range []string{
		"mounts", "mount", "Mounts", "host_mounts", "host-mounts", "hostMounts", "bind_mounts", "bindMount", "volumes", "volume", "Volume-Mounts",
		"binds", "bind", "host_path", "hostPath", "HOSTPATH", "host-path", "host path", "host_dir", "virtfs", "9p", "p9", "virtio-9p", "plan9",
		"virtiofs", "virtio_fs", "virtiofsd", "shared_folders", "sharedFolders", "shared_dirs", "shares", "share", "mp0", "mp12", "lxc.mount.entry",
		"fsdev", "filesystems", "nfs", "smb_share",
	} {
		for _, text := range []string{
			"name: x\n'" + key + "': [/home]",
			"name: x\nstorage:\n  workspace: none\n  \"" + key + "\": /home",
			"name: x\nstorage: {disks: [{type: dir, '" + key + "': /home}]}",
			"'" + key + "': null",
		} {
			_, err := parseText([]byte(text))
			if agentlab.CodeOf(err) != agentlab.CodeDenied || !strings.Contains(err.Error(), "host") || agentlab.HintOf(err) == "" {
				t.Errorf("%q: got %v, want denied", text, err)
			}
		}
	}
}

// TestNoSchemaKeyLooksLikeAHostMount guards the pattern against the schema
// and the other way round.
func TestNoSchemaKeyLooksLikeAHostMount(t *testing.T) {
	var walk func(reflect.Type)
	walk = func(typ reflect.Type) {
		for i := range typ.NumField() {
			f := typ.Field(i)
			if name, ok := f.Tag.Lookup("yaml"); ok && isHostMount(name) {
				t.Errorf("key %q looks like a host mount", name)
			}
			if f.Type.Kind() == reflect.Struct {
				walk(f.Type)
			}
		}
	}
	walk(reflect.TypeFor[Doc]())
}

func TestShippedProfiles(t *testing.T) {
	list, err := NewLibrary(filepath.Join(t.TempDir(), "none"), qemu).List()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range list {
		names = append(names, e.Name)
		if e.Source != shipped || e.Profile.Name != e.Name || e.YAML == "" {
			t.Errorf("%+v", e)
		}
		// Unattended agents get no virtualization (docs/security.md).
		interactive := slices.Contains([]string{"interactive", "interactive-dev", "long-running-session", "stateful-dev"}, e.Name)
		if interactive != e.Profile.Resources.Nested.Wanted() || e.Profile.Resources.Nested == agentlab.NestedOn {
			t.Errorf("%s: nested is %q", e.Name, e.Profile.Resources.Nested)
		}
		if e.Name == "yolo-workspace" || e.Name == "stateful-dev" {
			if e.Err != nil || e.Profile.Workspace != agentlab.WorkspaceRequired {
				t.Errorf("%s: %+v", e.Name, e)
			}
			continue
		}
		if e.Name == "yolo-restricted" || e.Name == "safe-untrusted" {
			able := NewLibrary("", rulesInfo)
			if p, err := able.Use(e.Name); err != nil || len(p.Network.Allow) < 30 || agentlab.CodeOf(e.Err) != agentlab.CodeUnsupported {
				t.Errorf("%s: %v, %v where it is not honoured, %d rules", e.Name, err, e.Err, len(p.Network.Allow))
			}
			continue
		}
		if e.Err != nil {
			t.Errorf("%s: %v", e.Name, e.Err)
		}
	}
	if want := []string{"fast-dev", "interactive", "interactive-dev", "long-running-session", "no-secrets", "safe-untrusted", "stateful-dev", "yolo-ephemeral", "yolo-restricted", "yolo-workspace"}; !reflect.DeepEqual(names, want) {
		t.Errorf("got %v, want %v", names, want)
	}
}

// A session has the resources of seed 004, FR-025, unless its user chooses others.
func TestInteractiveProfile(t *testing.T) {
	dir := t.TempDir()
	p, err := NewLibrary(dir, qemu).Use("interactive")
	if err != nil || p.Resources.Cores != 4 || p.Resources.MemoryMB != 8192 || !p.Keepalive {
		t.Errorf("%+v, %v", p, err)
	}
	write(t, dir, "interactive.yaml", "name: interactive\nresources: {cores: 2, memory_mb: 1024}")
	if p, err := NewLibrary(dir, qemu).Use("interactive"); err != nil || p.Resources.Cores != 2 || p.Resources.MemoryMB != 1024 {
		t.Errorf("the user's: %+v, %v", p, err)
	}
}

func write(t *testing.T, dir, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestLibrary(t *testing.T) {
	dir := t.TempDir()
	l := NewLibrary(dir, qemu)
	write(t, dir, "mine.yaml", "name: mine\nresources: {cores: 1}")
	write(t, dir, "yolo-ephemeral.yaml", "name: yolo-ephemeral\nresources: {cores: 8}")
	write(t, dir, "broken.yaml", "name: [")
	write(t, dir, "other.yaml", "name: different")
	write(t, dir, "late.yml", "name: late")
	write(t, dir, ".mine.yaml.swp", "x")
	write(t, dir, "README", "x")
	if err := os.Mkdir(filepath.Join(dir, "dir.yaml"), 0o700); err != nil {
		t.Fatal(err)
	}
	list, err := l.List()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, e := range list {
		got[e.Name] = string(agentlab.CodeOf(e.Err))
	}
	want := map[string]string{"mine": "", "yolo-ephemeral": "", "interactive-dev": "", "yolo-workspace": "", "yolo-restricted": "unsupported",
		"fast-dev": "", "interactive": "", "long-running-session": "", "no-secrets": "", "safe-untrusted": "unsupported", "stateful-dev": "",
		"broken": "invalid", "other": "invalid", "late.yml": "invalid", "dir": "internal"}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}

	if p, err := l.Use("yolo-ephemeral"); err != nil || p.Resources.Cores != 8 {
		t.Errorf("the user's file does not win: %+v, %v", p, err)
	}
	if _, err := l.Use("broken"); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("broken: %v", err)
	}
	_, err = l.Use("yolo-ephemerl")
	if agentlab.CodeOf(err) != agentlab.CodeNotFound || !strings.Contains(agentlab.HintOf(err), `"yolo-ephemeral"`) {
		t.Errorf("got %v, hint %q", err, agentlab.HintOf(err))
	}
	if _, err := l.Use("../../etc/passwd"); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("got %v, want invalid", err)
	}
	write(t, dir, "interactive-dev.yaml", "name: interactive-dev\nmounts: [/]")
	if _, err := l.Use("interactive-dev"); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Errorf("a broken file must not fall back to the shipped profile: %v", err)
	}
}

func TestPut(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "profiles")
	l := NewLibrary(dir, qemu).Options(map[string][]backend.Option{"bridged": options})
	if e, err := l.Put("mine", "name: mine"); err != nil || e.Err != nil || e.Source != filepath.Join(dir, "mine.yaml") {
		t.Fatalf("%+v, %v", e, err)
	}
	if e, err := l.Put("mine", "name: mine\ntemplate_vmid: 101"); err != nil || agentlab.CodeOf(e.Err) != agentlab.CodeUnsupported {
		t.Errorf("for another backend: %+v, %v", e, err)
	}
	for _, tc := range []struct {
		name, yaml string
		code       agentlab.Code
	}{
		{"mine", "name: other", agentlab.CodeInvalid},
		{"mine", "name: mine\nmp0: /x", agentlab.CodeDenied},
		{"../x", "name: x", agentlab.CodeInvalid},
	} {
		if _, err := l.Put(tc.name, tc.yaml); agentlab.CodeOf(err) != tc.code {
			t.Errorf("%s: got %v, want %s", tc.name, err, tc.code)
		}
	}
	e, err := l.Find("mine")
	if err != nil || e.YAML != "name: mine\ntemplate_vmid: 101" {
		t.Errorf("a refused Put changed the file: %+v, %v", e, err)
	}
	if files, _ := os.ReadDir(dir); len(files) != 1 {
		t.Errorf("left behind: %v", files)
	}
	if e := l.Check("name: anything\nresources: {cores: 3}"); e.Err != nil || e.Name != "anything" || e.Profile.Resources.Cores != 3 {
		t.Errorf("Check: %+v", e)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(seedSchema))
	f.Add([]byte("name: x\nnetwork: {mode: off, allow: [a]}"))
	f.Add([]byte("name: x\nnetwork: {mode: allowlist, allow: ['preset:github', '*.x.example:443/udp', 'file:a'], deny: [1.2.3.0/24], ports: [443, 1-2/udp, icmp], limits: {flows: 1}}"))
	f.Fuzz(func(t *testing.T, data []byte) {
		d, err := parseText(data)
		if err != nil {
			if c := agentlab.CodeOf(err); c != agentlab.CodeInvalid && c != agentlab.CodeDenied {
				t.Errorf("code %s: %v", c, err)
			}
			return
		}
		if p := d.Profile(); p.Resources.Validate() != nil || agentlab.ValidateTTL(p.TTL) != nil || agentlab.ValidateName(p.Name) != nil {
			t.Errorf("accepted %+v", p)
		}
	})
}
