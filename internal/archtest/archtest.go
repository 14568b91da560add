// Package archtest has the rules for the source code of this module, as data
// and as tests: which package may import which, and how long a file may be.
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

	// MaxCommandFiles is the budget of each package of the command line, in files without
	// tests, and MaxAppMethods of cli.App, which each command gets.
	MaxCommandFiles = 20
	MaxAppMethods   = 60
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
	"internal/bounded", "internal/cloudinit", "internal/connlimit", "internal/durable", "internal/egresslog", "internal/fsfault", "internal/hostos", "internal/hostspace", "internal/hostvirt", "internal/lazyre", "internal/lfs", "internal/link",
	"internal/lock", "internal/projectfile", "internal/reconcile", "internal/redact", "internal/returncheck", "internal/sockpath", "internal/sshkey", "internal/stream",
	"internal/strictyaml", "internal/termfilter", "internal/version",
}

// doubles are the packages below internal that only tests link.
var doubles = []string{
	"internal/backend/backendtest", "internal/backend/fake", "internal/egress/probe/probetest", "internal/guestplane/guesttest", "internal/sandbox/sandboxtest", "internal/store/storetest", "internal/stream/streamtest", "internal/work/worktest",
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
				"internal/egress/gate", "internal/egress/vnet", "internal/egress/nft", "internal/hostnet", "internal/qemuvm", "internal/supervisor", "internal/vmdir",
			}, leaves),
			Why: "a driver imports no other driver, no service, and not the store or the server",
		})
	}
	return out
}

// Layers lists all layers of the module. A package is in the first layer that lists it.
var Layers = append(driverLayers(), []Layer{
	{
		Name: "domain", Packages: []string{"."},
		Why: "the domain package imports only the standard library, so that every package may import it",
	},
	{
		Name: "wire", Packages: []string{"api", "guestapi"},
		Why: "wire types import no other package: clients and guests link them without the rest of the project",
	},
	{
		Name: "embedded", Packages: []string{"images", "presets", "profiles", "scripts", "skills"},
		Why: "these directories contain files; the code that reads them is in internal",
	},
	{
		Name: "leaves", Packages: leaves, May: and([]string{"."}, leaves),
		Why: "a small package imports only the domain types, so that every package may import it",
	},
	{
		Name: "client", Packages: []string{"client"}, May: and([]string{".", "api", "guestapi"}, leaves),
		Why: "the client implements the control API and is the only package that other programs need",
	},
	{
		Name: "work doubles", Packages: []string{"internal/work/worktest"}, May: and([]string{".", "api", "guestapi", "client", "internal/guest/filescmd", "internal/work/..."}, leaves),
		Why: "tests of workflows run the real program of the guest",
	},
	{
		Name: "work", Packages: []string{"internal/work/..."}, May: and([]string{".", "api", "guestapi", "client", "internal/config"}, leaves),
		Why: "workflows on the machine of the user call the daemon through the client, and the user through work.UI, so that every user interface can have them",
	},
	{
		Name:     "faces",
		Packages: []string{"internal/cli/...", "internal/tui/...", "internal/mcp/...", "internal/web/..."},
		May:      and([]string{".", "api", "guestapi", "client", "internal/config", "internal/hostsetup", "internal/mcp", "internal/work/..."}, leaves),
		Why:      "a user interface imports only client, api and the workflows, so that it cannot bypass the daemon",
	},
	{
		Name: "host set-up", Packages: []string{"internal/hostsetup"}, May: and([]string{".", "profiles", "scripts", "skills"}, leaves),
		Why: "a host is set up before a daemon runs, by scripts that are embedded in the program",
	},
	{
		Name: "guest", Packages: []string{"internal/guest/..."}, May: and([]string{".", "guestapi"}, leaves),
		Why: "code that runs in the guest imports only guestapi and nothing of the controller",
	},
	{
		Name: "configuration", Packages: []string{"internal/config", "internal/store", "internal/secret", "internal/auth"},
		May: and([]string{"."}, leaves),
		Why: "files and tables import the domain types, not the packages that use them",
	},
	{
		Name: "profile", Packages: []string{"internal/profile"}, May: and([]string{".", "profiles", "internal/backend", "internal/egress"}, leaves),
		Why: "a profile is checked against the capabilities of a backend and imports no other service",
	},
	{
		Name: "image", Packages: []string{"internal/image"}, May: and([]string{".", "images"}, leaves),
		Why: "images are built only from recipes and do not depend on the backend that boots them",
	},
	{
		Name: "egress", Packages: []string{"internal/egress/..."}, May: and([]string{".", "guestapi", "presets"}, leaves),
		Why: "the policy consists of pure functions; its enforcers depend on nothing else",
	},
	{
		Name: "host network", Packages: []string{"internal/hostnet"},
		May: and([]string{".", "internal/config", "internal/egress", "internal/egress/gate", "internal/egress/nft"}, leaves),
		Why: "any driver may connect its guests to the network of this host, which imports no driver or service",
	},
	{
		Name: "fleet", Packages: []string{"internal/fleet"}, May: and([]string{".", "internal/backend"}, leaves),
		Why: "the backends of a daemon depend on the contract, not on drivers or services",
	},
	{
		Name: "contract", Packages: []string{"internal/backend"}, May: and([]string{".", "guestapi"}, leaves),
		Why: "the driver contract imports no driver",
	},
	{
		Name: "supervisor", Packages: []string{"internal/supervisor"},
		May: and([]string{".", "internal/backend", "internal/control", "internal/egress", "internal/egress/gate", "internal/egress/vnet"}, leaves),
		Why: "the supervisor runs the VM of any driver and imports none",
	},
	{
		Name: "for drivers", Packages: []string{"internal/qemuvm", "internal/vmdir"},
		May: and([]string{".", "internal/backend", "internal/egress", "internal/egress/vnet", "internal/supervisor"}, leaves),
		Why: "what drivers share imports none of them",
	},
	{
		Name: "registry", Packages: []string{"internal/backend/registry"},
		May: and([]string{".", "internal/backend", "internal/config", "internal/egress/gate", "internal/fleet", "internal/hostnet", "internal/image", "internal/supervisor", "internal/vmdir"}, leaves),
		Why: "the registry describes a backend and the parameters of its driver; it imports no driver",
	},
	{
		Name: "backends", Packages: []string{"internal/backends"}, May: []string{"internal/backend/..."},
		Why: "only the list of backends names all drivers",
	},
	{
		Name: "conformance", Packages: []string{"internal/backend/backendtest"},
		May: and([]string{".", "guestapi", "internal/backend", "internal/control", "internal/egress", "test/guard"}, leaves),
		Why: "the conformance suite uses a driver only through its contract",
	},
	{
		Name: "metrics", Packages: []string{"internal/metrics"}, May: and([]string{".", "internal/store"}, leaves),
		Why: "metrics are made of commits and of what is read at a scrape; no service knows them, and they import none",
	},
	{
		Name: "guest words", Packages: []string{"internal/guestcheck"}, May: and([]string{".", "guestapi"}, leaves),
		Why: "one package validates all data from guests, and does not depend on the packages that use the data",
	},
	{
		Name: "control", Packages: []string{"internal/control"}, May: and([]string{".", "guestapi", "internal/guestcheck"}, leaves),
		Why: "the client of a guest works with any stream that a driver returns",
	},
	{
		Name:     "services",
		Packages: serviceNames,
		May: and([]string{".", "guestapi", "internal/backend", "internal/control", "internal/egress", "internal/fleet", "internal/guestcheck",
			"internal/egress/probe", "internal/profile", "internal/secret"}, serviceNames, leaves),
		Why: "a service declares the small interfaces that it needs: it imports no driver, no store and no server",
	},
	{
		Name: "outside", Packages: []string{"internal/guestplane/outside"},
		May: and([]string{".", "internal/egress", "internal/egress/gate"}, leaves),
		Why: "only this package decides by policies and connects on behalf of guests, for any service",
	},
	{
		Name: "registry cache", Packages: []string{"internal/guestplane/regcache"},
		May: and([]string{".", "guestapi", "internal/backend", "internal/config", "internal/egress", "internal/guestplane", "internal/guestplane/outside"}, leaves),
		Why: "the registry cache connects through outside and knows no service, driver or store",
	},
	{
		Name: "guestplane", Packages: []string{"internal/guestplane/..."},
		May: and([]string{".", "guestapi", "internal/artifact", "internal/guestcheck"}, leaves),
		Why: "the guest plane shares no code with the control plane, and its services call others through their own interfaces",
	},
	{
		Name: "server", Packages: []string{"internal/server/..."},
		May: and([]string{".", "api", "guestapi", "internal/auth", "internal/backend", "internal/egress", "internal/fleet", "internal/hostnet", "internal/image", "internal/guestplane/regcache", "internal/profile", "internal/secret"}, serviceNames, leaves),
		Why: "the server authenticates, decodes, calls one service and encodes; it imports neither the store nor a driver",
	},
	{
		Name: "upkeep", Packages: []string{"internal/doctor", "internal/hostclock"},
		May: and([]string{".", "api", "internal/backend", "internal/fleet", "internal/image", "internal/store"}, leaves),
		Why: "services that check the host and the database import neither the server nor another service",
	},
	{
		Name: "recovery", Packages: []string{"internal/recovery"},
		May: and([]string{
			".", "api", "internal/artifact", "internal/backend", "internal/backend/registry", "internal/config", "internal/fleet", "internal/hostnet", "internal/image",
			"internal/sandbox", "internal/store",
		}, leaves),
		Why: "a database is repaired without a daemon and its server, from the files of jobs and the backend",
	},
	{
		Name: "daemon", Packages: []string{"internal/daemon/..."},
		May: and([]string{
			".", "api", "guestapi", "internal/artifact", "internal/auth", "internal/backend", "internal/backend/registry", "internal/backends", "internal/config", "internal/fleet",
			"internal/control", "internal/egress/...", "internal/doctor", "internal/guestplane/...", "internal/hostclock", "internal/hostnet", "internal/image", "internal/metrics", "internal/profile",
			"internal/recovery", "internal/secret", "internal/server", "internal/store", "internal/supervisor",
		}, serviceNames, leaves),
		Why: "the daemon connects all packages; user interfaces and guests are other programs",
	},
	{
		Name: "programs", Packages: []string{"cmd/..."},
		May: []string{".", "internal/cli/commands", "internal/daemon", "internal/guest/...", "internal/version"},
		Why: "a main calls one package, which contains the program",
	},
	{
		Name: "pipes of tests", Packages: []string{"internal/stream/streamtest"},
		Why: "the simulated connections import none of the programs that they test",
	},
	{
		Name: "databases of tests", Packages: []string{"internal/store/storetest"},
		May: []string{"internal/store"},
		Why: "an empty database for the tests of services",
	},
	{
		Name: "service of tests", Packages: []string{"internal/sandbox/sandboxtest"},
		May: and([]string{
			".", "guestapi", "internal/backend", "internal/backend/fake", "internal/control", "internal/fleet", "internal/store", "internal/store/storetest",
		}, serviceNames, leaves),
		Why: "the tests of the service of sandboxes and of its parts run all of them, on the fake backend",
	},
	{
		Name: "checks", Packages: []string{"internal/archtest"},
		Why: "the rules do not depend on the packages that they check",
	},
	{
		Name: "test support", Packages: []string{"test/..."}, May: []string{"..."},
		Why: "tests may import every package",
	},
}...)

// serviceNames are the service packages.
var serviceNames = []string{
	"internal/artifact", "internal/audit", "internal/bootstrap", "internal/devproxy", "internal/gc", "internal/job",
	"internal/message", "internal/sandbox", "internal/session", "internal/snapshot", "internal/verify", "internal/warmpool", "internal/workspace",
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
