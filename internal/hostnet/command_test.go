//go:build linux

package hostnet_test

import (
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backends"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/egress/nft"
	"github.com/agentlab-vm/agentlab/internal/hostnet"
)

var update = flag.Bool("update", false, "write the generated documents")

// TestRenderedRules: scripts/net/agent_nat.nft is what the default
// configuration renders to; run 'go test ./internal/hostnet -run
// TestRenderedRules -update' after a change.
func TestRenderedRules(t *testing.T) {
	const path = "../../scripts/net/agent_nat.nft"
	c, err := hostnet.Rules(config.Default(backends.All.Known()...))
	if err != nil {
		t.Fatal(err)
	}
	c.BridgeMeta = true // as every kernel of a distribution has it
	want, err := nft.Render(nft.State{Config: c})
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	have, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(have) != want {
		t.Error("scripts/net/agent_nat.nft is not what the code renders: go test ./internal/hostnet -run TestRenderedRules -update")
	}
}

func TestNetworkCommandUsage(t *testing.T) {
	for _, args := range [][]string{{}, {"nothing"}, {"render", "--dry-run"}, {"apply", "now"}, {"apply", "--system", "--home", "/x"}} {
		err := hostnet.Command(t.Context(), args, backends.All.Load, io.Discard, io.Discard)
		if usage, ok := errors.AsType[config.Usage](err); !ok || !strings.Contains(string(usage), "agentlabd network render") {
			t.Errorf("%v: %v", args, err)
		}
	}
}

// The kernel cannot send what it routes through a proxy, so the rules of a
// bridge are not made beside one.
func TestBridgeRefusesAnUpstreamProxy(t *testing.T) {
	home := t.TempDir()
	settings := func() (string, error) {
		var out strings.Builder
		err := hostnet.Command(t.Context(), []string{"settings", "--home", home}, backends.All.Load, &out, io.Discard)
		return out.String(), err
	}
	if text, err := settings(); err != nil || !strings.Contains(text, "\nsubnet=") {
		t.Fatalf("%s, %v", text, err)
	}
	if err := os.MkdirAll(filepath.Join(home, "config"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(home, "config", "config.yaml"), []byte("upstream_proxy: {url: \"http://proxy.corp:3128\"}"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := settings()
	if e, ok := errors.AsType[*agentlab.Error](err); !ok || e.Code != agentlab.CodeUnsupported || e.Field != "upstream_proxy.url" || e.Hint == "" {
		t.Errorf("%v", err)
	}
}
