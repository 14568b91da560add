package redact_test

import (
	"testing"

	"github.com/miekg/dns"

	"github.com/agentlab-vm/agentlab/internal/redact"
)

// A program that takes a secret for a host asks DNS for it. Names are kept in
// lower case, with the escapes of zone files.
func TestSecretsAsNames(t *testing.T) {
	for _, secret := range []string{"ghp_AbCdEf0123456789XyZ", "Corr3ct.Horse.BATTERY", `P@ss(W0rd);"x" 'y'\z`, "Sch\xfc\x01ssel-Wert"} {
		wire := []byte{}
		label := []byte{}
		for _, c := range []byte(secret + ".") {
			if c != '.' {
				label = append(label, c)
				continue
			}
			wire, label = append(append(wire, byte(len(label))), label...), nil
		}
		name, _, err := dns.UnpackDomainName(append(wire, "\x04evil\x04test\x00"...), 0)
		if err != nil {
			t.Fatal(err)
		}
		name = dns.CanonicalName(name)
		if got := redact.New(secret).String(name); got != redact.Replacement+".evil.test." {
			t.Errorf("%q is left as %q", name, got)
		}
	}
}
