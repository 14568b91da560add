package hostscripts

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// machine is a host with systemd. Its backend is the one of the tests: what
// systemd starts is the real daemon.
func machine(t *testing.T, with ...string) *host {
	h := node(t, append([]string{"systemctl", "runuser"}, with...)...)
	h.ok("mkdir", "-p", "/run/systemd/system")
	h.write("/etc/agentlab/config.yaml", "backend: fake\n")
	return h
}

const lab = "/usr/local/bin/agentlab"

func TestInstall(t *testing.T) {
	h := machine(t)
	h.ok("useradd", "--create-home", "ann")
	contains(t, "commands", h.applied("install_host.sh", "--skill-for", "ann"),
		"groupadd --system agentlab", "install -d -m 0700 /var/lib/agentlab", "install -D -m 0755 /opt/agentlab/bin/agentlabd /usr/local/bin/agentlabd",
		"write /etc/systemd/system/agentlabd.service", "systemctl daemon-reload", "systemctl enable agentlabd.service", "systemctl restart agentlabd.service",
		"/etc/agentlab/profiles/yolo-ephemeral.yaml", "runuser -u ann -- install -D -m 0644 /usr/local/share/agentlab/skills/agentlab/SKILL.md /home/ann/.claude/skills/agentlab/SKILL.md")
	if out := h.ok(lab, "status"); !strings.Contains(out, "fake") {
		t.Error(out)
	}
	for path, mode := range map[string]os.FileMode{
		"/etc/agentlab": 0o755, "/etc/agentlab/secrets": 0o700, "/var/lib/agentlab": 0o700, "/var/log/agentlab": 0o700, "/usr/local/bin/agent-runner": 0o755,
	} {
		if info, err := os.Stat(filepath.Join(h.dir, path)); err != nil || info.Mode().Perm() != mode {
			t.Errorf("%s: %v %v", path, info, err)
		}
	}
	// Members of the group may use the socket, others not.
	if got := h.ok("stat", "-c", "%a %G", "/run/agentlab/agentlabd.sock"); got != "660 agentlab\n" {
		t.Errorf("socket: %s", got)
	}
	if !strings.Contains(h.read("/home/ann/.claude/skills/agentlab/SKILL.md"), "name: agentlab\n") {
		t.Error("the skill is not where Claude Code looks for it")
	}
	// What the host is given has nothing of the developers' in it.
	if h.has("/usr/local/share/agentlab/scripts/demo.sh") || !h.has("/usr/local/share/agentlab/scripts/net/setup_vmbr1.sh") {
		t.Error("scripts")
	}

	h.ok(lab, "sandbox", "new", "--name", "kept")
	t.Run("upgrade", func(t *testing.T) { upgrade(t, h) })
	t.Run("remove", func(t *testing.T) {
		if r := h.script("install_host.sh", "--remove", "--apply"); r.code != 1 || !strings.Contains(r.stderr, "sandboxes exist") {
			t.Errorf("%+v", r)
		}
		h.ok(lab, "sandbox", "destroy", "kept")
		h.applied("install_host.sh", "--remove", "--skill-for", "ann")
		for _, gone := range []string{lab, "/etc/systemd/system/agentlabd.service", "/usr/local/share/agentlab", "/home/ann/.claude/skills/agentlab"} {
			if h.has(gone) {
				t.Errorf("%s is left", gone)
			}
		}
		if !h.has("/var/lib/agentlab/agentlab.db") || !h.has("/etc/agentlab/config.yaml") {
			t.Error("state or configuration is lost without --purge")
		}
		h.applied("install_host.sh", "--remove", "--purge")
		for _, gone := range []string{"/etc/agentlab", "/var/lib/agentlab", "/var/log/agentlab"} {
			if h.has(gone) {
				t.Errorf("%s is left", gone)
			}
		}
		if strings.Contains(h.read("/etc/group"), "agentlab:") {
			t.Error("the group is left")
		}
	})
}

// upgrade replaces the programs, keeps what the host's owner changed, and goes
// back when the new daemon does not start.
func upgrade(t *testing.T, h *host) {
	pid := h.read("/run/systemd/system/pid-agentlabd.service")
	// A profile that the owner changed stays; an unchanged one is updated.
	mine := h.read("/etc/agentlab/profiles/yolo-ephemeral.yaml") + "# mine\n"
	h.write("/etc/agentlab/profiles/yolo-ephemeral.yaml", mine)
	for _, name := range []string{"yolo-ephemeral", "yolo-workspace"} {
		path := "/opt/agentlab/profiles/" + name + ".yaml"
		h.write(path, h.read(path)+"# newer\n")
	}
	h.ok("bash", "-c", "echo >>/opt/agentlab/bin/agentlabd") // another build
	commands := h.applied("install_host.sh")
	contains(t, "commands", commands, "/usr/local/lib/agentlab/previous/agentlabd", "systemctl restart agentlabd.service")
	if got := h.read("/run/systemd/system/pid-agentlabd.service"); got == pid {
		t.Error("the new daemon was not started")
	}
	if h.read("/etc/agentlab/profiles/yolo-ephemeral.yaml") != mine || !strings.HasSuffix(h.read("/etc/agentlab/profiles/yolo-workspace.yaml"), "# newer\n") {
		t.Error("profiles")
	}
	if out := h.ok(lab, "sandbox", "list"); !strings.Contains(out, "kept") {
		t.Errorf("the sandbox is lost: %s", out)
	}

	// A daemon that does not start.
	h.write("/opt/broken/agentlabd", "#!/bin/sh\necho 'agentlabd: broken' >&2; exit 1\n")
	h.ok("bash", "-c", "chmod 755 /opt/broken/agentlabd && cp /opt/agentlab/bin/agentlab /opt/agentlab/bin/agent-runner /opt/broken/")
	if r := h.script("install_host.sh", "--bin", "/opt/broken", "--apply"); r.code != 1 || !strings.Contains(r.stderr, "the old programs were restored") {
		t.Errorf("%+v", r)
	}
	if out := h.ok(lab, "sandbox", "list"); !strings.Contains(out, "kept") {
		t.Errorf("after the failed upgrade: %s", out)
	}
	h.settled("install_host.sh")
	if r := h.script("install_host.sh", "--bin", "/nowhere", "--apply"); r.code != 1 || !strings.Contains(r.stderr, "does not exist") {
		t.Errorf("%+v", r)
	}
}

// initReport is what 'agentlab init --json' prints.
type initReport struct {
	OK, System bool
	Backend    string
	Checks     []struct {
		Name, Level, Detail, Remedy string
		Commands                    []string
	}
}

func (h *host) init(args ...string) (initReport, result) {
	h.Helper()
	r := h.do(append([]string{"/opt/agentlab/bin/agentlab", "init", "--json"}, args...)...)
	var rep initReport
	if err := json.Unmarshal([]byte(r.stdout), &rep); err != nil {
		h.Fatalf("%v: %+v", err, r)
	}
	if rep.OK != (r.code == 0) {
		h.Errorf("ok %v, code %d", rep.OK, r.code)
	}
	return rep, r
}

func (r initReport) level(name string) string {
	for _, c := range r.Checks {
		if c.Name == name {
			return c.Level
		}
	}
	return ""
}

// From a fresh machine to one that runs sandboxes by 'agentlab init' alone.
func TestInit(t *testing.T) {
	h := machine(t)
	before := h.changes()
	rep, _ := h.init("--system")
	differ(t, "changed without --apply", before, h.changes())
	if !rep.System || rep.OK || rep.level("installation") != "error" || rep.level("daemon") != "error" {
		t.Errorf("%+v", rep)
	}
	rep, r := h.init("--system", "--apply")
	if !rep.OK || rep.level("installation") != "ok" || rep.level("daemon") != "ok" || rep.Backend != "fake" || !strings.Contains(r.stderr, "+ systemctl enable agentlabd.service") {
		t.Errorf("%+v %s", rep, r.stderr)
	}
	if rep, _ = h.init(); !rep.OK || !rep.System {
		t.Errorf("%+v", rep)
	}
	out := h.ok("/usr/local/bin/agentlab", "init")
	if !strings.Contains(out, "ok     installation   set up\n") || !strings.HasSuffix(out, " ok, 0 warnings, 0 errors\n") {
		t.Error(out)
	}
	h.ok(lab, "sandbox", "list")
	h.ok("bash", "-c", "echo '# x' >>/etc/systemd/system/agentlabd.service")
	if rep, _ = h.init(); rep.OK || rep.level("installation") != "error" || rep.Checks[0].Remedy != "agentlab init --apply" || len(rep.Checks[0].Commands) == 0 {
		t.Errorf("%+v", rep)
	}
}
