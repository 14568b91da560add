package server

import (
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// writePair writes a self-signed certificate with that serial number, and its
// key.
func writePair(t *testing.T, certFile, keyFile string, serial int64) {
	t.Helper()
	cert, text := selfSigned(t, serial)
	key, err := x509.MarshalPKCS8PrivateKey(cert.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string][]byte{certFile: text, keyFile: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key})} {
		if err := os.WriteFile(name, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// TestCertificateIsRenewed: a new pair is used without a restart, half a one
// is not.
func TestCertificateIsRenewed(t *testing.T) {
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	writePair(t, cert, key, 1)
	now, warned := time.Now(), 0
	c, err := LoadCertificate(cert, key, func() time.Time { return now }, func(error) { warned++ })
	if err != nil {
		t.Fatal(err)
	}
	serial := func() int64 {
		got, err := c.TLS.GetCertificate(nil)
		if err != nil {
			t.Fatal(err)
		}
		return got.Leaf.SerialNumber.Int64()
	}
	if !c.Ours("lab.example") || c.Ours("evil.example") {
		t.Error("names")
	}
	later := filepath.Join(dir, "later.pem")
	writePair(t, later, later+".key", 2)
	if err := os.Rename(later, cert); err != nil { // the key is still the old one
		t.Fatal(err)
	}
	if now = now.Add(certificateEvery); serial() != 1 || warned != 1 {
		t.Errorf("half a pair: serial %d, warned %d times", serial(), warned)
	}
	if err := os.Rename(later+".key", key); err != nil {
		t.Fatal(err)
	}
	if serial() != 1 {
		t.Error("looked too often")
	}
	if now = now.Add(certificateEvery); serial() != 2 || warned != 1 {
		t.Errorf("renewed: serial %d, warned %d times", serial(), warned)
	}
	if err := os.Remove(cert); err != nil {
		t.Fatal(err)
	}
	if now = now.Add(certificateEvery); serial() != 2 || warned != 2 {
		t.Errorf("gone: serial %d, warned %d times", serial(), warned)
	}
}
