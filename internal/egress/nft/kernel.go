package nft

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
)

// loadTimeout limits one transaction.
const loadTimeout = 30 * time.Second

// kernel runs the nft program. It is searched in the PATH of root, regardless
// of the caller's own PATH.
type kernel struct{ program string }

func findNFT() (kernel, error) {
	for _, p := range []string{"/usr/sbin/nft", "/sbin/nft", "/usr/bin/nft", "/usr/local/sbin/nft"} {
		if path, err := exec.LookPath(p); err == nil {
			return kernel{path}, nil
		}
	}
	return kernel{}, agentlab.Errorf(agentlab.CodeUnavailable, "the nft program is not installed").
		WithHint("apt-get install nftables")
}

// load loads text in one transaction.
func (k kernel) load(ctx context.Context, text string) error {
	_, err := k.run(ctx, text, "-f", "-")
	return err
}

// familyNames are the families of AgentLab's tables, as the kernel has them.
var familyNames = map[byte]string{unix.NFPROTO_INET: "inet", unix.NFPROTO_BRIDGE: "bridge", unix.NFPROTO_ARP: "arp"}

// tables returns the families of AgentLab's loaded tables. It does not use the
// nft program, which reads all elements of all sets for this: with many learned
// addresses that takes seconds.
func (k kernel) tables() ([]string, error) {
	const subsystem = unix.NFNL_SUBSYS_NFTABLES << 8
	req := nl.NewNetlinkRequest(subsystem|unix.NFT_MSG_GETTABLE, unix.NLM_F_DUMP)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.NFPROTO_UNSPEC, Version: unix.NFNETLINK_V0})
	answers, err := req.Execute(unix.NETLINK_NETFILTER, subsystem|unix.NFT_MSG_NEWTABLE)
	switch {
	case errors.Is(err, unix.EPERM):
		return nil, agentlab.Errorf(agentlab.CodeDenied, "this user may not read the firewall").WithHint("run it as root")
	case err != nil:
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "cannot list the tables of the firewall: %w", err)
	}
	var found []string
	for _, a := range answers {
		if len(a) < nl.SizeofNfgenmsg {
			continue
		}
		attributes, err := nl.ParseRouteAttr(a[nl.SizeofNfgenmsg:])
		if err != nil {
			return nil, agentlab.Errorf(agentlab.CodeInternal, "invalid list of tables: %w", err)
		}
		for _, at := range attributes {
			if at.Attr.Type == unix.NFTA_TABLE_NAME && unix.ByteSliceToString(at.Value) == tableName && familyNames[a[0]] != "" {
				found = append(found, familyNames[a[0]])
			}
		}
	}
	return found, nil
}

// list returns a table as loaded in the kernel, without counters and other
// values that change.
func (k kernel) list(ctx context.Context, family string) (string, error) {
	return k.run(ctx, "", "-s", "list", "table", family, tableName)
}

func (k kernel) run(ctx context.Context, stdin string, args ...string) (string, error) {
	asked := ctx
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, k.program, args...) //nolint:gosec // found above, fixed arguments
	cmd.Stdin = strings.NewReader(stdin)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	switch {
	case err == nil:
		return out.String(), nil
	case asked.Err() != nil:
		return "", agentlab.Errorf(agentlab.CodeUnknownOutcome, "nft was interrupted: %w", context.Cause(asked))
	case ctx.Err() != nil:
		return "", agentlab.Errorf(agentlab.CodeUnknownOutcome, "nft did not end in %s", loadTimeout)
	case errors.Is(err, exec.ErrNotFound):
		return "", agentlab.Errorf(agentlab.CodeUnavailable, "the nft program was removed").WithHint("apt-get install nftables")
	case strings.Contains(errs.String(), "Operation not permitted"):
		return "", agentlab.Errorf(agentlab.CodeDenied, "this user has no permission to change the firewall").WithHint("run it as root")
	}
	first, _, _ := strings.Cut(strings.TrimSpace(errs.String()), "\n")
	return "", agentlab.Errorf(agentlab.CodeInternal, "nft rejected the rules: %s", fmt.Sprintf("%.300s", first))
}

// hasBridgeMeta reports whether the kernel supports a rule with the bridge of
// a frame. The rule is only checked, not loaded.
func (k kernel) hasBridgeMeta(ctx context.Context) bool {
	const text = "table bridge agentlab_question {\n\tchain c {\n\t\ttype filter hook forward priority 0\n\t\tmeta ibrname \"x\" drop\n\t}\n}\n"
	_, err := k.run(ctx, text, "-c", "-f", "-")
	return err == nil
}
