package proxmox

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"encoding/hex"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
)

// The ownership mark. It is in the description, which the call that clones a
// template takes, so that it is in the first configuration of the VM that has
// a disk; the tags follow with the first change. What bears one without the
// other, or another installation's, is not ours. Nor is what bears that of
// another number: whoever clones a sandbox by hand clones its description and
// its tags, too.
const (
	markUID          = "agentlab-uid: "
	markVMID         = "agentlab-vmid: "
	markInstallation = "agentlab-installation: "
	tagAll           = "agentlab"
	tagUID           = "al-"
)

// description is what people see of a sandbox in Proxmox's interface.
func description(id vmID, installation string) string {
	return "Sandbox of AgentLab: made, changed and destroyed by it.\n" + markLines(id, installation)
}

// markLines are the lines of a description that are the mark.
func markLines(id vmID, installation string) string {
	return markUID + id.UID + "\n" + markVMID + strconv.Itoa(id.VMID) + "\n" + markInstallation + installation + "\n"
}

// traces tells whether anything in a configuration is of the sandbox and of no
// other VM: its mark in part, the hardware address of its network device, its
// seed, or what Proxmox calls the machine. Name and volumes tell nothing:
// whoever gets the number can have the same.
func (h *handle) traces(cfg pve.Config) bool {
	uid := h.Spec.UID
	return strings.Contains(cfg["description"], uid) || strings.Contains(cfg["tags"], tagUID+uid) ||
		strings.Contains(strings.ToLower(cfg["net0"]), strings.ToLower(h.MAC)) ||
		h.Snippet != "" && strings.Contains(cfg["cicustom"], h.Snippet) ||
		h.SMBIOS != "" && cfg["smbios1"] == h.SMBIOS
}

// tags of a sandbox, as Proxmox stores them: lower case and sorted.
func tags(uid string) string { return tagAll + ";" + tagUID + uid }

// marks are what a configuration says about whose it is.
type marks struct {
	uid, vmid, installation string
	tagged                  string // uid of the tag; "" when there is none
	name                    string
}

var uidForm = regexp.MustCompile(`^[a-z2-9]{26}$`)

// readMarks reads the mark of a configuration. Two marks are none: a person
// may have pasted one.
func readMarks(cfg pve.Config) marks {
	m := marks{name: cfg["name"]}
	one := func(have *string, value string) {
		if *have != "" {
			value = "?" // fits nothing
		}
		*have = value
	}
	for line := range strings.Lines(cfg["description"]) {
		line = strings.TrimSpace(line)
		if uid, ok := strings.CutPrefix(line, markUID); ok {
			one(&m.uid, uid)
		}
		if vmid, ok := strings.CutPrefix(line, markVMID); ok {
			one(&m.vmid, vmid)
		}
		if id, ok := strings.CutPrefix(line, markInstallation); ok {
			one(&m.installation, id)
		}
	}
	m.tagged = taggedUID(cfg["tags"])
	return m
}

// taggedUID is the uid that a list of tags names.
func taggedUID(tags string) string {
	list := strings.FieldsFunc(tags, func(r rune) bool { return r == ';' || r == ',' || r == ' ' })
	if !slices.Contains(list, tagAll) {
		return ""
	}
	found := ""
	for _, t := range list {
		if uid, ok := strings.CutPrefix(t, tagUID); ok && uidForm.MatchString(uid) {
			if found != "" {
				return ""
			}
			found = uid
		}
	}
	return found
}

// ours tells whether a configuration is that of the sandbox id of this
// installation: its description names all of that, and a tag or the VM's name
// agrees.
// A VM that is still being cloned has its description and name before it has
// tags. A template is never a sandbox, whatever it inherited.
func (d *Driver) ours(cfg pve.Config, id vmID, name string) bool {
	m := readMarks(cfg)
	if m.uid != id.UID || m.vmid != strconv.Itoa(id.VMID) || m.installation != d.installation || cfg["template"] == "1" {
		return false
	}
	return m.tagged == id.UID || (name != "" && m.name == name) || cfg["lock"] == lockClone
}

// macOf derives the hardware address of a sandbox's network device from its
// mark, so that it is known before the VM is. The prefix is Proxmox's own.
func macOf(uid string, salt int) net.HardwareAddr {
	sum := sha256.Sum256([]byte("agentlab mac " + strconv.Itoa(salt) + " " + uid))
	return net.HardwareAddr{0xbc, 0x24, 0x11, sum[0], sum[1], sum[2]}
}

// portOf is the port of the bridge that the first network device of a VM is
// on: its tap device, or, with Proxmox's firewall between, that end of the
// pair of devices which leads to the bridge.
func portOf(vmid int, firewall bool) string {
	if firewall {
		return "fwpr" + strconv.Itoa(vmid) + "p0"
	}
	return "tap" + strconv.Itoa(vmid) + "i0"
}

// installationID names this installation, without telling its secret.
func installationID(master []byte) string {
	sum := sha256.Sum256(append([]byte("agentlab installation "), master...))
	return hex.EncodeToString(sum[:8])
}

// snippetForm is the name of a snippet of ours: installation, number, the
// beginning of the mark, something random.
var snippetForm = regexp.MustCompile(`^agentlab-([0-9a-f]{16})-([1-9][0-9]{2,8})-([a-z2-9]{8})-([a-z2-7]{13})\.yaml$`)

func (d *Driver) snippetName(id vmID) string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	random := strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(b[:]))
	return "agentlab-" + d.installation + "-" + strconv.Itoa(id.VMID) + "-" + id.UID[:8] + "-" + random + ".yaml"
}
