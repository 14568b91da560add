package profile

import (
	"regexp"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// Names in the format of Linux and Proxmox VE.
var (
	bridgeName    = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,14}$`)
	modelName     = regexp.MustCompile(`^[a-z0-9-]{1,32}$`)
	firewallGroup = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_-]{1,17}$`)
)

// validateHardware checks the keys of agentlab.Hardware, and template_vmid,
// as far as that can be done without a backend.
func (d *Doc) validateHardware() error {
	if v := d.TemplateVMID; v != nil {
		if *v < 100 || *v > 999999999 {
			return invalid("template_vmid", "%d is not between 100 and 999999999", *v)
		}
		if d.Image != "" {
			return invalid("template_vmid", "image and template_vmid exclude each other").WithHint("remove one of the two")
		}
	}
	for _, n := range []struct {
		key, what string
		value     *string
		form      *regexp.Regexp
	}{
		{"network.bridge", "the name of a bridge", d.Network.Bridge, bridgeName},
		{"network.model", "the model of a network device", d.Network.Model, modelName},
		{"network.firewall_group", "the name of a security group: a letter, then at most 17 letters, digits, _ and -", d.Network.FirewallGroup, firewallGroup},
	} {
		if n.value != nil && !n.form.MatchString(*n.value) {
			return invalid(n.key, "%q is not %s", *n.value, n.what)
		}
	}
	if list := d.Resources.CPUList; list != nil {
		if _, err := agentlab.ParseCPUList(*list); err != nil {
			return err
		}
	}
	return nil
}

func (d *Doc) hardware() agentlab.Hardware {
	value := func(s *string) string {
		if s == nil {
			return ""
		}
		return *s
	}
	return agentlab.Hardware{
		CPUList: value(d.Resources.CPUList), Balloon: d.Resources.Balloon,
		Bridge: value(d.Network.Bridge), NICModel: value(d.Network.Model), FirewallGroup: value(d.Network.FirewallGroup),
	}
}

// image returns the name of the image to boot; for a template VM it is
// agentlab.TemplateImage.
func (d *Doc) image() string {
	if d.TemplateVMID != nil {
		return agentlab.TemplateImage(*d.TemplateVMID)
	}
	return d.Image
}

// oneOfCapability returns the functions honoured and why of a requirement
// whose value must be in a list of the capabilities.
func oneOfCapability(list func(backend.Capabilities) []string, value func(*Doc) *string) func(backend.Info, *Doc) bool {
	return func(i backend.Info, d *Doc) bool { return slices.Contains(list(i.Capabilities), *value(d)) }
}
