package image

import (
	"maps"
	"slices"
	"strings"
)

// distribution has the data for building a family of suites.
type distribution struct {
	name       string
	components []string
	mirrors    map[string]string // public mirror by architecture
	security   string            // public mirror of the security suite; "" if mirrors have it
	keyring    string            // archive keyring of the host, and
	keyringPkg string            // its package
	key        string            // in images.Keys, for hosts without that package; "" if all hosts can install it
	kernels    map[string]string // kernel metapackage by architecture: small, for virtual machines
}

var debian = &distribution{
	name:       "debian",
	components: []string{"main"},
	mirrors:    map[string]string{"amd64": "http://deb.debian.org/debian", "arm64": "http://deb.debian.org/debian"},
	security:   "http://deb.debian.org/debian-security",
	keyring:    "/usr/share/keyrings/debian-archive-keyring.gpg",
	keyringPkg: "debian-archive-keyring",
	kernels:    map[string]string{"amd64": "linux-image-cloud-amd64", "arm64": "linux-image-cloud-arm64"},
}

var ubuntu = &distribution{
	name:       "ubuntu",
	components: []string{"main", "universe"},
	mirrors:    map[string]string{"amd64": "http://archive.ubuntu.com/ubuntu", "arm64": "http://ports.ubuntu.com/ubuntu-ports"},
	keyring:    "/usr/share/keyrings/ubuntu-archive-keyring.gpg",
	keyringPkg: "ubuntu-keyring",
	key:        "keys/ubuntu.gpg", // Debian 12 has no such package
	kernels:    map[string]string{"amd64": "linux-image-virtual", "arm64": "linux-image-virtual"},
}

// suites are the releases that images can be built from.
var suites = map[string]*distribution{
	"bookworm": debian,
	"trixie":   debian,
	"noble":    ubuntu,
}

func suiteNames() string {
	return strings.Join(slices.Sorted(maps.Keys(suites)), ", ")
}

// pockets returns the suites of a release: itself, its updates, its security
// fixes.
func pockets(suite string) []string {
	return []string{suite, suite + "-updates", suite + "-security"}
}

// essential lists packages that are in every image: init, sshd and the tools
// that agent-runner and this package call in it.
var essential = []string{"ca-certificates", "e2fsprogs", "git", "iproute2", "kmod", "openssh-server", "sudo", "systemd", "systemd-sysv"}
