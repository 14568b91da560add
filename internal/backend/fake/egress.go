package fake

import (
	"context"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// UpdateNetwork stores the policy. It is not enforced, because there is no
// network traffic.
func (d *Driver) UpdateNetwork(ctx context.Context, ref backend.Ref, n agentlab.Network) error {
	if err := d.point(ctx, OpUpdateNetwork, Before, ref); err != nil {
		return err
	}
	if err := d.validNetwork(n); err != nil {
		return err
	}
	in, err := d.h.find(ref)
	if err != nil {
		return err
	}
	if err := in.setNetwork(n); err != nil {
		return err
	}
	return d.point(ctx, OpUpdateNetwork, After, ref)
}

// validNetwork rejects unknown modes and invalid policies.
func (d *Driver) validNetwork(n agentlab.Network) error {
	if err := backend.CheckMode(d.h.cfg.Name, n); err != nil {
		return err
	}
	_, err := egress.New(n)
	return err
}

func (in *instance) setNetwork(n agentlab.Network) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.spec, in.rec.Network = nil, &n
	if reflect.DeepEqual(n, in.rec.Spec.Network) {
		in.rec.Network = nil
	}
	return in.save()
}

// Network returns the current policy of an instance.
func (h *Host) Network(ref backend.Ref) (agentlab.Network, error) {
	in, err := h.find(ref)
	if err != nil {
		return agentlab.Network{}, err
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.rec.Network != nil {
		return *in.rec.Network, nil
	}
	return in.rec.Spec.Network, nil
}

// maxEgress is how many records an instance keeps; the oldest are dropped, as
// in the log of a real driver.
const maxEgress = 10000

// EgressLog returns the records of AddEgress and of the "egress" command of
// guests.
func (d *Driver) EgressLog(ctx context.Context, ref backend.Ref, after int64, limit int) ([]agentlab.EgressRecord, error) {
	if err := d.point(ctx, OpEgressLog, Before, ref); err != nil {
		return nil, err
	}
	if limit < 1 {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%d is not above 0", limit).WithField("limit")
	}
	in, err := d.h.find(ref)
	if err != nil {
		return nil, err
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.rec.Egress == nil {
		return nil, nil
	}
	recs := in.rec.Egress.Records
	i, _ := slices.BinarySearchFunc(recs, after+1, func(r agentlab.EgressRecord, seq int64) int { return int(r.Seq - seq) })
	out := slices.Clone(recs[i:])
	return out[:min(limit, len(out))], nil
}

// RecordEgress implements backend.Net.
func (d *Driver) RecordEgress(ctx context.Context, ref backend.Ref, r agentlab.EgressRecord) error {
	if err := d.point(ctx, OpRecordEgress, Before, ref); err != nil {
		return err
	}
	r.Seq = 0
	return d.h.AddEgress(ref, r)
}

// egressLog is the egress log of an instance.
type egressLog struct {
	Records []agentlab.EgressRecord `json:"records"`
	Seq     int64                   `json:"seq"` // of the last one
}

// AddEgress writes records to the egress log of an instance. It sets Seq,
// VMID, times and Count if they are zero.
func (h *Host) AddEgress(ref backend.Ref, recs ...agentlab.EgressRecord) error {
	in, err := h.find(ref)
	if err != nil {
		return err
	}
	return in.addEgress(recs...)
}

func (in *instance) addEgress(recs ...agentlab.EgressRecord) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.rec.Egress == nil {
		in.rec.Egress = &egressLog{}
	}
	log := in.rec.Egress
	for _, r := range recs {
		log.Seq = max(log.Seq+1, r.Seq)
		r.Seq, r.VMID, r.Count = log.Seq, in.rec.Spec.VMID, max(r.Count, 1)
		if r.Time.IsZero() {
			r.Time = in.h.cfg.Clock().UTC()
		}
		if r.Last.IsZero() {
			r.Last = r.Time
		}
		log.Records = append(log.Records, r)
	}
	if over := len(log.Records) - maxEgress; over > 0 {
		log.Records = slices.Delete(log.Records, 0, over)
	}
	return in.save()
}

// egress is the guest's command "egress allow|deny HOST:PORT RULE".
func (g *guest) egress(args []string) int {
	if len(args) < 2 || (args[0] != "allow" && args[0] != "deny") {
		return 2
	}
	i := strings.LastIndexByte(args[1], ':')
	if i < 0 {
		return 2
	}
	port, err := netip.ParseAddrPort("0.0.0.0" + args[1][i:])
	if err != nil {
		return 2
	}
	r := agentlab.EgressRecord{Proto: "tcp", Port: int(port.Port()), Allow: args[0] == "allow", Rule: "mode.nat"}
	if addr, err := netip.ParseAddr(strings.Trim(args[1][:i], "[]")); err == nil {
		r.Addr = addr.String()
	} else {
		r.Name = args[1][:i]
	}
	if len(args) > 2 {
		r.Rule = args[2]
	}
	if g.in.addEgress(r) != nil {
		return 1
	}
	return 0
}
