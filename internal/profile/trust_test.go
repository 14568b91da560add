package profile

import (
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/test/fakenet"
)

// certificate makes the certificate of an authority.
func certificate(t *testing.T) string {
	t.Helper()
	ca, err := fakenet.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	return string(ca.PEM())
}

func TestCertificates(t *testing.T) {
	one, two, ours := certificate(t), certificate(t), certificate(t)
	const key = "-----BEGIN PRIVATE KEY-----\naGVsbG8=\n-----END PRIVATE KEY-----\n"
	dir, outside := t.TempDir(), t.TempDir()
	write(t, outside, "x.pem", one)
	for name, text := range map[string]string{
		"both.pem": "# our CAs\n" + one + "\n# and\n" + two, "key.pem": one + key, "empty.pem": "", "text.pem": "hello",
		"half.pem": one + two[:len(two)/2], "broken.pem": "-----BEGIN CERTIFICATE-----\naGVsbG8=\n-----END CERTIFICATE-----\n",
		"request.pem": strings.ReplaceAll(one, "CERTIFICATE", "CERTIFICATE REQUEST"), "large.pem": one + strings.Repeat("#\n", 200<<10),
	} {
		write(t, dir, name, text)
	}
	lib := NewLibrary(dir, rulesInfo).TrustCertificates([]string{ours})
	get := func(list string) ([]string, error) {
		e := lib.Check("name: p\nca_certificates: [" + list + "]\n")
		return e.Profile.CACertificates, e.Err
	}
	if got, err := get("both.pem"); err != nil || len(got) != 3 || got[0] != one || got[1] != two || got[2] != ours {
		t.Errorf("%d certificates, %v", len(got), err)
	}
	if got, err := get(""); err != nil || len(got) != 1 || got[0] != ours {
		t.Errorf("none of its own: %d certificates, %v", len(got), err)
	}
	for _, bad := range []string{"key.pem", "empty.pem", "text.pem", "half.pem", "broken.pem", "request.pem", "large.pem", "missing.pem", "../x.pem", outside + "/x.pem"} {
		_, err := get(bad)
		if agentlab.CodeOf(err) != agentlab.CodeInvalid || strings.Contains(err.Error(), "aGVsbG8") {
			t.Errorf("%s: %v", bad, err)
		}
	}
}
