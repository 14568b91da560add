package proxmox

import (
	"slices"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// options are what Spec.Options holds.
type options struct {
	CPUList       string `json:"cpulist"`        // host CPUs that the VM may run on, for example "0-7" or "0,2,4-6"
	Balloon       bool   `json:"balloon"`        // the host may reclaim memory that the guest does not need
	Bridge        string `json:"bridge"`         // bridge of the host that its network device is on
	NICModel      string `json:"nic_model"`      // model of the network device, for example "virtio"
	FirewallGroup string `json:"firewall_group"` // security group of the firewall of Proxmox VE
}

// profileOptions are the profile keys of this backend.
var profileOptions = []backend.Option{
	{Path: "template_vmid", Zero: 0, Valid: lazyre.New(`^[1-9][0-9]{2,8}$`).MatchString, What: "between 100 and 999999999",
		Image: func(vmid string) string { return templatePrefix + vmid }},
	{Path: "resources.cpulist", Name: "cpulist", Zero: "", Valid: isCPUList, What: "a list of CPUs, such as 0-7 or 0,2,4-6"},
	{Path: "resources.balloon", Name: "balloon", Zero: false},
	{Path: "network.bridge", Name: "bridge", Zero: "", Valid: lazyre.New(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,14}$`).MatchString, What: "the name of a bridge"},
	{Path: "network.model", Name: "nic_model", Zero: "", Valid: lazyre.New(`^[a-z0-9-]{1,32}$`).MatchString, What: "the model of a network device"},
	{Path: "network.firewall_group", Name: "firewall_group", Zero: "", Valid: lazyre.New(`^[A-Za-z][A-Za-z0-9_-]{1,17}$`).MatchString,
		What: "the name of a security group: a letter, then at most 17 letters, digits, _ and -"},
}

// optionsOK is backend.Info.OptionsOK.
func (d *Driver) optionsOK(set agentlab.Options) error {
	var o options
	if err := set.Decode(&o); err != nil {
		return err
	}
	unsupported := func(key, format string, args ...any) *agentlab.Error {
		return agentlab.Errorf(agentlab.CodeUnsupported, format, args...).WithField(key)
	}
	switch {
	case o.CPUList != "" && d.pve.Root() == nil:
		return unsupported("resources.cpulist", "only root can bind a VM to CPUs, and an API token is never root").WithHint("remove it, or set proxmox.transport: shell")
	case o.Bridge != "" && o.Bridge != d.cfg.Bridge:
		return unsupported("network.bridge", "network policies are not enforced on bridge %s", o.Bridge).WithHint("remove it: sandboxes are on %s", d.cfg.Bridge)
	case o.NICModel != "" && !slices.Contains(d.cfg.Models, o.NICModel):
		return unsupported("network.model", "sandboxes cannot have the network device %s", o.NICModel).WithHint("choose one of %s", strings.Join(d.cfg.Models, ", "))
	}
	return nil
}

// templateImage returns the name of the image that is the template VM with that
// number.
func templateImage(vmid int) string { return templatePrefix + strconv.Itoa(vmid) }

// templateNumber returns the VMID of the template VM that an image name refers
// to. ok is false if the name is not of a template VM.
func templateNumber(image string) (vmid int, ok bool) {
	digits, ok := strings.CutPrefix(image, templatePrefix)
	n, err := strconv.ParseUint(digits, 10, 30)
	if !ok || err != nil || templateImage(int(n)) != image {
		return 0, false
	}
	return int(n), true
}

const templatePrefix = "template-"

// isCPUList reports whether text is a list of numbers and ranges from 0 to 4095,
// separated by commas.
func isCPUList(text string) bool {
	for part := range strings.SplitSeq(text, ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		lo, err1 := strconv.ParseUint(first, 10, 12)
		hi, err2 := strconv.ParseUint(last, 10, 12)
		if err1 != nil || err2 != nil || lo > hi {
			return false
		}
	}
	return true
}
