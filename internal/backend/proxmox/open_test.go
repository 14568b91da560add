package proxmox

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

// The secret of another token than the configuration names would be refused by
// each call, 3 seconds late and without a reason.
func TestTokenOfAnotherName(t *testing.T) {
	path := filepath.Join(t.TempDir(), "token")
	const secret = "01234567-89ab-cdef-0123-456789abcdef"
	for text, code := range map[string]agentlab.Code{
		secret + "\n":                  "",
		"a@pve!ctl=" + secret + "\n":   "",
		"b@pve!other=" + secret + "\n": agentlab.CodeInvalid,
		"changeme\n":                   agentlab.CodeInvalid,
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := (&Settings{TokenID: "a@pve!ctl", TokenFile: path}).tokenSecret()
		if code == "" {
			if err != nil || got != secret {
				t.Errorf("%q: %v", text, err)
			}
			continue
		}
		e, ok := errors.AsType[*agentlab.Error](err)
		if !ok || e.Code != code || e.Field != "proxmox.token_file" || e.Hint == "" {
			t.Errorf("%q: %v", text, err)
		}
	}
}
