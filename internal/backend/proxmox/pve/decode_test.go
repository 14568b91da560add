package pve

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestLooseScalars(t *testing.T) {
	ints := map[string]int64{
		`512`: 512, `"512"`: 512, `"100"`: 100, `null`: 0, `""`: 0, `2.5`: 2, `"2.5"`: 2, `-1`: -1, `true`: 1, `1e3`: 1000, `53687091200`: 53687091200,
	}
	for in, want := range ints {
		var got Int
		if err := json.Unmarshal([]byte(in), &got); err != nil || int64(got) != want {
			t.Errorf("Int of %s is %d (%v), want %d", in, got, err, want)
		}
	}
	for _, in := range []string{`"abc"`, `{}`, `[1]`, `"NaN"`, `1e300`} {
		var got Int
		if err := json.Unmarshal([]byte(in), &got); err == nil {
			t.Errorf("Int of %s is %d, want an error", in, got)
		}
	}
	bools := map[string]bool{`1`: true, `0`: false, `"1"`: true, `"0"`: false, `true`: true, `false`: false, `null`: false, `""`: false, `"on"`: true}
	for in, want := range bools {
		var got Bool
		if err := json.Unmarshal([]byte(in), &got); err != nil || bool(got) != want {
			t.Errorf("Bool of %s is %v (%v), want %v", in, got, err, want)
		}
	}
	var b Bool
	if err := json.Unmarshal([]byte(`"maybe"`), &b); err == nil {
		t.Error("Bool of \"maybe\" is no error")
	}
	strs := map[string]string{`"x"`: "x", `5`: "5", `2.5`: "2.5", `null`: "", `"\u00e9"`: "é"}
	for in, want := range strs {
		var got Str
		if err := json.Unmarshal([]byte(in), &got); err != nil || string(got) != want {
			t.Errorf("Str of %s is %q (%v), want %q", in, got, err, want)
		}
	}
}

// The configuration as 8.4 and 9.2 have sent it: integers for some options,
// strings for others.
func TestConfigOfTheRecordings(t *testing.T) {
	const recorded = `{"cores":4,"description":"line one: é\nline two","cpulimit":"2.5","digest":"5013604c32d056572e9f681fb3b4a90491ba18f5","onboot":0,"memory":"512","tags":"a;agentlab;b","balloon":0,"agent":"1","net0":"virtio=BC:24:11:00:00:02,bridge=vmbr1","scsi0":"local-zfs:base-9000-disk-0/vm-101-disk-0,size=128M","clipboard":null,"odd":{"a":1}}`
	var c Config
	if err := json.Unmarshal([]byte(recorded), &c); err != nil {
		t.Fatal(err)
	}
	if c["cores"] != "4" || c["memory"] != "512" || c["cpulimit"] != "2.5" || c["onboot"] != "0" || c["agent"] != "1" {
		t.Errorf("numbers: %v", c)
	}
	if c["description"] != "line one: é\nline two" || c.Digest() != "5013604c32d056572e9f681fb3b4a90491ba18f5" {
		t.Errorf("texts: %v", c)
	}
	if _, ok := c["clipboard"]; ok {
		t.Error("null is an option")
	}
	if c["odd"] != `{"a":1}` {
		t.Errorf("an option that is an object is %q: an audit must see it", c["odd"])
	}
	p := ParseProps(c["net0"])
	if mac, ok := p.Get("virtio"); !ok || mac != "BC:24:11:00:00:02" {
		t.Errorf("net0: %v", p)
	}
	if vol, ok := ParseProps(c["scsi0"]).Get(""); !ok || vol != "local-zfs:base-9000-disk-0/vm-101-disk-0" {
		t.Errorf("scsi0: %v", vol)
	}
	if _, ok := p.Get("firewall"); ok {
		t.Error("a property that is not there was found")
	}
}

func TestUPIDs(t *testing.T) {
	for _, s := range []string{
		"UPID:pve:00001FD8:0003D7EE:6B00F8DB:qmclone:9000:agentlab@pve!ctl:",
		"UPID:pve:000025AE:000408FB:6B00F959:imgdel:9998@local-zfs:root@pam:",
		"UPID:pve:00007DB6:000261D7:6B00F51E:qmmove:101-unused0>102-scsi1:root@pam!t1:",
		"UPID:pve:00007DB6:1000261D7:6B00F51E:imgcopy::root@pam:",
	} {
		u, err := ParseUPID(s)
		if err != nil || u.Node() != "pve" || u.Type() == "" {
			t.Errorf("%s: %v %s", s, err, u.Type())
		}
	}
	for _, s := range []string{
		"", "UPID", "OK", "UPID:pve:00001FD8:0003D7EE:6B00F8DB:qmclone:9000:root@pam", // the last colon belongs to it
		"UPID:pve:XYZ:0003D7EE:6B00F8DB:qmclone:9000:root@pam:", "UPID:p/e:00001FD8:0003D7EE:6B00F8DB:qmclone:9000:root@pam:",
		"UPID::00001FD8:0003D7EE:6B00F8DB:qmclone:9000:root@pam:", "UPID:pve:00001FD8:0003D7EE:6B00F8DB:qmclone:9000\n:root@pam:",
	} {
		if u, err := ParseUPID(s); err == nil {
			t.Errorf("%q was taken for %s", s, u)
		}
	}
}

func TestVersions(t *testing.T) {
	for in, want := range map[string]Version{
		"8.4.21": {8, 4, "8.4.21"}, "9.2.6": {9, 2, "9.2.6"}, "7.4-17": {7, 4, "7.4-17"}, "10": {10, 0, "10"}, "9.0.0~11": {9, 0, "9.0.0~11"},
	} {
		if got, err := parseVersion(in); err != nil || got != want {
			t.Errorf("%s: %v %v", in, got, err)
		}
	}
	if v, err := parseVersion("", "8.4"); err != nil || v.Major != 8 || v.Minor != 4 {
		t.Errorf("release alone: %v %v", v, err)
	}
	if _, err := parseVersion("", "x"); err == nil {
		t.Error("no version was taken for one")
	}
	if v := (Version{Major: 8, Minor: 4}); !v.AtLeast(8, 4) || !v.AtLeast(8, 0) || v.AtLeast(9, 0) || v.AtLeast(8, 5) {
		t.Error("AtLeast")
	}
}

// Decoders see what guests and foreign VMs have put into names, descriptions
// and answers of the agent: they return something or an error, and never both
// a failure and a value.
func FuzzDecode(f *testing.F) {
	for _, s := range []string{
		`{"cores":4,"memory":"512","digest":"x","odd":[1]}`, `[{"vmid":9000,"status":"stopped","tags":"tpl","template":1}]`,
		`{"result":[{"name":"eth0","hardware-address":"bc:24:11:00:00:02","ip-addresses":[{"ip-address":"10.77.0.55","ip-address-type":"ipv4","prefix":16}]},{"name":"x"}]}`,
		`{"status":"stopped","exitstatus":"WARNINGS: 1"}`, `null`, `[]`, `"UPID:pve:000025AE:000408FB:6B00F959:imgdel:9998@local-zfs:root@pam:"`,
		`{"/vms/101":{"VM.Audit":0},"/":{"Sys.Audit":1}}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var c Config
		if json.Unmarshal(b, &c) == nil {
			for k := range c {
				for _, p := range ParseProps(c[k]) {
					if strings.Contains(p.Key, ",") || strings.Contains(p.Value, ",") {
						t.Errorf("property %v of %q", p, c[k])
					}
				}
			}
		}
		for _, into := range []any{&[]VM{}, &Status{}, &Task{}, &[]Volume{}, &Permissions{}, &[]Storage{}, &[]Node{}} {
			_ = json.Unmarshal(b, into)
		}
		if ifs, err := decodeInterfaces(b); err != nil && ifs != nil {
			t.Error("interfaces with an error")
		} else {
			for _, i := range ifs {
				if i.MAC != nil && len(i.MAC) != 6 || !utf8.ValidString(i.Name) || len(i.Name) > 80 {
					t.Errorf("interface %+v", i)
				}
			}
		}
		if u, err := ParseUPID(string(b)); err == nil && (u.Node() == "" || u.Type() == "" || strings.ContainsAny(string(u), "/\n")) {
			t.Errorf("task %q", u)
		}
		if _, err := parseVersion(string(b)); err != nil && err.Error() == "" {
			t.Error("an error without words")
		}
		if flt := parseDiagnosis(string(b)); flt != nil && (flt.Message == "" || flt.text() == "") {
			t.Error("a fault without words")
		}
		f4 := fault4xx(500, "x", b)
		if f4.Message == "" || strings.Contains(f4.Message, "\n") {
			t.Errorf("fault %+v", f4)
		}
	})
}
