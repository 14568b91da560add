package proxmox

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"encoding/hex"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// The ownership mark. It is in the description, which the clone call sets, so
// that it is in the first configuration of the VM with a disk; the tags follow
// with the first change. A VM with only one of them, or with the mark of
// another installation, is not AgentLab's. Nor is a VM with the mark of
// another number: a user's clone of a sandbox has its description and tags
// too.
const (
	markUID          = "agentlab-uid: "
	markVMID         = "agentlab-vmid: "
	markInstallation = "agentlab-installation: "
	tagAll           = "agentlab"
	tagUID           = "al-"
)

// description returns the description of a sandbox in Proxmox's user
// interface.
func description(id vmID, installation string) string {
	return "Sandbox of AgentLab: made, changed and destroyed by it.\n" + markLines(id, installation)
}

// markLines returns the lines of a description that are the mark.
func markLines(id vmID, installation string) string {
	return markUID + id.UID + "\n" + markVMID + strconv.Itoa(id.VMID) + "\n" + markInstallation + installation + "\n"
}

// traces reports whether a configuration contains anything that only the
// sandbox has: a part of its mark, the MAC address of its network device, its
// seed, or its SMBIOS UUID. Name and volumes prove nothing: another VM with
// the number can have the same.
func (h *handle) traces(cfg pve.Config) bool {
	uid := h.Spec.UID
	return strings.Contains(cfg["description"], uid) || strings.Contains(cfg["tags"], tagUID+uid) ||
		strings.Contains(strings.ToLower(cfg["net0"]), strings.ToLower(h.MAC)) ||
		h.Snippet != "" && strings.Contains(cfg["cicustom"], h.Snippet) ||
		h.SMBIOS != "" && cfg["smbios1"] == h.SMBIOS
}

// tags returns the tags of a sandbox as Proxmox stores them: lower case and
// sorted.
func tags(uid string) string { return tagAll + ";" + tagUID + uid }

// marks are the parts of the mark in a configuration.
type marks struct {
	uid, vmid, installation string
	volume                  string // UID of a volume
	tagged                  string // UID of the tag; "" if there is none
	name                    string
}

var uidForm = lazyre.New(`^[a-z2-9]{26}$`)

// readMarks reads the mark of a configuration. Two marks count as none: a user
// may have pasted one.
func readMarks(cfg pve.Config) marks {
	m := marks{name: cfg["name"]}
	one := func(have *string, value string) {
		if *have != "" {
			value = "?" // matches nothing
		}
		*have = value
	}
	for line := range strings.Lines(cfg["description"]) {
		line = strings.TrimSpace(line)
		if uid, ok := strings.CutPrefix(line, markUID); ok {
			one(&m.uid, uid)
		}
		if uid, ok := strings.CutPrefix(line, markVolume); ok {
			one(&m.volume, uid)
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

// taggedUID returns the UID in a list of tags.
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

// ours reports whether a configuration is that of the sandbox id of this
// installation: its description contains the whole mark, and a tag or the VM's
// name matches. A VM that is still being cloned has description and name
// before it has tags. A template is never a sandbox.
func (d *Driver) ours(cfg pve.Config, id vmID, name string) bool {
	m := readMarks(cfg)
	if m.uid != id.UID || m.vmid != strconv.Itoa(id.VMID) || m.installation != d.installation || cfg["template"] == "1" {
		return false
	}
	return m.tagged == id.UID || (name != "" && m.name == name) || cfg["lock"] == lockClone
}

// macOf derives the MAC address of a sandbox's network device from its UID, so
// that it is known before the VM exists. The prefix is Proxmox's own.
func macOf(uid string, salt int) net.HardwareAddr {
	sum := sha256.Sum256([]byte("agentlab mac " + strconv.Itoa(salt) + " " + uid))
	return net.HardwareAddr{0xbc, 0x24, 0x11, sum[0], sum[1], sum[2]}
}

// portOf returns the bridge port of the first network device of a VM: its tap
// device or, with Proxmox's firewall, the bridge's end of the veth pair.
func portOf(vmid int, firewall bool) string {
	if firewall {
		return "fwpr" + strconv.Itoa(vmid) + "p0"
	}
	return "tap" + strconv.Itoa(vmid) + "i0"
}

// installationID returns an ID of this installation that does not reveal its
// secret.
func installationID(master []byte) string {
	sum := sha256.Sum256(append([]byte("agentlab installation "), master...))
	return hex.EncodeToString(sum[:8])
}

// snippetForm matches the name of AgentLab's snippets: installation, number,
// the beginning of the UID, a random part.
var snippetForm = lazyre.New(`^agentlab-([0-9a-f]{16})-([1-9][0-9]{2,8})-([a-z2-9]{8})-([a-z2-7]{13})\.yaml$`)

func (d *Driver) snippetName(id vmID) string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	random := strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(b[:]))
	return "agentlab-" + d.installation + "-" + strconv.Itoa(id.VMID) + "-" + id.UID[:8] + "-" + random + ".yaml"
}
