package pve

import (
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"io"
	"net/url"
	"os"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

var (
	tokenID     = lazyre.New(`^[^\s:/!@=%]+@[A-Za-z][A-Za-z0-9._-]+![A-Za-z][A-Za-z0-9._-]+$`)
	tokenSecret = lazyre.New(`^[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$`)
)

func checkURL(s string) (string, error) {
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "https" || u.Hostname() == "" || u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" {
		return "", agentlab.Errorf(agentlab.CodeInvalid, "%q is not a valid API URL", agentlab.OneLine(s, 200)).WithField("url").WithHint("such as https://127.0.0.1:8006")
	}
	return "https://" + u.Host, nil
}

// authorization returns the header for a token. The node decodes percent signs
// in it once, so neither part may contain one.
func authorization(id, secret string) (string, error) {
	if !tokenID.MatchString(id) {
		return "", agentlab.Errorf(agentlab.CodeInvalid, "%q is not a token name", agentlab.OneLine(id, 80)).WithField("token_id").WithHint("such as agentlab@pve!controller")
	}
	if !tokenSecret.MatchString(secret) {
		return "", agentlab.Errorf(agentlab.CodeInvalid, "invalid token secret").WithField("token_file").WithHint("a secret is a UUID, which pveum user token add prints once")
	}
	return "PVEAPIToken=" + id + "=" + secret, nil
}

// ReadTokenFile reads the secret of a token from a file that only its owner
// may read. The file contains the secret, or USER@REALM!NAME=SECRET with the
// token ID; surrounding blanks and newlines are ignored. Codes: denied (others
// may read it), invalid, unavailable.
func ReadTokenFile(path, id string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeUnavailable, "cannot read the API token: %w", err).WithField("token_file").WithHint("run scripts/create_api_token.sh to create a token and its file")
	}
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil || !st.Mode().IsRegular() {
		return "", agentlab.Errorf(agentlab.CodeInvalid, "%s is not a file", path).WithField("token_file").WithHint("run scripts/create_api_token.sh to create a token and its file")
	}
	if st.Mode().Perm()&0o077 != 0 {
		return "", agentlab.Errorf(agentlab.CodeDenied, "%s is accessible to other users (mode %04o)", path, st.Mode().Perm()).WithField("token_file").WithHint("chmod 600 %s; if the machine has other users, create a new token", path)
	}
	b, err := io.ReadAll(io.LimitReader(f, 4096))
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeUnavailable, "cannot read the API token: %w", err).WithField("token_file")
	}
	secret := strings.TrimSpace(string(b))
	if named, rest, ok := strings.Cut(secret, "="); ok {
		if named != id {
			return "", agentlab.Errorf(agentlab.CodeInvalid, "%s belongs to a token other than token_id", path).WithField("token_file").WithHint("set token_id to that token, or write a new file: scripts/create_api_token.sh --rotate")
		}
		secret = rest
	}
	if !tokenSecret.MatchString(secret) {
		return "", agentlab.Errorf(agentlab.CodeInvalid, "%s does not contain a token secret", path).WithField("token_file").WithHint("a secret is a UUID, which pveum user token add prints once")
	}
	return secret, nil
}

// tlsConfig returns the configuration that authenticates the server. The check
// cannot be disabled.
func tlsConfig(ca []byte, fingerprint string) (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	switch {
	case len(ca) > 0 && fingerprint != "":
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "a CA and a fingerprint are mutually exclusive").WithField("fingerprint")
	case fingerprint != "":
		want, err := hex.DecodeString(strings.ReplaceAll(fingerprint, ":", ""))
		if err != nil || len(want) != sha256.Size {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "%q is not a SHA-256 fingerprint", agentlab.OneLine(fingerprint, 120)).WithField("fingerprint").WithHint("64 hexadecimal digits, as printed by openssl x509 -fingerprint -sha256")
		}
		c.InsecureSkipVerify = true
		c.VerifyConnection = func(s tls.ConnectionState) error { return checkPin(want, s) }
	case len(ca) > 0:
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(ca) {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "the CA file contains no certificate").WithField("ca_file").WithHint("such as /etc/pve/pve-root-ca.pem of the node")
		}
	}
	return c, nil
}

func checkPin(want []byte, s tls.ConnectionState) error {
	if len(s.PeerCertificates) == 0 {
		return agentlab.Errorf(agentlab.CodeDenied, "the node sent no certificate")
	}
	got := sha256.Sum256(s.PeerCertificates[0].Raw)
	if subtle.ConstantTimeCompare(want, got[:]) != 1 {
		return agentlab.Errorf(agentlab.CodeDenied, "the certificate of the node's API has fingerprint %s instead of the configured one", colons(got[:])).WithField("fingerprint").
			WithHint("the connection may be intercepted; if the certificate was renewed, compare the fingerprint with the output of pvenode cert info on the node, then configure it")
	}
	return nil
}

// colons formats a fingerprint like Proxmox.
func colons(b []byte) string {
	parts := make([]string, len(b))
	for i, x := range b {
		parts[i] = strings.ToUpper(hex.EncodeToString([]byte{x}))
	}
	return strings.Join(parts, ":")
}

// certificateError returns the error for a certificate that no trusted CA has
// signed, or that has another name or date. It returns nil for any other err.
func certificateError(err error) error {
	var verification *tls.CertificateVerificationError
	if !errors.As(err, &verification) {
		return nil
	}
	return agentlab.Errorf(agentlab.CodeDenied, "the certificate of the node's API is not trusted: %w", err).WithField("ca_file").
		WithHint("set ca_file to the cluster's CA (/etc/pve/pve-root-ca.pem of the node), or set the certificate's fingerprint; and use a name or address in url that the certificate contains")
}
