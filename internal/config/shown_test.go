package config

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
)

func TestShownHidesWhatMayBeSecret(t *testing.T) {
	text := `
backend: stage
default_profile: work
warm_pool: {base/work: 2}
api: {listen: 127.0.0.1:8843, tls_cert: /etc/cert.pem, tls_key: /etc/key.pem}
metrics: {listen: 127.0.0.1:9464, token_file: /etc/metrics}
network: {private: [{host: 10.0.0.1, port: 80, reason: shown}]}
upstream_proxy: {url: "http://canary.example:3128", credentials_file: /etc/proxy}
stage: {speed: section-canary}
`
	c, err := parse(text)
	if err != nil {
		t.Fatal(err)
	}
	out, err := json.Marshal(c.Shown())
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(out), "canary") {
		t.Errorf("a text without the tag doctor is shown: %s", out)
	}
	for _, want := range []string{`"default_profile":"work"`, `"base/work":2`, `"tls_key":"/etc/key.pem"`, `"url":"(set)"`, `"dns":""`, `"speed":"(set)"`, `"boot_minutes":3`, `"host":"10.0.0.1"`, `"reason":"shown"`} {
		if !strings.Contains(string(out), want) {
			t.Errorf("%s is missing in %s", want, out)
		}
	}
	if got, want := c.SecretFiles(), []string{"/etc/key.pem", "/etc/metrics", "/etc/proxy"}; !slices.Equal(got, want) {
		t.Errorf("the secret files are %v, not %v", got, want)
	}
}
