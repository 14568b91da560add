package runner

import (
	"bytes"
	"os"
	"os/exec"
	"testing"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/test/fakenet"
)

// Programs with a trust store of their own are pointed to the system's, unless
// the secrets bundle says otherwise, and only where there is something to trust.
func TestTrustVariables(t *testing.T) {
	r := &Runner{resp: guestapi.BootstrapResponse{Env: map[string]string{"SSL_CERT_FILE": "/mine.pem", "TOKEN": "x", "not a name": "y"}}}
	if got := r.agentVars(); len(got) != 2 || got["TOKEN"] != "x" || got["SSL_CERT_FILE"] != "/mine.pem" {
		t.Errorf("without certificates: %v", got)
	}
	r.resp.CACertificates = []string{"a certificate"}
	got := r.agentVars()
	for name, want := range map[string]string{"SSL_CERT_FILE": "/mine.pem", "REQUESTS_CA_BUNDLE": trustBundle, "GIT_SSL_CAINFO": trustBundle, "NODE_EXTRA_CA_CERTS": trustBundle, "TOKEN": "x"} {
		if got[name] != want {
			t.Errorf("%s is %q, want %q", name, got[name], want)
		}
	}
	if len(got) != 5 {
		t.Errorf("%v", got)
	}
}

// The certificates are in the system's trust store afterwards, each of them,
// also when a runner that was killed does it again. The test runs itself again
// where the store is its own.
func TestTrustStore(t *testing.T) {
	const inside = "AGENTLAB_TEST_TRUST"
	if os.Getenv(inside) == "" {
		if os.Geteuid() != 0 {
			t.Skip("needs root: it makes a mount namespace")
		}
		if _, err := exec.LookPath("update-ca-certificates"); err != nil {
			t.Skip("there is no update-ca-certificates here")
		}
		script := "mkdir -p " + trustDir + " && mount -t tmpfs none " + trustDir + " && mkdir $D/certs && cp -a /etc/ssl/certs/. $D/certs && mount --bind $D/certs /etc/ssl/certs && exec \"$@\""
		cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "--propagation", "private", "sh", "-ec", script, "sh", os.Args[0], "-test.run", "^"+t.Name()+"$", "-test.v")
		cmd.Env = append(os.Environ(), inside+"=1", "D="+t.TempDir())
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	r := &Runner{dir: dir(t.TempDir())}
	for range 2 {
		ca, err := fakenet.NewCA()
		if err != nil {
			t.Fatal(err)
		}
		r.resp.CACertificates = append(r.resp.CACertificates, string(ca.PEM()))
	}
	for range 2 {
		if err := r.trust(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	bundle, err := os.ReadFile(trustBundle)
	if err != nil {
		t.Fatal(err)
	}
	for i, cert := range r.resp.CACertificates {
		if bytes.Count(bundle, []byte(cert)) != 1 {
			t.Errorf("certificate %d is %d times in %s", i, bytes.Count(bundle, []byte(cert)), trustBundle)
		}
	}
	r.resp.CACertificates = []string{"no certificate"}
	r.dir = dir("/proc/nowhere")
	if err := r.trust(t.Context()); err == nil {
		t.Error("a certificate that cannot be installed is not an error")
	}
}
