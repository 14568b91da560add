package profile

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// certificate makes a certificate and its key, both as PEM.
func certificate(t *testing.T, name string) (cert, key string) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &k.PublicKey, k)
	if err != nil {
		t.Fatal(err)
	}
	pk, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})), string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pk}))
}

func TestCertificates(t *testing.T) {
	one, key := certificate(t, "one")
	two, _ := certificate(t, "two")
	ours, _ := certificate(t, "ours")
	dir, outside := t.TempDir(), t.TempDir()
	write(t, outside, "x.pem", one)
	for name, text := range map[string]string{
		"both.pem": "# our CAs\n" + one + "\n# and\n" + two, "key.pem": one + key, "empty.pem": "", "text.pem": "hello",
		"half.pem": one + two[:len(two)/2], "broken.pem": "-----BEGIN CERTIFICATE-----\naGVsbG8=\n-----END CERTIFICATE-----\n",
		"request.pem": strings.ReplaceAll(one, "CERTIFICATE", "CERTIFICATE REQUEST"), "large.pem": one + strings.Repeat("#\n", 200<<10),
	} {
		write(t, dir, name, text)
	}
	lib := NewLibrary(dir, rulesInfo).Trust([]string{ours})
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
		if agentlab.CodeOf(err) != agentlab.CodeInvalid || strings.Contains(err.Error(), "MIG") {
			t.Errorf("%s: %v", bad, err)
		}
	}
}
