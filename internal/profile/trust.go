package profile

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// Limits on the certificates that guests trust in addition to those of their
// image.
const (
	maxCertificates     = 64
	maxCertificateBytes = 256 << 10 // of one file
)

// certificatesIn reads the PEM files of a profile.
func certificatesIn(names []string, files listFiles) ([]string, error) {
	var out []string
	for _, name := range names {
		if !filepath.IsLocal(name) {
			return nil, invalid("ca_certificates", "%q is not the path of a file below the directory of profiles", name).
				WithHint("copy the file there: ca_certificates: [corp-ca.pem]")
		}
		data, err := files(name)
		if err != nil {
			return nil, invalid("ca_certificates", "%w", err).WithHint("%s", agentlab.HintOf(err))
		}
		list, err := parseCertificates(name, data)
		if err != nil {
			return nil, invalid("ca_certificates", "%w", err).WithHint("%s", agentlab.HintOf(err))
		}
		out = append(out, list...)
	}
	if len(out) > maxCertificates {
		return nil, invalid("ca_certificates", "%d certificates exceed the limit of %d", len(out), maxCertificates)
	}
	return out, nil
}

// ReadCertificates reads the certificate files that config.yaml names.
func ReadCertificates(files []string) ([]string, error) {
	var out []string
	for _, path := range files {
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "cannot read a certificate: %w", err).WithField("guest.ca_certificates")
		}
		list, err := parseCertificates(path, data)
		if err != nil {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "%w", err).WithField("guest.ca_certificates").WithHint("%s", agentlab.HintOf(err))
		}
		out = append(out, list...)
	}
	return out, nil
}

// parseCertificates reads a PEM file of certificates, which may have comments
// between them, and returns each as PEM. A file with a private key, or with
// any other content, is rejected; the error has agentlab.CodeInvalid and
// contains nothing of the content.
func parseCertificates(name string, data []byte) ([]string, error) {
	bad := func(what string) ([]string, error) {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%s %s", name, what).WithHint("the file must contain PEM certificates, from BEGIN CERTIFICATE to END CERTIFICATE")
	}
	if len(data) > maxCertificateBytes {
		return bad("is too large")
	}
	if bytes.Contains(data, []byte("PRIVATE KEY")) {
		return bad("contains a private key; guests may receive only certificates")
	}
	var out []string
	rest := data
	for {
		var block *pem.Block
		block, rest = pem.Decode(rest)
		if block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			return bad("contains a PEM block that is not a certificate")
		}
		if _, err := x509.ParseCertificate(block.Bytes); err != nil {
			return bad("contains an invalid certificate")
		}
		out = append(out, string(pem.EncodeToMemory(&pem.Block{Type: block.Type, Bytes: block.Bytes})))
	}
	if len(out) == 0 || bytes.Contains(rest, []byte("-----BEGIN")) {
		return bad("contains no complete certificate")
	}
	return out, nil
}

// TrustCertificates makes guests of every profile trust certificates, each as PEM, in
// addition to those of the profile. It must be called before the library is
// used.
func (l *Library) TrustCertificates(list []string) *Library {
	l.trusted = list
	return l
}

// trustCertificates adds the certificates that all guests trust.
func (d *Doc) trustCertificates(list []string) {
	for _, c := range list {
		if !slices.ContainsFunc(d.cas, func(o string) bool { return strings.TrimSpace(o) == strings.TrimSpace(c) }) {
			d.cas = append(d.cas, c)
		}
	}
}
