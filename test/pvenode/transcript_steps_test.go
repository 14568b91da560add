package pvenode_test

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"mime/multipart"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab/test/guard"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

var scriptT9 = script{
	setup: func(r *replay) {
		template(r)
		r.sh("qm set 9000 --memory 300 --cores 2")
		clones(r, 101, 102)
		snippets(r)
		if err := os.Remove(r.n.HostPath("/var/lib/vz/snippets/hook.sh")); err != nil {
			r.t.Fatal(err)
		}
		r.qcow2("/var/lib/vz/import/cloud.qcow2", 64*mib, 196616)
		volumes(r, "vm-9999-agentlab-ws2 1G", "vm-9999-disk-0 1G", "vm-9999-f 64M", "vm-9999-hot 1G", "vm-9999-p1 64M")
		r.n.ZFSSnapshot("local-zfs:vm-9999-f", "keep")
		r.n.ZFSClone("local-zfs:vm-9999-f", "keep", "local-zfs:vm-9999-fork")
	},
	steps: []hidden{
		{before: "PUT /nodes/pve/qemu/102/config scsi6=local:1", do: func(r *replay) {
			if r.version == "8.4" { // there the tool that makes the file was slow
				r.n.Fail("alloc", pvenode.Fault{Delay: slowProxy * 3 / 2})
			}
		}},
		{before: "qm config 102", nth: 2, do: func(r *replay) {
			r.waitFor("scsi6 of VM 102", func() bool {
				return strings.Contains(r.n.ConfigFile(102), "scsi6")
			})
		}},
	},
}

// waitFor waits for something that the API can only be asked for.
func (r *replay) waitFor(what string, is func() bool) {
	r.t.Helper()
	limit := time.After(guard.Patience)
	for !is() {
		select {
		case <-limit:
			r.t.Fatalf("%s did not appear", what)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// sparseFile makes a raw disk image of nothing.
func (r *replay) sparseFile(path string, size int64) {
	r.t.Helper()
	r.writeFile(path, 0o600, "")
	if err := os.Truncate(r.n.HostPath(path), size); err != nil {
		r.t.Fatal(err)
	}
}

// qcow2 makes what begins as a qcow2 image of a disk of size bytes.
func (r *replay) qcow2(path string, size uint64, fileSize int64) {
	r.t.Helper()
	head := append([]byte("QFI\xfb"), binary.BigEndian.AppendUint32(nil, 3)...)
	head = append(head, make([]byte, 16)...)
	r.writeFile(path, 0o600, string(binary.BigEndian.AppendUint64(head, size)))
	if err := os.Truncate(r.n.HostPath(path), fileSize); err != nil {
		r.t.Fatal(err)
	}
}

// upload sends a file as a browser does.
func (r *replay) upload(content, name string) answer {
	var body bytes.Buffer
	w := multipart.NewWriter(&body)
	_ = w.WriteField("content", content)
	part, err := w.CreateFormFile("filename", name)
	if err != nil {
		r.t.Fatal(err)
	}
	_, _ = part.Write([]byte("x"))
	_ = w.Close()
	return r.do(http.MethodPost, "/api2/json/nodes/pve/storage/local/upload", w.FormDataContentType(), body.String(), nil)
}

func rawUpload(r *replay) []string {
	var out []string
	for _, u := range [][2]string{{"snippets", "a.yaml"}, {"iso", "x.iso"}, {"import", "x.qcow2"}, {"images", "x.raw"}} {
		a := r.upload(u[0], u[1])
		out = append(out, "HTTP/1.1 "+a.status, a.body)
	}
	return out
}

// rawFirewall shows the files of the VM's and of the cluster's firewall.
func rawFirewall(r *replay) []string {
	var out []string
	for _, name := range []string{"101", "cluster"} {
		out = append(out, prefixed("  fw| ", r.n.FirewallFile(name))...)
	}
	return out
}

func rawTLS(r *replay) []string {
	conn, err := tls.Dial("tcp", r.n.Addr(), &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		r.t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	c := conn.ConnectionState().PeerCertificates[0]
	names := []string{}
	for _, ip := range c.IPAddresses {
		s := ip.String()
		if s == "::1" {
			s = "0:0:0:0:0:0:0:1"
		}
		names = append(names, "IP Address:"+s)
	}
	for i, n := range c.DNSNames { // the recorded one has the first before the node's address; openssl shows them in the order of the certificate
		at := "DNS:" + n
		if i == 0 && len(names) > 2 {
			names = append(names[:2], append([]string{at}, names[2:]...)...)
			continue
		}
		names = append(names, at)
	}
	sum := sha256.Sum256(c.Raw)
	var hex []string
	for _, b := range sum {
		hex = append(hex, fmt.Sprintf("%02X", b))
	}
	return []string{
		"subject=OU = " + strings.Join(c.Subject.OrganizationalUnit, ",") + ", O = " + strings.Join(c.Subject.Organization, ",") + ", CN = " + c.Subject.CommonName,
		"issuer=CN = " + c.Issuer.CommonName + ", OU = " + strings.Join(c.Issuer.OrganizationalUnit, ",") + ", O = " + strings.Join(c.Issuer.Organization, ","),
		"X509v3 Subject Alternative Name:", strings.Join(names, ", "),
		"sha256 Fingerprint=" + strings.Join(hex, ":"),
	}
}

// pidOf is a body that tells a process, as recorded; the real number is kept
// for the calls that name the recorded one.
func (r *replay) pidOf(recorded, body string) string {
	var a struct{ Data struct{ PID json.Number } }
	if err := json.Unmarshal([]byte(body), &a); err != nil {
		r.t.Fatalf("no process in %q", body)
	}
	r.pids[recorded] = a.Data.PID.String()
	return body
}

// firewallNames are the files in the firewall's directory.
func firewallNames(r *replay) []string {
	var out []string
	for _, n := range r.n.FirewallFiles() {
		out = append(out, filepath.Base(n))
	}
	return out
}
