package proxmox

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

func TestCPUList(t *testing.T) {
	for _, text := range []string{"0", "0-7", "0,2,4-6", "1,1,0-1", "4095"} {
		if !isCPUList(text) {
			t.Errorf("%q is refused", text)
		}
	}
	for _, text := range []string{"", ",", "0-", "-1", "7-0", "0 1", "0,,1", "4096", "+1", "0x1", "a"} {
		if isCPUList(text) {
			t.Errorf("%q is accepted", text)
		}
	}
}

func TestTemplateVMID(t *testing.T) {
	if n, ok := templateNumber(templateImage(9000)); n != 9000 || !ok {
		t.Errorf("%d, %v", n, ok)
	}
	for _, name := range []string{"", "base", "template-", "template-x", "template-09", "template-+9", "template--1", "template-99999999999"} {
		if n, ok := templateNumber(name); ok {
			t.Errorf("%q is template %d", name, n)
		}
	}
}

// TestOptionsOfOlderHandles reads a file that a version wrote which had one
// fixed set of settings.
func TestOptionsOfOlderHandles(t *testing.T) {
	const text = `{"version":1,"spec":{"VMID":1001,"UID":"` + uid1 + `","Name":"sb-1","Image":"template-9000@0",` +
		`"Resources":{"Cores":2,"MemoryMB":1024,"RootSizeGB":0},` +
		`"Hardware":{"cpulist":"0-7","balloon":true,"bridge":"vmbr1","nic_model":"e1000","firewall_group":"agents"},` +
		`"Network":{"Mode":"nat"},"IPv4":"10.77.3.4","IPv6":""},"phase":"created","mac":"bc:24:11:00:00:01"}`
	d := plain()
	d.dir = t.TempDir()
	if err := os.WriteFile(filepath.Join(d.dir, "1001-"+uid1+".json"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	h, err := d.readHandle(backend.Ref{UID: uid1})
	if err != nil {
		t.Fatal(err)
	}
	if want := (options{CPUList: "0-7", Balloon: true, Bridge: "vmbr1", NICModel: "e1000", FirewallGroup: "agents"}); h.options != want {
		t.Errorf("options %+v, want %+v", h.options, want)
	}
	ok(t, "save", d.save(h)) // an older version can read the file again
	b, err := os.ReadFile(filepath.Join(d.dir, h.file()))
	ok(t, "read", err)
	var saved bytes.Buffer
	ok(t, "compact", json.Compact(&saved, b))
	if !strings.Contains(saved.String(), `"Hardware":{"balloon":true,"bridge":"vmbr1","cpulist":"0-7","firewall_group":"agents","nic_model":"e1000"}`) {
		t.Errorf("the file is\n%s", b)
	}
}

func TestProfileOptions(t *testing.T) {
	info := backend.Info{Name: Name, Options: profileOptions}
	for text, field := range map[string]string{
		`{"bridge":"vmbr1,tag=7"}`:                    "network.bridge",
		`{"nic_model":"virtio,bridge=vmbr0"}`:         "network.model",
		`{"firewall_group":"a-name-too-long-for-it"}`: "network.firewall_group",
		`{"cpulist":"7-0"}`:                           "resources.cpulist",
		`{"cpulist":"0;1"}`:                           "resources.cpulist",
		`{"cpulist":""}`:                              "resources.cpulist",
		`{"balloon":"yes"}`:                           "resources.balloon",
	} {
		err := info.CheckOptions(agentlab.Options(text))
		if e, is := errors.AsType[*agentlab.Error](err); !is || e.Code != agentlab.CodeInvalid || e.Field != field {
			t.Errorf("%s: %v, want invalid %s", text, err, field)
		}
	}
	for vmid, valid := range map[int]bool{99: false, 100: true, 999999999: true, 1000000000: false} {
		if err := profileOptions[0].Check(vmid); (err == nil) != valid || err != nil && agentlab.CodeOf(err) != agentlab.CodeInvalid {
			t.Errorf("template %d: %v", vmid, err)
		}
	}
	if image := profileOptions[0].Image("9000"); image != "template-9000" {
		t.Errorf("image %s", image)
	}
}
