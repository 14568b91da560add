package nft

import (
	"context"
	"errors"
	"os/exec"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
)

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

// inScratch loads text in a separate network namespace and returns the
// kernel's listing.
func (k kernel) inScratch(ctx context.Context, text string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	script := `"$0" -f - && for f in ` + strings.Join(ours, " ") + `; do "$0" -s list table $f ` + tableName + ` || exit 1; done`
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", script, k.program)
	cmd.Stdin = strings.NewReader(text)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	out, err := cmd.Output()
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeUnavailable, "the rules could not be loaded into a namespace of their own to compare them: %w", err).
			WithHint("run it as root")
	}
	return string(out), nil
}
