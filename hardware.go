package agentlab

import (
	"strconv"
	"strings"
)

// Hardware is what a profile may set for a sandbox's VM in addition to its
// Resources. The zero value is the backend's default. A backend that does not
// support a field rejects it when it is set.
type Hardware struct {
	CPUList       string `json:"cpulist,omitempty"`        // host CPUs that it may run on, e.g. "0-7" or "0,2,4-6"
	Balloon       bool   `json:"balloon,omitempty"`        // the hypervisor may reclaim memory that the guest does not need
	Bridge        string `json:"bridge,omitempty"`         // bridge of the host that its network device is on
	NICModel      string `json:"nic_model,omitempty"`      // model of the network device, e.g. "virtio"
	FirewallGroup string `json:"firewall_group,omitempty"` // security group of the hypervisor's own firewall
}

// TemplateImage is the name of the image that is the template VM with that
// number, on backends with template VMs.
func TemplateImage(vmid int) string { return templatePrefix + strconv.Itoa(vmid) }

// TemplateVMID returns the VMID of the template VM that an image name refers
// to. ok is false if the name is not of a template VM.
func TemplateVMID(image string) (vmid int, ok bool) {
	digits, ok := strings.CutPrefix(image, templatePrefix)
	n, err := strconv.ParseUint(digits, 10, 30)
	if !ok || err != nil || TemplateImage(int(n)) != image { //nolint:gosec // 30 bits
		return 0, false
	}
	return int(n), true //nolint:gosec // 30 bits
}

const templatePrefix = "template-"

// ParseCPUList parses the format of Hardware.CPUList: numbers and ranges from
// 0 to 4095, separated by commas. It returns the number of CPUs.
func ParseCPUList(text string) (int, error) {
	bad := func() (int, error) {
		return 0, Errorf(CodeInvalid, "%q is not a list of CPUs", text).WithField("resources.cpulist").
			WithHint("write numbers and ranges, such as 0-7 or 0,2,4-6")
	}
	seen := map[int]bool{}
	for part := range strings.SplitSeq(text, ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		lo, err1 := strconv.ParseUint(first, 10, 12)
		hi, err2 := strconv.ParseUint(last, 10, 12)
		if err1 != nil || err2 != nil || lo > hi {
			return bad()
		}
		for i := lo; i <= hi; i++ {
			seen[int(i)] = true //nolint:gosec // at most 12 bits
		}
	}
	return len(seen), nil
}
