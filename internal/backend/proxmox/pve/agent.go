package pve

import (
	"context"
	"encoding/json"
	"net"
	"net/netip"
	"net/url"

	"github.com/agentlab-vm/agentlab"
)

// Interface is a network interface as reported by the guest, which is not
// trusted.
type Interface struct {
	Name string
	MAC  net.HardwareAddr // nil if none or invalid
	IPs  []netip.Addr
}

// maxInterfaces is the maximum number of interfaces that a guest may report.
const maxInterfaces = 256

// AgentInterfaces asks the guest for its interfaces. Invalid entries and
// addresses are omitted.
func (c *Client) AgentInterfaces(ctx context.Context, node string, vmid int) ([]Interface, error) {
	var raw json.RawMessage
	if err := c.vmCall(ctx, "list network interfaces through the guest agent of", Get, node, vmid, "agent/network-get-interfaces", nil, &raw); err != nil {
		return nil, err
	}
	return decodeInterfaces(raw)
}

func decodeInterfaces(raw json.RawMessage) ([]Interface, error) {
	var out struct {
		Result []struct {
			Name string `json:"name"`
			MAC  string `json:"hardware-address"`
			IPs  []struct {
				Address string `json:"ip-address"`
			} `json:"ip-addresses"`
		} `json:"result"`
	}
	if err := json.Unmarshal(raw, &out); err != nil {
		return nil, agentlab.Errorf(agentlab.CodeInternal, "invalid answer of the guest agent: %w", err)
	}
	var ifs []Interface
	for _, r := range out.Result[:min(len(out.Result), maxInterfaces)] {
		i := Interface{Name: agentlab.OneLine(r.Name, 64)}
		if mac, err := net.ParseMAC(r.MAC); err == nil && len(mac) == 6 {
			i.MAC = mac
		}
		for _, a := range r.IPs[:min(len(r.IPs), maxInterfaces)] {
			if ip, err := netip.ParseAddr(a.Address); err == nil && ip.Zone() == "" {
				i.IPs = append(i.IPs, ip.Unmap())
			}
		}
		ifs = append(ifs, i)
	}
	return ifs, nil
}

// maxAgentWrite is the maximum number of bytes of one call.
const maxAgentWrite = 60 << 10

// AgentFileWrite writes a file in the guest through its agent: at most 60 KiB
// of ASCII. Proxmox corrupts other bytes.
func (c *Client) AgentFileWrite(ctx context.Context, node string, vmid int, path string, content []byte) error {
	if len(content) > maxAgentWrite {
		return agentlab.Errorf(agentlab.CodeInvalid, "cannot write %d bytes through a guest agent", len(content)).WithHint("the limit is %d bytes", maxAgentWrite)
	}
	for _, b := range content {
		if b >= 0x80 || b == 0 {
			return agentlab.Errorf(agentlab.CodeInvalid, "only ASCII text can be written through a guest agent")
		}
	}
	return c.vmCall(ctx, "write a file through the guest agent of", Post, node, vmid, "agent/file-write",
		url.Values{"file": {path}, "content": {string(content)}}, nil)
}
