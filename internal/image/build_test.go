package image

import (
	"context"
	"debug/elf"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// realBuilds skips where nothing can be built, and says why.
func realBuilds(t *testing.T, name string) {
	t.Helper()
	sample.Long(t, "it builds images")
	if err := mustShipped(t, name).preflight(t.Context(), t.TempDir()); err != nil {
		t.Fatalf("%v; %s", err, agentlab.HintOf(err))
	}
}

// builtImage is the shipped image, from the shared test cache.
func builtImage(t *testing.T, name string) Image {
	t.Helper()
	realBuilds(t, name)
	img, err := NewStore(testCache(t), Options{}).Ensure(t.Context(), name, func(s string) { t.Log(s) })
	if err != nil {
		t.Fatalf("%v; %s", err, agentlab.HintOf(err))
	}
	return img
}

// debugfs asks about the file system in an image without mounting it.
func debugfs(t *testing.T, img Image, request string) string {
	t.Helper()
	cmd := exec.Command(lookPath("debugfs"), "-R", request, img.RootDisk())
	cmd.Env = append(os.Environ(), "DEBUGFS_PAGER=cat", "PAGER=cat")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("debugfs %s: %v", request, err)
	}
	return string(out)
}

func TestBaseImage(t *testing.T) {
	img := builtImage(t, "base")
	if again := builtImage(t, "base"); again.Ref() != img.Ref() {
		t.Errorf("a second time it is %s, not %s", again.Ref(), img.Ref())
	}
	if st, err := os.Stat(img.RootDisk()); err != nil || st.Size() != 20<<30 || st.Mode().Perm() != 0o444 {
		t.Errorf("root disk: %v, %v", st, err)
	}
	if used := img.DiskUsage(); used < 100<<20 || used > 1000<<20 {
		t.Errorf("it occupies %d MB", used>>20)
	}
	for _, v := range []string{"kernel", "systemd", "git", "openssh", "python3", "mmdebstrap"} {
		if img.Versions[v] == "" || img.Versions[v] == "unknown" {
			t.Errorf("the stamp lacks the version of %s", v)
		}
	}
	for _, p := range append([]string{
		"curl", "file", "gcc", "git-lfs", "jq", "less", "libc6", "libc6-dev", "make", "openssh-client", "python3", "python3-pip", "python3-venv",
		"tmux", "unzip", "vim",
	}, essential...) {
		if img.Packages[p] == "" {
			t.Errorf("package %s is not there", p)
		}
	}
	f, err := elf.Open(img.Kernel())
	if err != nil {
		t.Fatalf("the kernel: %v", err)
	}
	defer f.Close()
	if f.Type != elf.ET_EXEC || len(f.Progs) == 0 {
		t.Errorf("the kernel is a %v with %d segments", f.Type, len(f.Progs))
	}
	if out, err := exec.Command(lookPath("e2fsck"), "-fn", img.RootDisk()).CombinedOutput(); err != nil {
		t.Errorf("e2fsck: %v\n%s", err, out)
	}
}

func TestBaseImageFiles(t *testing.T) {
	img := builtImage(t, "base")
	for _, tc := range []struct{ file, has string }{
		{"/etc/passwd", "agent:x:1000:1000::/home/agent:/bin/bash\n"},
		{"/etc/shadow", "agent:*:"},
		{"/etc/shadow", "root:*:"},
		{"/etc/sudoers.d/agentlab", "agent ALL=(ALL:ALL) NOPASSWD: ALL"},
		{"/etc/ssh/sshd_config.d/10-agentlab.conf", "PasswordAuthentication no"},
		{"/etc/ssh/sshd_config.d/10-agentlab.conf", "/run/agentlab/ssh/authorized_keys.d/%u"},
		{"/etc/resolv.conf", "nameserver 10.77.0.1\n"},
		{"/etc/tmpfiles.d/tmp.conf", "d /tmp 1777 root root -"},
		{"/etc/apt/sources.list.d/debian.sources", "URIs: http://deb.debian.org/debian\n"},
		{"/etc/systemd/system/agent-runner.service", "ExecStart=/usr/local/bin/agent-runner run\n"},
		{"/etc/systemd/system/agent-secrets-cleanup.service", "/run/agentlab/secrets"},
		{"/etc/systemd/journald.conf.d/agentlab.conf", "Storage=volatile"},
	} {
		if got := debugfs(t, img, "cat "+tc.file); !strings.Contains(got, tc.has) {
			t.Errorf("%s does not say %q:\n%s", tc.file, tc.has, got)
		}
	}
	for path, want := range map[string]string{
		"/usr/local/bin/agent-runner":           `Fast link dest: "/run/agentlab/bin/agent-runner"`,
		"/usr/local/bin/agentlab-agent":         `Fast link dest: "/run/agentlab/bin/agentlab-agent"`,
		"/etc/agentlab/bootstrap.json":          `Fast link dest: "/run/agentlab/bootstrap.json"`,
		"/etc/systemd/system/tmp.mount":         `Fast link dest: "/dev/null"`,
		"/etc/systemd/system/default.target":    "multi-user.target",
		"/etc/machine-id":                       "Size: 0\n",
		"/etc/sudoers.d/agentlab":               "Mode:  0440",
		"/tmp":                                  "Mode:  01777",
		"/work":                                 "User:  1000   Group:  1000",
		"/home/agent":                           "User:  1000   Group:  1000",
		"/usr/bin/sudo":                         "Mode:  04755",
		"/usr/lib/modules/" + img.KernelRelease: "directory",
	} {
		if got := debugfs(t, img, "stat "+path); !strings.Contains(got, want) {
			t.Errorf("%s is not %q:\n%s", path, want, got)
		}
	}
	// Nothing of the build or its host, no identity, nothing that starts a
	// job or sshd by itself.
	for dir, not := range map[string]string{
		"/etc/ssh":             `ssh_host_`,
		"/etc/apt/apt.conf.d":  `99mmdebstrap`,
		"/etc/dpkg/dpkg.cfg.d": `99mmdebstrap`,
		"/var/lib/apt/lists":   `deb\.debian`,
		"/boot":                `vmlinuz|initrd`,
		"/run":                 `agentlab`,
		"/tmp":                 `setup`,
		"/etc/systemd/system/multi-user.target.wants": `ssh|agent`,
	} {
		if got := debugfs(t, img, "ls -l "+dir); regexp.MustCompile(not).MatchString(got) {
			t.Errorf("%s holds %s:\n%s", dir, not, got)
		}
	}
}

func TestAgentsImage(t *testing.T) {
	img := builtImage(t, "agents")
	for command, version := range map[string]string{"claude": "2.1.197", "codex": "0.169.0", "opencode": "1.18.33", "gemini": "0.61.0", "node": "v24.21.0"} {
		if got := img.Versions[command]; !strings.Contains(got, version) {
			t.Errorf("%s tells version %q, want %s", command, got, version)
		}
	}
	for _, path := range []string{"/root/.npmrc", "/home/agent/.npmrc", "/usr/local/etc/npmrc", "/root/.npm", "/home/agent/.claude.json"} {
		if out := debugfs(t, img, "stat "+path); strings.Contains(out, "Inode:") {
			t.Errorf("%s is in the image", path)
		}
	}
	if out := debugfs(t, img, "stat /usr/local/bin/node"); !strings.Contains(out, "Type: regular") {
		t.Errorf("node is a link, which misleads npm about its prefix:\n%s", out)
	}
}

// Faults of the world, met by the real tools.
func TestBuildFails(t *testing.T) {
	realBuilds(t, "agents")
	type failure struct {
		name, recipe, say string
		code              agentlab.Code
	}
	names := sample.Of(t, 1, []failure{ // apt looks for names after it has installed half of a system
		{"unknown package", "suite: bookworm\npackages: [no-such-package]\n", "no-such-package", agentlab.CodeInvalid},
		{"unknown kernel", "suite: bookworm\nkernel: linux-image-none\n", "linux-image-none", agentlab.CodeInvalid},
	})
	for _, tc := range append(names, []failure{
		{"mirror does not answer", "suite: bookworm\nmirror: http://127.0.0.1:9/debian\n", "127.0.0.1", agentlab.CodeUnavailable},
		{"agent's version", "suite: bookworm\nagents: {packages: [{package: opencode-ai, version: 0.0.0-none}]}\n", "opencode-ai", agentlab.CodeInvalid},
	}...) {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := NewStore(t.TempDir(), Options{})
			again := false
			_, err := s.Build(t.Context(), BuildRequest{Name: "broken", Recipe: tc.recipe}, func(s string) {
				t.Log(s)
				again = again || strings.Contains(s, "trying again")
			})
			if again != (tc.code == agentlab.CodeUnavailable) {
				t.Errorf("tried again: %v", again)
			}
			if agentlab.CodeOf(err) != tc.code || !strings.Contains(err.Error(), tc.say) || agentlab.HintOf(err) == "" {
				log, _ := os.ReadFile(s.logPath("broken"))
				t.Errorf("%v (%s), hint %q\n%s", err, agentlab.CodeOf(err), agentlab.HintOf(err), log)
			}
			if left := buildDirs(t, s); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

func TestBuildIsCancelled(t *testing.T) {
	realBuilds(t, "base")
	s := NewStore(t.TempDir(), Options{})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	_, err := s.Ensure(ctx, "base", func(line string) {
		if strings.Contains(line, "extracting") {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v", err)
	}
	if left := buildDirs(t, s); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(mounts), s.root) {
		t.Errorf("mounts are left: %v", err)
	}
	if _, err := s.Resolve(t.Context(), "base"); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Errorf("there is an image: %v", err)
	}
}

func TestPreflight(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	r := mustShipped(t, "base")
	err := r.preflight(t.Context(), t.TempDir())
	// mke2fs may be found in sbin, which PATH often lacks.
	if agentlab.CodeOf(err) != agentlab.CodeUnavailable || !strings.Contains(err.Error(), "mmdebstrap") || !strings.Contains(agentlab.HintOf(err), "apt-get install mmdebstrap") {
		t.Errorf("without tools: %v, hint %q", err, agentlab.HintOf(err))
	}
	s := NewStore(t.TempDir(), Options{})
	ready, err := s.Readiness(t.Context(), "base")
	if err != nil || ready.Built || len(ready.Obstacles) == 0 {
		t.Fatalf("without tools: %+v, %v", ready, err)
	}
	if err := ready.Err(); agentlab.CodeOf(err) != agentlab.CodeUnavailable || !strings.Contains(err.Error(), "mmdebstrap") || !strings.Contains(agentlab.HintOf(err), "apt-get install mmdebstrap") {
		t.Errorf("without tools: %v, hint %q", err, agentlab.HintOf(err))
	}
	if ready.Built = true; ready.Err() != nil {
		t.Error("an image that is there needs no tools")
	}
	if _, err := s.Readiness(t.Context(), "mine"); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Errorf("an image that was not built: %v", err)
	}
	if err := r.checkSpace(filepath.Join(t.TempDir(), "gone")); agentlab.CodeOf(err) != agentlab.CodeInternal {
		t.Errorf("no directory: %v", err)
	}
}

// A file system with no room is noticed before the work begins.
func TestNoSpace(t *testing.T) {
	if err := checkNamespaces(t.Context()); err != nil {
		t.Skipf("no namespaces here: %v", err)
	}
	if dir := os.Getenv("AGENTLAB_TEST_SMALL"); dir != "" {
		err := mustShipped(t, "base").checkSpace(dir)
		if agentlab.CodeOf(err) != agentlab.CodeNoSpace || !strings.Contains(agentlab.HintOf(err), "image rm") {
			t.Errorf("64 MB are enough: %v", err)
		}
		return
	}
	dir := t.TempDir()
	argv := isolated("sh", "-c", `mount -t tmpfs -o size=64m none "$AGENTLAB_TEST_SMALL" && exec "$0" -test.run '^TestNoSpace$'`, os.Args[0])
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), "AGENTLAB_TEST_SMALL="+dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
