// Package archtest has the rules for the source code of this module, as data
// and as tests: which package may import which, and how long a file may be.
// golangci-lint checks the same import rules in editors; its part of
// .golangci.yml is generated from Layers ('go test ./internal/archtest
// -update').
package archtest

import (
	"fmt"
	"os"
	"slices"
	"strings"
)

// Module is the path of this module.
const Module = "github.com/agentlab-vm/agentlab"

// Maximum lengths of a source file that is not generated, in lines.
const (
	MaxFileLines = 500
	MaxTestLines = 700
	MaxMainLines = 60 // of the files below cmd

	// MaxDaemonLines is the budget of package daemon without its tests: it only
	// connects the other packages.
	MaxDaemonLines = 1250
)

// Layer lists the packages of this module that the packages of one part of the
// module may import. Tests (_test.go) may import more.
type Layer struct {
	Name string
	// Packages are paths below the module, "." for the root; a final /...
	// means all below it too.
	Packages []string
	// May lists the packages that they may import in addition to
	// themselves, in the same notation.
	May []string
	// Why is the reason for the rule, for the error message.
	Why string
}

// leaves are small packages that import only the domain package of this
// module.
var leaves = []string{
	"internal/bounded", "internal/cloudinit", "internal/connlimit", "internal/durable", "internal/egresslog", "internal/fsfault", "internal/hostspace", "internal/link",
	"internal/lock", "internal/reconcile", "internal/redact", "internal/sockpath", "internal/stream",
	"internal/strictyaml", "internal/version",
}

// doubles are the packages below internal that only tests link.
var doubles = []string{
	"internal/backend/backendtest", "internal/backend/fake", "internal/egress/probe/probetest", "internal/guestserver/guesttest", "internal/stream/streamtest",
}

func and(lists ...[]string) []string {
	var out []string
	for _, l := range lists {
		out = append(out, l...)
	}
	return out
}

// drivers returns the folders of the backends, as tests of this package find
// them.
func drivers() []string {
	entries, err := os.ReadDir("../backend")
	if err != nil {
		panic(err)
	}
	var out []string
	for _, e := range entries {
		if e.IsDir() && e.Name() != "backendtest" && e.Name() != "registry" {
			out = append(out, e.Name())
		}
	}
	return out
}

func driverLayers() []Layer {
	var out []Layer
	for _, d := range drivers() {
		out = append(out, Layer{
			Name: "driver " + d, Packages: []string{"internal/backend/" + d + "/..."},
			May: and([]string{
				".", "guestapi", "internal/backend", "internal/backend/registry", "internal/config", "internal/control", "internal/egress",
				"internal/egress/gate", "internal/egress/vnet", "internal/egress/nft", "internal/hostnet", "internal/supervisor",
			}, leaves),
			Why: "drivers never know each other, nor a service, the store or the server",
		})
	}
	return out
}

// Layers lists all layers of the module. Each package is in at most one layer.
var Layers = append(driverLayers(), []Layer{
	{
		Name: "domain", Packages: []string{"."},
		Why: "the domain package imports the standard library only, so that everything may import it",
	},
	{
		Name: "wire", Packages: []string{"api", "guestapi"},
		Why: "wire types stand alone: a client or a guest takes them without the rest of the house",
	},
	{
		Name: "embedded", Packages: []string{"images", "presets", "profiles", "scripts", "skills"},
		Why: "these folders hold files; code that reads them lives in internal",
	},
	{
		Name: "leaves", Packages: leaves, May: and([]string{"."}, leaves),
		Why: "a leaf package knows nothing of the house but its domain, so that everything may import it",
	},
	{
		Name: "client", Packages: []string{"client"}, May: and([]string{".", "api", "guestapi"}, leaves),
		Why: "the client speaks the control API, and is all that other programs need to take",
	},
	{
		Name:     "faces",
		Packages: []string{"internal/cli/...", "internal/tui/...", "internal/mcp/...", "internal/web/..."},
		May:      and([]string{".", "api", "guestapi", "client", "internal/config", "internal/hostsetup"}, leaves),
		Why:      "a face sees client and api only, so that none can bypass the daemon",
	},
	{
		Name: "host set-up", Packages: []string{"internal/hostsetup"}, May: and([]string{".", "profiles", "scripts", "skills"}, leaves),
		Why: "a host is set up before there is a daemon, by the scripts that the program carries",
	},
	{
		Name: "guest", Packages: []string{"internal/guest/..."}, May: and([]string{".", "guestapi"}, leaves),
		Why: "what runs in the guest sees guestapi only: nothing of the controller is its business",
	},
	{
		Name: "configuration", Packages: []string{"internal/config", "internal/store", "internal/secret", "internal/auth"},
		May: and([]string{"."}, leaves),
		Why: "files and tables know the domain, not who uses them",
	},
	{
		Name: "profile", Packages: []string{"internal/profile"}, May: and([]string{".", "profiles", "internal/backend", "internal/egress"}, leaves),
		Why: "a profile is checked against what a backend can do, and knows nothing else",
	},
	{
		Name: "image", Packages: []string{"internal/image"}, May: and([]string{".", "images"}, leaves),
		Why: "images are built from recipes alone; who boots them is not their business",
	},
	{
		Name: "egress", Packages: []string{"internal/egress/..."}, May: and([]string{".", "guestapi", "presets"}, leaves),
		Why: "the policy is pure and its enforcers know nothing but it",
	},
	{
		Name: "host network", Packages: []string{"internal/hostnet"},
		May: and([]string{".", "internal/config", "internal/egress", "internal/egress/gate", "internal/egress/nft"}, leaves),
		Why: "any driver may put its guests on the network of this host, which knows no driver or service",
	},
	{
		Name: "contract", Packages: []string{"internal/backend"}, May: and([]string{".", "guestapi"}, leaves),
		Why: "the driver contract knows no driver",
	},
	{
		Name: "supervisor", Packages: []string{"internal/supervisor"},
		May: and([]string{".", "internal/backend", "internal/control", "internal/egress", "internal/egress/gate", "internal/egress/vnet"}, leaves),
		Why: "the supervisor runs the VM of any driver and knows no driver",
	},
	{
		Name: "registry", Packages: []string{"internal/backend/registry"},
		May: and([]string{".", "internal/backend", "internal/config", "internal/hostnet", "internal/image", "internal/supervisor"}, leaves),
		Why: "the registry describes a backend and what its driver is opened with; it knows no driver",
	},
	{
		Name: "backends", Packages: []string{"internal/backends"}, May: []string{"internal/backend/..."},
		Why: "the list of backends is the only place that names all drivers",
	},
	{
		Name: "conformance", Packages: []string{"internal/backend/backendtest"},
		May: and([]string{".", "guestapi", "internal/backend", "internal/control", "internal/egress"}, leaves),
		Why: "the conformance suite sees a driver through its contract only",
	},
	{
		Name: "guest words", Packages: []string{"internal/guestcheck"}, May: and([]string{".", "guestapi"}, leaves),
		Why: "what guests say is judged in one place, which knows nobody who listens",
	},
	{
		Name: "control", Packages: []string{"internal/control"}, May: and([]string{".", "guestapi", "internal/guestcheck"}, leaves),
		Why: "the client of a guest works over any stream that a driver gives",
	},
	{
		Name:     "services",
		Packages: serviceNames,
		May: and([]string{".", "guestapi", "internal/backend", "internal/control", "internal/egress", "internal/guestcheck",
			"internal/egress/probe", "internal/profile", "internal/secret"}, serviceNames, leaves),
		Why: "a service declares the small interfaces that it needs: it imports no driver, no store and no server",
	},
	{
		Name: "guestserver", Packages: []string{"internal/guestserver/..."},
		May: and([]string{".", "guestapi", "internal/artifact", "internal/guestcheck"}, leaves),
		Why: "the guest plane shares nothing with the control plane, and reaches services through its own interfaces",
	},
	{
		Name: "server", Packages: []string{"internal/server/..."},
		May: and([]string{".", "api", "guestapi", "internal/auth", "internal/backend", "internal/egress", "internal/hostnet", "internal/image", "internal/profile", "internal/secret"}, serviceNames, leaves),
		Why: "the server authenticates, decodes, calls one service and encodes; it knows no store and no driver",
	},
	{
		Name: "upkeep", Packages: []string{"internal/doctor", "internal/hostclock"},
		May: and([]string{".", "api", "internal/backend", "internal/image", "internal/store"}, leaves),
		Why: "what looks after the host and the database of a daemon knows no server and no other service",
	},
	{
		Name: "recovery", Packages: []string{"internal/recovery"},
		May: and([]string{
			".", "api", "internal/artifact", "internal/backend", "internal/backend/registry", "internal/config", "internal/hostnet", "internal/image",
			"internal/sandbox", "internal/store",
		}, leaves),
		Why: "a database is repaired without a daemon and its server; only the files of jobs and the backend are asked",
	},
	{
		Name: "daemon", Packages: []string{"internal/daemon/..."},
		May: and([]string{
			".", "api", "guestapi", "internal/artifact", "internal/auth", "internal/backend", "internal/backend/registry", "internal/backends", "internal/config",
			"internal/control", "internal/egress/...", "internal/doctor", "internal/guestserver", "internal/hostclock", "internal/hostnet", "internal/image", "internal/profile",
			"internal/recovery", "internal/secret", "internal/server", "internal/store", "internal/supervisor",
		}, serviceNames, leaves),
		Why: "the daemon wires the house together; faces and guests are other programs",
	},
	{
		Name: "programs", Packages: []string{"cmd/..."},
		May: []string{".", "internal/cli", "internal/daemon", "internal/guest/...", "internal/version"},
		Why: "a main calls one package; what it does belongs there",
	},
	{
		Name: "pipes of tests", Packages: []string{"internal/stream/streamtest"},
		Why: "slow and broken connections know nothing of the programs that they test",
	},
	{
		Name: "checks", Packages: []string{"internal/archtest"},
		Why: "the rules stand outside of what they rule",
	},
	{
		Name: "test support", Packages: []string{"test/..."}, May: []string{"..."},
		Why: "tests may see everything",
	},
}...)

// serviceNames are the service packages.
var serviceNames = []string{
	"internal/artifact", "internal/audit", "internal/bootstrap", "internal/gc", "internal/job",
	"internal/message", "internal/sandbox", "internal/session", "internal/verify", "internal/workspace",
}

// matches reports whether the package pkg, relative to the module, matches a
// pattern of a Layer.
func matches(pattern, pkg string) bool {
	if pattern == "..." {
		return true
	}
	if base, ok := strings.CutSuffix(pattern, "/..."); ok {
		return pkg == base || strings.HasPrefix(pkg, base+"/")
	}
	return pattern == pkg
}

// LayerOf returns the layer of a package, given relative to the module.
func LayerOf(pkg string) (Layer, bool) {
	for _, l := range Layers {
		for _, p := range l.Packages {
			if matches(p, pkg) {
				return l, true
			}
		}
	}
	return Layer{}, false
}

// Check returns why a package of this module must not import another one, ""
// if it may. Both are relative to the module.
func Check(pkg, imported string) string {
	if slices.Contains(doubles, imported) && !slices.Contains(doubles, pkg) && !strings.HasPrefix(pkg, "test/") {
		return fmt.Sprintf("%s imports %s: only tests link a test double", pkg, imported)
	}
	l, ok := LayerOf(pkg)
	if !ok {
		return fmt.Sprintf("%s is in no layer: give it one in internal/archtest and a place in docs/architecture.md", pkg)
	}
	for _, m := range l.May {
		if matches(m, imported) {
			return ""
		}
	}
	if own := part(l, pkg); own != "" && own == part(l, imported) {
		return ""
	}
	return fmt.Sprintf("%s imports %s: %s", pkg, imported, l.Why)
}

// part returns the pattern of a layer (internal/guest/...) that a package
// belongs to, "" if there is none. Packages of one part may import each other.
func part(l Layer, pkg string) string {
	for _, p := range l.Packages {
		if base, whole := strings.CutSuffix(p, "/..."); whole && matches(p, pkg) {
			return base
		}
	}
	return ""
}
