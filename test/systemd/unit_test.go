// Package systemd holds the tests of the units in scripts/systemd that need no
// virtual machine.
package systemd

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const dir = "../../scripts/systemd"

// exposure is the score of agentlabd.service in tenths, which docs/hardening.md
// tells. A change that makes it worse fails here and must say why there.
const exposure = "40"

func analyze(t *testing.T, args ...string) (string, error) {
	t.Helper()
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Skip("systemd-analyze is not installed (apt install systemd)")
	}
	out, err := exec.Command("systemd-analyze", args...).CombinedOutput()
	return string(out), err
}

func TestExposure(t *testing.T) {
	unit := filepath.Join(dir, "agentlabd.service")
	out, err := analyze(t, "security", "--offline=true", "--no-pager", "--threshold="+exposure, unit)
	lines := strings.Split(strings.TrimSpace(out), "\n")
	t.Log(lines[len(lines)-1])
	if err != nil {
		t.Errorf("more than %s tenths, or it cannot be read: %v\n%s", exposure, err, out)
	}
	text, rerr := os.ReadFile("../../docs/hardening.md")
	if rerr != nil {
		t.Fatal(rerr)
	}
	if want := "**" + exposure[:1] + "." + exposure[1:] + " (OK)**"; !strings.Contains(string(text), want) {
		t.Errorf("docs/hardening.md does not tell %s", want)
	}
}

// What the analysis holds against the unit, docs/hardening.md answers.
func TestSkippedIsExplained(t *testing.T) {
	out, err := analyze(t, "security", "--offline=true", "--no-pager", "--json=short", filepath.Join(dir, "agentlabd.service"))
	if err != nil {
		t.Fatal(err, out)
	}
	var findings []struct {
		Set      *bool  `json:"set"`
		Name     string `json:"name"`
		Exposure string `json:"exposure"`
	}
	if err := json.Unmarshal([]byte(out), &findings); err != nil || len(findings) < 50 {
		t.Fatal(err, len(findings))
	}
	text, err := os.ReadFile("../../docs/hardening.md")
	if err != nil {
		t.Fatal(err)
	}
	setting := regexp.MustCompile(`^[A-Za-z]+`)
	for _, f := range findings {
		if f.Set != nil && *f.Set || f.Exposure == "" {
			continue
		}
		name := setting.FindString(f.Name)
		if name == "RootDirectory" { // a root of its own would be a second installation
			continue
		}
		if !strings.Contains(string(text), name) {
			t.Errorf("docs/hardening.md says nothing of %s (%s)", name, f.Name)
		}
	}
}

// Every setting is one that systemd knows, and is explained.
func TestUnitsAreWellFormed(t *testing.T) {
	out, _ := analyze(t, "verify", filepath.Join(dir, "agentlabd.service"))
	for line := range strings.Lines(out) {
		if strings.TrimSpace(line) != "" && !strings.Contains(line, "is not executable") && !strings.Contains(line, "agentlab-network.service") {
			t.Errorf("systemd-analyze verify: %s", line)
		}
	}
	unit, err := os.ReadFile(filepath.Join(dir, "agentlabd.service"))
	if err != nil {
		t.Fatal(err)
	}
	docs, err := os.ReadFile("../../docs/hardening.md")
	if err != nil {
		t.Fatal(err)
	}
	plain := []string{"Type", "ExecStart", "Restart", "RestartSec", "TimeoutStopSec", "StateDirectoryMode", "CacheDirectoryMode",
		"LogsDirectoryMode", "RuntimeDirectoryPreserve", "SystemCallErrorNumber"}
	_, service, _ := strings.Cut(string(unit), "[Service]")
	service, _, _ = strings.Cut(service, "[Install]")
next:
	for line := range strings.Lines(service) {
		name, _, ok := strings.Cut(line, "=")
		if !ok || strings.HasPrefix(line, "#") {
			continue
		}
		for _, p := range plain {
			if name == p {
				continue next
			}
		}
		if !strings.Contains(string(docs), name) {
			t.Errorf("docs/hardening.md says nothing of %s", name)
		}
	}
}
