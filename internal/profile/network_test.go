package profile

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

var rulesInfo = backend.Info{Name: "able", Capabilities: backend.Capabilities{NetworkOff: true, Allowlist: true}}

func TestListsAreInserted(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "lists"), 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, dir, "lists/network-allowlist.txt", "# ours\nA.example\n*.b.example:8443 # a mirror\n")
	write(t, dir, "mine.yaml", `name: mine
network:
  mode: allowlist
  allow: [preset:pypi, "file:lists/network-allowlist.txt", c.example]
  deny: [bad.b.example]
  ports: [443, 8000-8010, 443/udp, icmp]
  limits: {bandwidth_mbps: 10, flows: 20, dns_per_second: 30}
`)
	p, err := NewLibrary(dir, rulesInfo).Use("mine")
	if err != nil {
		t.Fatal(err)
	}
	list := "file:lists/network-allowlist.txt"
	want := agentlab.Network{
		Mode: "allowlist",
		Allow: []agentlab.NetworkRule{
			{Rule: "pypi.org", Source: "preset:pypi"}, {Rule: "files.pythonhosted.org", Source: "preset:pypi"},
			{Rule: "a.example", Source: list}, {Rule: "*.b.example:8443", Source: list}, {Rule: "c.example"},
		},
		Deny:   []agentlab.NetworkRule{{Rule: "bad.b.example"}},
		Ports:  []string{"443", "8000-8010", "443/udp", "icmp"},
		Limits: agentlab.NetworkLimits{BandwidthMbps: 10, Flows: 20, DNSPerSecond: 30},
	}
	if !reflect.DeepEqual(p.Network, want) {
		t.Errorf("got  %+v\nwant %+v", p.Network, want)
	}
}

func TestListsStayInTheirDirectory(t *testing.T) {
	outside := t.TempDir()
	write(t, outside, "secret.txt", "root:x\n")
	dir := t.TempDir()
	write(t, dir, "bad.txt", "good.example\nroot:x:0:0:\n")
	for link, target := range map[string]string{"link.txt": filepath.Join(outside, "secret.txt"), "up": outside} {
		if err := os.Symlink(target, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	l := NewLibrary(dir, rulesInfo)
	for file, want := range map[string]string{
		"/etc/passwd": "path of a list file", "../secret.txt": "path of a list file", "a/../bad.txt": "path of a list file",
		"link.txt": "link.txt", "up/secret.txt": "secret.txt", "none.txt": "none.txt", ".": "path of a list file", "up": "up",
		"bad.txt": "list file bad.txt, line 2: ",
	} {
		e := l.Check("name: x\nnetwork: {mode: allowlist, allow: ['file:" + file + "']}")
		if agentlab.CodeOf(e.Err) != agentlab.CodeInvalid || fieldOf(e.Err) != "network.allow" || !strings.Contains(e.Err.Error(), want) {
			t.Errorf("file:%s: %v", file, e.Err)
		}
		if strings.HasSuffix(file, "secret.txt") && strings.Contains(e.Err.Error(), "root:x") {
			t.Errorf("file:%s was read: %v", file, e.Err)
		}
	}
}
