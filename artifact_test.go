package agentlab

import (
	"path"
	"path/filepath"
	"strings"
	"testing"
)

func TestValidateArtifactPath(t *testing.T) {
	good := []string{"a", "report.json", "outputs/dist/app-1.2.tar.gz", "outputs/Grüße/日本.txt", "a b/c", "a..b", strings.Repeat("d/", 15) + "f"}
	for _, p := range good {
		if err := ValidateArtifactPath(p); err != nil {
			t.Errorf("%q is refused: %v", p, err)
		}
	}
	bad := []string{
		"", "/", "/etc/passwd", "a/", "a//b", ".", "..", "../a", "a/../b", "a/./b", "a/..", ".git/config", "a/.ssh/x", "...",
		"-rf", "a/-x", " a", "a ", "a.", "a/b./c", "a\x00b", "a\nb", "a\\b", "C:x", "a*", "a\u202eb", "a\xffb", "a\u2028b",
		strings.Repeat("a", 256), strings.Repeat("d/", 16) + "f", strings.Repeat("abcdefghi/", 60),
	}
	for _, p := range bad {
		if err := ValidateArtifactPath(p); CodeOf(err) != CodeInvalid {
			t.Errorf("%q is taken: %v", p, err)
		}
	}
}

func FuzzValidateArtifactPath(f *testing.F) {
	for _, s := range []string{"a/b", "../x", "a/./b", "/a", "a\x00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, p string) {
		if err := ValidateArtifactPath(p); err != nil {
			if len(err.Error()) > 600 {
				t.Errorf("the error has %d bytes", len(err.Error()))
			}
			return
		}
		if path.Clean(p) != p || path.IsAbs(p) || !filepath.IsLocal(p) || strings.HasPrefix(p, ".") || strings.ContainsAny(p, "\x00\n\r\\") {
			t.Errorf("%q is taken", p)
		}
	})
}
