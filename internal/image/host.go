package image

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/hostspace"
)

// Approximate peak disk usage of a build: the tree and its image.
const (
	spaceBase  = 2 << 30
	spaceAgent = 2 << 30 // for each npm package, an upper estimate
	spaceMax   = 10 << 30
)

// isolated returns the command that runs argv in separate mount and process
// namespaces, as root: as the real root if the user is root, otherwise as root
// of a user namespace with the user's subordinate IDs. All child processes,
// and all mounts, end with it.
func isolated(argv ...string) []string {
	cmd := []string{"unshare"}
	if os.Geteuid() != 0 {
		cmd = append(cmd, "--user", "--map-root-user", "--map-auto")
	}
	cmd = append(cmd, "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child=SIGKILL", "--")
	return append(cmd, argv...)
}

// tool is a program that building needs.
type tool struct{ name, pkg string }

func (r *Recipe) tools() []tool {
	t := []tool{
		{"mmdebstrap", "mmdebstrap"}, {"mke2fs", "e2fsprogs"}, {"unshare", "util-linux"},
		{"setpriv", "util-linux"}, {"pivot_root", "util-linux"},
		{"dpkg-deb", "dpkg"}, {"apt-get", "apt"},
	}
	if os.Geteuid() != 0 {
		t = append(t, tool{"newuidmap", "uidmap"})
	}
	if r.usesNPM() && !r.bringsNPM() {
		t = append(t, tool{"npm", "npm"})
	}
	return t
}

// preflight returns the first reason why the build would fail on this machine.
func (r *Recipe) preflight(ctx context.Context, dir string) error {
	for _, err := range r.obstacles(ctx, dir) {
		return err
	}
	return nil
}

// obstacles returns all reasons why the build would fail on this machine.
func (r *Recipe) obstacles(ctx context.Context, dir string) (all []error) {
	tools := r.checkTools()
	for _, err := range []error{tools, r.checkKeyring(), r.checkSpace(dir)} {
		if err != nil {
			all = append(all, err)
		}
	}
	if tools == nil { // the check needs some of them
		if err := checkNamespaces(ctx); err != nil {
			all = append(all, err)
		}
	}
	return all
}

func (r *Recipe) checkTools() error {
	var missing, pkgs []string
	for _, t := range r.tools() {
		if lookPath(t.name) == "" {
			missing, pkgs = append(missing, t.name), append(pkgs, t.pkg)
		}
	}
	if len(missing) > 0 {
		return agentlab.Errorf(agentlab.CodeUnavailable, "programs that a build needs are not installed: %s", strings.Join(missing, ", ")).
			WithHint("on Debian or Ubuntu: sudo apt-get install %s", strings.Join(pkgs, " "))
	}
	return nil
}

// checkKeyring checks that the signatures of the recipe's distribution can be
// verified.
func (r *Recipe) checkKeyring() error {
	d := r.distribution()
	if d.key != "" {
		return nil
	}
	if _, err := os.Stat(d.keyring); err != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "the keys that sign %s are not installed (%s)", r.Suite, d.keyring).
			WithHint("on Debian or Ubuntu: sudo apt-get install %s", d.keyringPkg)
	}
	return nil
}

// checkNamespaces creates the namespaces of isolated. The hint of its error is
// how to allow them on this machine.
func checkNamespaces(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	argv := isolated("sh", "-c", "mount -t tmpfs none /mnt && chown 65533:65533 /mnt")
	out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	e := agentlab.Errorf(agentlab.CodeDenied, "this machine does not allow the namespaces that a build needs (%s)", firstLine(out))
	if os.Geteuid() == 0 {
		return e.WithHint("root without the right to mount is probably a container: run it with CAP_SYS_ADMIN, or build on the host")
	}
	return e.WithHint("%s", namespaceRemedy())
}

func namespaceRemedy() string {
	if u, err := user.Current(); err == nil && !hasSubIDs("/etc/subuid", u) {
		return fmt.Sprintf("give the user subordinate ids: sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 %s", u.Username)
	}
	if readTrimmed("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1" {
		return "allow user namespaces: sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0, or build as root"
	}
	if readTrimmed("/proc/sys/kernel/unprivileged_userns_clone") == "0" {
		return "allow user namespaces: sudo sysctl kernel.unprivileged_userns_clone=1, or build as root"
	}
	return "unshare from util-linux 2.38 or later, user namespaces and 65536 subordinate ids are needed, or build as root"
}

func hasSubIDs(file string, u *user.User) bool {
	data, _ := os.ReadFile(file)
	for line := range strings.Lines(string(data)) {
		if name, _, ok := strings.Cut(line, ":"); ok && (name == u.Username || name == u.Uid) {
			return true
		}
	}
	return false
}

func (r *Recipe) checkSpace(dir string) error {
	free, err := hostspace.FreeBytes(dir)
	if err != nil {
		return agentlab.Errorf(agentlab.CodeInternal, "the free space of %s cannot be determined: %w", dir, err)
	}
	need := int64(min(spaceBase+spaceAgent*len(r.npm()), spaceMax))
	if free < need {
		return agentlab.Errorf(agentlab.CodeNoSpace, "%s has %d MB free, and building %s takes up to %d MB", dir, free>>20, r.Name, need>>20).
			WithHint("free some space, or remove images with 'agentlab image rm'")
	}
	return nil
}

// lookPath finds a program in PATH or in the system's directories, which a
// user's PATH often lacks.
func lookPath(name string) string {
	if p, err := exec.LookPath(name); err == nil {
		return p
	}
	for _, dir := range []string{"/usr/sbin", "/sbin", "/usr/local/sbin"} {
		if p, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return p
		}
	}
	return ""
}

// buildEnv returns the environment of the distribution's tools: the variables
// that they need to use the network like the user, and nothing that a
// maintainer script could leak.
func buildEnv(tmp string) []string {
	env := []string{
		"PATH=" + os.Getenv("PATH") + ":/usr/sbin:/sbin", "HOME=" + tmp, "TMPDIR=" + tmp, "LC_ALL=C.UTF-8", "LANG=C.UTF-8",
		"DEBIAN_FRONTEND=noninteractive",
	}
	for _, name := range []string{"http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"} {
		for _, key := range []string{name, strings.ToUpper(name)} {
			if v, ok := os.LookupEnv(key); ok {
				env = append(env, key+"="+v)
			}
		}
	}
	return env
}

func firstLine(b []byte) string {
	s, _, _ := strings.Cut(strings.TrimSpace(string(b)), "\n")
	return s
}

// maxRead is how many bytes readTrimmed reads. What programs of packages print
// is at most 64 KiB, see finish.sh.
const maxRead = 4 << 20

// readTrimmed returns the text of a file, "" if it cannot be read.
func readTrimmed(file string) string {
	f, err := os.Open(file)
	if err != nil {
		return ""
	}
	defer func() { _ = f.Close() }()
	b, _ := io.ReadAll(io.LimitReader(f, maxRead))
	return strings.TrimSpace(string(b))
}
