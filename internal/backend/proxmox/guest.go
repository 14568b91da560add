package proxmox

import (
	"bytes"
	"cmp"
	"context"
	"net"
	"net/netip"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/internal/link"
)

// reachable returns the handle of a sandbox whose guest may answer. It makes no
// call for a sandbox with a handle: a missing guest does not answer.
func (d *Driver) reachable(ctx context.Context, ref backend.Ref) (*handle, error) {
	h, err := d.handleOf(ctx, ref)
	if err != nil {
		return nil, err
	}
	if h.incomplete() || h.Power == powerOff || h.Power == "" {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the VM of sandbox %d is not running", h.Spec.VMID)
	}
	if h.Power == powerSuspended {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the VM of sandbox %d is paused", h.Spec.VMID)
	}
	return h, nil
}

// dialTimeout limits how long a guest may take to accept a connection.
const dialTimeout = 5 * time.Second

// DialControl implements backend.Driver. A guest without AgentLab's user-data
// first gets its ControlConfig through its QEMU guest agent.
func (d *Driver) DialControl(ctx context.Context, ref backend.Ref) (net.Conn, error) {
	h, err := d.reachable(ctx, ref)
	if err != nil {
		return nil, err
	}
	if h.Snippet == "" && !h.Seeded {
		if err := d.writeControlFile(ctx, h.Spec.UID); err != nil {
			return nil, err
		}
	}
	raw, err := d.dial(ctx, h, link.ControlPort)
	if err != nil {
		return nil, err
	}
	key, err := link.SandboxKey(d.master, cmp.Or(h.ControlUID, h.Spec.UID))
	if err != nil {
		_ = raw.Close()
		return nil, err
	}
	return link.DialTLS(ctx, raw, key)
}

// DialGuest implements backend.Driver.
func (d *Driver) DialGuest(ctx context.Context, ref backend.Ref, port uint16) (net.Conn, error) {
	h, err := d.reachable(ctx, ref)
	if err != nil {
		return nil, err
	}
	return d.dial(ctx, h, port)
}

func (d *Driver) dial(ctx context.Context, h *handle, port uint16) (net.Conn, error) {
	host, err := d.network(ctx, h.Node)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	conn, err := host.Dial(ctx, netip.AddrPortFrom(h.Spec.IPv4, port))
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "port %d of sandbox %d does not answer: %w", port, h.Spec.VMID, err)
	}
	return conn, nil
}

// Pauses between attempts to reach a guest agent: each failed attempt takes
// the node three seconds.
const (
	minControlPause = 2 * time.Second
	maxControlPause = 20 * time.Second
)

// writeControlFile writes guestapi.ControlFile in the guest, once in the guest's life. The
// file is not secret, and it is written before any code of a user runs there.
func (d *Driver) writeControlFile(ctx context.Context, uid string) error {
	unlock, err := d.lock(ctx, uid)
	if err != nil {
		return err
	}
	defer unlock()
	h, err := d.readHandle(backend.Ref{UID: uid})
	if err != nil || h == nil || h.Seeded {
		if err == nil && h == nil {
			err = absent(uid)
		}
		return err
	}
	wait := false
	d.cache.with(uid, func(i *vmCacheEntry) { wait = d.cfg.Now().Before(i.seedAfter) })
	if wait {
		return agentlab.Errorf(agentlab.CodeUnavailable, "the guest agent of sandbox %d has not answered yet", h.Spec.VMID)
	}
	text, err := d.control(h)
	if err != nil {
		return err
	}
	if err := d.checkOwnership(ctx, h); err != nil {
		return err
	}
	if err := d.pve.AgentFileWrite(ctx, h.Node, h.id().VMID, guestapi.ControlFile, text); err != nil {
		d.cache.with(uid, func(i *vmCacheEntry) {
			i.seedPause = min(max(i.seedPause*3/2, minControlPause), maxControlPause)
			i.seedAfter = d.cfg.Now().Add(i.seedPause)
		})
		return agentlab.Errorf(agentlab.CodeUnavailable, "cannot send the controller's key to the guest of sandbox %d yet: %w", h.Spec.VMID, err)
	}
	d.at("seeded")
	h.Seeded, h.ControlUID = true, ""
	return d.save(h)
}

// ownershipAge is the maximum age of the last check of a sandbox before a write
// into its guest: another VM with its number cannot boot in less time.
const ownershipAge = 3 * time.Second

// checkOwnership checks that the VM with a sandbox's number is the sandbox, unless
// that was checked less than ownershipAge ago.
func (d *Driver) checkOwnership(ctx context.Context, h *handle) error {
	if d.cache.seenWithin(h.Spec.UID, d.cfg.Now(), ownershipAge) {
		return nil
	}
	_, err := d.lookupOwned(ctx, h.id(), h)
	return err
}

// ListenGuest implements backend.Driver.
func (d *Driver) ListenGuest(ctx context.Context, ref backend.Ref) (net.Listener, error) {
	h, err := d.handleOf(ctx, ref)
	if err != nil {
		return nil, err
	}
	host, err := d.network(ctx, h.Node)
	if err != nil {
		return nil, err
	}
	return host.Listen(ctx, h.id())
}

// address returns the address of a running guest. Its port allows only its
// leased address, so no call is needed, except with DHCP: then the address is
// returned after the guest has got it.
func (d *Driver) address(ctx context.Context, h *handle) string {
	if !d.cfg.DHCP {
		return h.Spec.IPv4.String()
	}
	var known netip.Addr
	d.cache.with(h.Spec.UID, func(i *vmCacheEntry) { known = i.address })
	if !known.IsValid() {
		known = d.discover(ctx, h)
	}
	if known != h.Spec.IPv4 {
		return ""
	}
	return known.String()
}

// discover returns the address that a guest got: from AgentLab's DHCP server,
// otherwise from the guest's agent, whose answer counts only for the device
// with the sandbox's MAC and for an address of its network.
func (d *Driver) discover(ctx context.Context, h *handle) netip.Addr {
	id := h.id()
	mac, err := net.ParseMAC(h.MAC)
	if err != nil {
		return netip.Addr{}
	}
	var found netip.Addr
	if host, err := d.network(ctx, h.Node); err == nil {
		found, _ = host.Lease(ctx, mac)
	}
	wait := false
	d.cache.with(id.UID, func(i *vmCacheEntry) { wait = d.cfg.Now().Before(i.askAfter) })
	if !found.IsValid() && !wait {
		if list, err := d.pve.AgentInterfaces(ctx, h.Node, id.VMID); err == nil {
			found = pickAddress(list, mac, d.cfg.Subnet4)
		}
	}
	d.cache.with(id.UID, func(i *vmCacheEntry) {
		i.address = found
		if !found.IsValid() {
			i.askPause = min(max(i.askPause*2, minControlPause), maxControlPause)
			i.askAfter = d.cfg.Now().Add(i.askPause)
		}
	})
	return found
}

// pickAddress returns the address in a network that the device with a MAC has.
func pickAddress(list []pve.Interface, mac net.HardwareAddr, network netip.Prefix) netip.Addr {
	for _, i := range list {
		if !bytes.Equal(i.MAC, mac) {
			continue
		}
		for _, ip := range i.IPs {
			if network.Contains(ip) {
				return ip
			}
		}
	}
	return netip.Addr{}
}
