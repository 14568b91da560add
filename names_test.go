package agentlab

import (
	"strings"
	"testing"
)

func TestValidateRevision(t *testing.T) {
	for rev, ok := range map[string]bool{
		"": true, "HEAD~1": true, "main@{yesterday}": true, ":/fix it": true, "v1^{commit}": true, "-x": false, "a\nb": false, "a\x1b[2J": false, "\xff": false,
		strings.Repeat("x", MaxRefBytes): true, strings.Repeat("x", MaxRefBytes+1): false,
	} {
		if err := ValidateRevision(rev); (err == nil) != ok {
			t.Errorf("ValidateRevision(%q) = %v, want ok %v", rev, err, ok)
		}
		if err := (&Job{Task: "x", Agent: "shell", Mode: "dangerous", Bundled: true, Ref: rev}).Validate(); (err == nil) != ok {
			t.Errorf("a job with a bundle of %q: %v, want ok %v", rev, err, ok)
		}
	}
}

func TestValidateRef(t *testing.T) {
	for ref, ok := range map[string]bool{
		"": true, "main": true, "feature/ü-1": true, "v1.0": true,
		"-x": false, "a..b": false, "a b": false, "a\nb": false, "a\x7f": false,
		"a\u009b2J": false, "a\x9b2J": false, "a\u202eb": false, "a\u2066b": false, "a\u2028b": false, "a\xff": false,
	} {
		if err := ValidateRef(ref); (err == nil) != ok {
			t.Errorf("ValidateRef(%q) = %v, want ok %v", ref, err, ok)
		}
	}
}

// A URL is stored and shown, so nothing in it may be a credential.
func TestValidateRepoURL(t *testing.T) {
	for url, ok := range map[string]bool{
		"": true, "https://example.com/org/repo.git": true, "http://example.com:8080/r": true, "git://example.com/r": true,
		"ssh://git@example.com/r": true, "git+ssh://git@example.com/r": true, "git@example.com:org/r": true,
		"https://TOKEN@example.com/r": false, "https://u:p@example.com/r": false, "https://@example.com/r": false,
		"https://example.com/r?access_token=x": false, "https://example.com/r?": false, "https://example.com/r#x": false,
		"git://u@example.com/r": false, "ssh://u:p@example.com/r": false,
		"ext::sh -c x": false, "file:///etc": false, "/etc": false, "-x": false,
		"https://example.com/\u202er": false, "git@example.com:\u009br": false, "git@example.com:\xff": false,
	} {
		if err := ValidateRepoURL(url); (err == nil) != ok {
			t.Errorf("ValidateRepoURL(%q) = %v, want ok %v", url, err, ok)
		} else if err != nil && HintOf(err) == "" {
			t.Errorf("ValidateRepoURL(%q) gives no hint", url)
		}
	}
}
