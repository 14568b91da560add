package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/test/fakenet"
)

// A host whose certificate the operator's own authority has signed is trusted
// by a guest that gets that authority's certificate, before the repository is
// fetched, and by no other guest.
func TestCACertificates(t *testing.T) {
	t.Parallel()
	l, n := newNetLab(t)
	ca, err := fakenet.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.HandleHTTPS("intranet.example.com", 443, ca, says("the intranet answers")); err != nil {
		t.Fatal(err)
	}
	l.profile("plain", "name: plain\n")
	l.profile("trusting", "name: trusting\nca_certificates: [corp.pem]\n")
	if err := os.WriteFile(filepath.Join(l.home, "config", "profiles", "corp.pem"), ca.PEM(), 0o600); err != nil {
		t.Fatal(err)
	}
	const task = `curl -sS -m 20 https://intranet.example.com/ 2>&1 || true
python3 -c 'import ssl, urllib.request; print("python:", urllib.request.urlopen("https://intranet.example.com/", timeout=20).read().decode().strip())' 2>&1 || true
env | grep -E '^(SSL_CERT_FILE|REQUESTS_CA_BUNDLE|GIT_SSL_CAINFO|NODE_EXTRA_CA_CERTS)=' | sort || true
true`
	for profile, trusts := range map[string]bool{"plain": false, "trusting": true} {
		j, r := l.job("--profile", profile, "--agent", "shell", "--task", task)
		log := l.ok("job", "logs", j.ID)
		if j.Status != "COMPLETED" {
			t.Fatalf("%s: %+v\n%v\n%s", profile, j, r, log)
		}
		answers, vars := strings.Count(log, "the intranet answers"), strings.Count(log, "=/etc/ssl/certs/ca-certificates.crt")
		if trusts && (answers != 2 || vars != 4) || !trusts && answers+vars > 0 {
			t.Errorf("%s: %d answers, %d variables:\n%s", profile, answers, vars, log)
		}
	}
	l.noSandboxes()
}
