package proxmox

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// template is a template VM as its node reports it.
type template struct {
	vmid   int
	node   string
	cfg    pve.Config
	disk   string // slot of its disk
	shared bool   // its volumes are on shared storage, so those of clones may be too
}

// templateCache caches templates for a short time, so that creating many
// sandboxes does not read the same configuration repeatedly.
type templateCache struct {
	asking gate
	all    map[templateKey]timed[template]
}

type templateKey struct {
	node string
	vmid int
}

const templateAge = 30 * time.Second

// template reads a template and checks that it is usable. It is never changed
// or locked, because a lock makes clones fail.
func (d *Driver) template(ctx context.Context, node string, vmid int) (template, error) {
	key := templateKey{node, vmid}
	if err := d.templates.asking.lock(ctx); err != nil {
		return template{}, err
	}
	defer d.templates.asking.Unlock()
	if t, ok := d.templates.all[key].within(templateAge, d.cfg.Now()); ok {
		return t, nil
	}
	cfg, err := d.pve.Config(ctx, node, vmid)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return template{}, agentlab.Errorf(agentlab.CodeNotFound, "there is no template VM %d on node %s", vmid, node).
			WithField("proxmox.templates").WithHint("create it with scripts/create_template.sh, or set the correct VMID")
	}
	if err != nil {
		return template{}, err
	}
	t := template{vmid: vmid, node: node, cfg: cfg}
	if err := d.checkTemplate(&t); err != nil {
		return template{}, err
	}
	if len(d.cfg.Nodes) > 1 {
		t.shared = true
		for _, storage := range d.storagesOf(t) { // in Proxmox also that of the cloud-init drive and of a full clone
			st, err := d.pve.StorageStatus(ctx, node, storage)
			if err != nil {
				return template{}, err
			}
			t.shared = t.shared && bool(st.Shared)
		}
	}
	if d.templates.all == nil {
		d.templates.all = map[templateKey]timed[template]{}
	}
	d.templates.all[key] = timed[template]{t, d.cfg.Now()}
	return t, nil
}

// removableOptions matches options that a token with the smallest role may delete
// from a clone or replace. Others need root (args, hookscript, affinity, real
// devices), VM.Config.HWType (watchdog, audio0, serial1) or Sys.Modify on /
// (startup).
var removableOptions = lazyre.New(`^(agent|allow-ksm|autostart|balloon|cicustom|cipassword|ciupgrade|ciuser|cores|cpulimit|cpuunits|description|` +
	`freeze|ipconfig[0-9]+|memory|migrate_downtime|migrate_speed|name|nameserver|net[0-9]+|numa[0-9]+|onboot|protection|searchdomain|shares|` +
	`smp|sockets|sshkeys|startdate|tags|tdf|vcpus|vmstatestorage)$`)

// needsRoot reports whether a token cannot remove an option of a template
// from its clones.
func needsRoot(key string) bool {
	return !removableOptions.MatchString(key) && !slices.Contains(inheritedOptions, key) && !inheritedDrives.MatchString(key) && !unusedOption.MatchString(key) &&
		!isSnapshotOption(key) && key != "lock"
}

// checkTemplate returns an error if a template is not usable.
func (d *Driver) checkTemplate(t *template) error {
	bad := func(fix, format string, args ...any) error {
		return agentlab.Errorf(agentlab.CodeUnsupported, "VM %d cannot be used as a template: "+format, append([]any{t.vmid}, args...)...).
			WithField("proxmox.templates").WithHint("%s", fix)
	}
	if t.cfg["template"] != "1" {
		return bad("qm template "+strconv.Itoa(t.vmid)+", or set another VMID", "it is not a template")
	}
	var ok bool
	if t.disk, ok = bootDisk(t.cfg, t.vmid); !ok {
		return bad("keep exactly one disk, owned by the template, as scsi0", "it must own exactly one disk")
	}
	media := 0
	for key, value := range t.cfg {
		switch {
		case key == t.disk, key == "efidisk0" && ownDisk(value, t.vmid):
		case inheritedDrives.MatchString(key) && ownCloudInit(value, t.vmid):
			media++
		case inheritedDrives.MatchString(key) && !emptyCD(value), key == "efidisk0", key == "tpmstate0":
			return bad("remove "+key, "it has %s, which every sandbox would inherit", key)
		case d.pve.Root() == nil && needsRoot(key):
			return bad("qm set "+strconv.Itoa(t.vmid)+" --delete "+key, "sandboxes would inherit its %s, which an API token with minimal privileges cannot remove", key)
		}
	}
	if media != 1 {
		return bad("qm set "+strconv.Itoa(t.vmid)+" --ide2 STORAGE:cloudinit, before converting the VM to a template", "it has no cloud-init drive")
	}
	for key, value := range t.cfg {
		if form := harmless[key]; slices.Contains(inheritedOptions, key) && form != nil && !form.MatchString(value) {
			return bad("remove or change the option", "its %s is %q", key, clip(value))
		}
	}
	return nil
}

// checkDiskSize rejects a disk smaller than that of the template or snapshot.
func checkDiskSize(spec backend.Spec, t template) error {
	size := driveSize(t.cfg[t.disk])
	if want := int64(spec.Resources.RootSizeGB) << 30; want != 0 && want < size {
		return agentlab.Errorf(agentlab.CodeUnsupported, "the disk to copy already has %d GiB, and a disk cannot be shrunk", (size+1<<30-1)>>30).
			WithField("storage.root_size_gb")
	}
	return nil
}

// digest returns an ID of the template that differs from that of another
// template with the same number.
func (t template) digest() string {
	sum := sha256.Sum256([]byte(t.cfg["smbios1"] + "\n" + t.cfg[t.disk] + "\n" + t.cfg["meta"]))
	return hex.EncodeToString(sum[:])[:20]
}

// Templates provides the template VMs as images for package sandbox.
type Templates struct{ d *Driver }

// Templates returns the driver's templates.
func (d *Driver) Templates() Templates { return Templates{d} }

// numbers returns the template of an image on each node; 0 if there is none.
func (d *Driver) numbers(image string) []int {
	out := make([]int, len(d.cfg.Nodes))
	vmid, direct := templateNumber(image)
	for i, n := range d.cfg.Nodes {
		out[i] = n.Templates[image]
		if direct {
			out[i] = vmid
		}
	}
	return out
}

// Check returns nil if an image is known, code not_found otherwise.
func (t Templates) Check(name string) error {
	if slices.ContainsFunc(t.d.numbers(name), func(n int) bool { return n != 0 }) {
		return nil
	}
	return agentlab.Errorf(agentlab.CodeNotFound, "there is no template for image %q", name).WithField("image").
		WithHint("set its template VM under proxmox.templates, or set template_vmid in the profile")
}

// Ensure returns the reference of an image's template,
// template-<vmid>@<digest>. It creates no templates.
func (t Templates) Ensure(ctx context.Context, name string, _ func(string)) (string, error) {
	if err := t.Check(name); err != nil {
		return "", err
	}
	var last error
	for i, vmid := range t.d.numbers(name) {
		if vmid == 0 {
			continue
		}
		tmpl, err := t.d.template(ctx, t.d.cfg.Nodes[i].Name, vmid)
		if err == nil {
			return templateImage(vmid) + "@" + tmpl.digest(), nil
		}
		if last == nil || agentlab.CodeOf(err) != agentlab.CodeNotFound {
			last = err
		}
	}
	return "", last
}

// Current is Ensure.
func (t Templates) Current(ctx context.Context, name string) (string, error) {
	return t.Ensure(ctx, name, nil)
}

// templateOf returns the VMID and the digest in the image of a Spec.
func templateOf(image string) (vmid int, digest string, err error) {
	name, digest, ok := strings.Cut(image, "@")
	vmid, is := templateNumber(name)
	if !ok || !is || digest == "" {
		return 0, "", agentlab.Errorf(agentlab.CodeUnsupported, "%q is not a template VM", image).WithField("image").
			WithHint("image references of this backend have the form template-<vmid>@<digest>")
	}
	return vmid, digest, nil
}
