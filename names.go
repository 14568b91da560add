package agentlab

import (
	"cmp"
	"crypto/rand"
	"encoding/base32"
	"net/url"
	"strings"
)

// The checks do not use regular expressions, because this package is part of
// agent-runner: compiling one would delay the boot of every guest by 20 ms.
const (
	letters = "abcdefghijklmnopqrstuvwxyz"
	digits  = "0123456789"
)

// ValidateName checks the name of a sandbox, profile, image or workspace: a
// DNS label (RFC 1123: 1 to 63 of a-z 0-9 -, not at the ends), because it
// becomes a hostname. It must not be all digits, so that a name is never
// confused with a VMID.
func ValidateName(s string) error {
	bad := s == "" || len(s) > 63 || s[0] == '-' || s[len(s)-1] == '-' || strings.Trim(s, digits) == ""
	if bad || strings.Trim(s, letters+digits+"-") != "" {
		return Errorf(CodeInvalid, "%q is not a valid name", s).WithField("name").
			WithHint("use 1 to 63 lower-case letters, digits and hyphens, not only digits, with no hyphen at either end")
	}
	return nil
}

// WorkBranch is the branch for the work of the job with an ID: the requested one, or
// agentlab/ID if that is "".
func WorkBranch(requested, id string) string { return cmp.Or(requested, "agentlab/"+id) }

var lower32 = base32.NewEncoding("abcdefghijkmnpqrstuvwxyz23456789").WithPadding(base32.NoPadding)

func randomID(bytes int) string {
	b := make([]byte, bytes)
	_, _ = rand.Read(b) // crypto/rand.Read never fails since Go 1.24
	return lower32.EncodeToString(b)
}

// NewUID returns a new ownership mark of 128 random bits: 26 characters of a-z
// and 2-9.
func NewUID() string { return randomID(16) }

// NewJobID returns a new job ID: "job-" and 13 characters (64 random bits).
func NewJobID() string { return "job-" + randomID(8) }

// NewToken returns a new bearer token of 256 random bits.
func NewToken() string { return randomID(32) }

// isID reports whether s has the format of an ID: the prefix and what randomID(8)
// returns.
func isID(s, prefix string) bool {
	random, ok := strings.CutPrefix(s, prefix)
	return ok && len(random) == 13 && strings.Trim(random, letters+digits[2:]) == ""
}

// ValidateJobID checks the format of a job ID.
func ValidateJobID(s string) error {
	if !isID(s, "job-") {
		return Errorf(CodeInvalid, "%q is not a job id", s).WithField("job").WithHint("see 'agentlab job list'")
	}
	return nil
}

// ValidateRef checks a git ref or commit given by a user, by the rules of
// git-check-ref-format(1) that matter for safety: git never reads it as an
// option, a range or a refspec. It is printable text, so it can be shown
// unchanged. Empty means the repo's default and is valid.
func ValidateRef(ref string) error {
	if ref == "" {
		return nil
	}
	bad := len(ref) > MaxRefBytes || ref[0] == '-' || ref[0] == '/' || strings.HasSuffix(ref, "/") ||
		strings.HasSuffix(ref, ".") || strings.HasSuffix(ref, ".lock") ||
		strings.Contains(ref, "..") || strings.Contains(ref, "@{") || strings.Contains(ref, "//") ||
		strings.ContainsAny(ref, " ~^:?*[\\") || !IsPrintable(ref)
	if bad {
		return Errorf(CodeInvalid, "%q is not a git branch, tag or commit", ref).WithField("ref")
	}
	return nil
}

// IsHex reports whether s consists of at least the given number of lower-case
// hexadecimal digits and at most 64, like an abbreviated git object ID.
func IsHex(s string, least int) bool {
	return len(s) >= least && len(s) <= 64 && strings.Trim(s, "0123456789abcdef") == ""
}

// ValidateRevision checks the revision that a git bundle was created from,
// such as HEAD~1. It may contain characters that a ref may not: a guest looks
// for a ref with that name in the bundle and otherwise uses the bundle's HEAD.
// Empty is valid.
func ValidateRevision(rev string) error {
	if len(rev) > MaxRefBytes || strings.HasPrefix(rev, "-") || !IsPrintable(rev) {
		return Errorf(CodeInvalid, "%q is not a git revision", rev).WithField("ref")
	}
	return nil
}

// ValidateRepoURL checks the URL of a repository that a guest clones: an http,
// https, git or ssh URL, or the scp-like form host:path. Local paths and
// transports of remote helpers (ext::, file:) are rejected. So is anything
// that may be a credential, because a URL is stored and shown: passwords,
// userinfo except with ssh, and for http and https a query or fragment. Empty
// means no repo and is valid.
func ValidateRepoURL(raw string) error {
	if raw == "" {
		return nil
	}
	bad := func(why string) error {
		return Errorf(CodeInvalid, "%s", why).WithField("repo_url").
			WithHint("give an https://, http://, git:// or ssh:// URL, user@host:path, or the path of a local repository")
	}
	if len(raw) > MaxURLBytes || raw[0] == '-' || strings.ContainsAny(raw, " \\") || !IsPrintable(raw) || strings.Contains(raw, "::") {
		return bad("not a repository URL")
	}
	if !strings.Contains(raw, "://") {
		host, path, ok := strings.Cut(raw, ":")
		if !ok || host == "" || path == "" || strings.Contains(host, "/") || strings.HasPrefix(path, "-") {
			return bad("not a repository URL")
		}
		return nil
	}
	u, err := url.Parse(raw)
	if err != nil || u.Host == "" || strings.HasPrefix(u.Host, "-") {
		return bad("not a repository URL")
	}
	_, password := u.User.Password()
	extra := ""
	switch u.Scheme {
	case "ssh", "git+ssh", "ssh+git":
	case "git":
		if u.User != nil {
			extra = "a user name"
		}
	case "http", "https":
		if u.User != nil {
			extra = "a user name or token"
		} else if strings.ContainsAny(raw, "?#") {
			extra = "a query or fragment"
		}
	default:
		return bad("scheme " + u.Scheme + " is not allowed")
	}
	if password {
		extra = "a password"
	}
	if extra != "" {
		return Errorf(CodeInvalid, "the URL contains %s", extra).WithField("repo_url").
			WithHint("remove it, and store a credential in the profile's secrets bundle: agentlab secrets set")
	}
	return nil
}
