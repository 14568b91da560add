package agentcmd

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A session reads the same project file as a job, with all of its keys.
func TestDeclaredServices(t *testing.T) {
	dir := t.TempDir()
	at := filepath.Join(dir, ".agentlab.yaml")
	if got, err := declaredServices(dir); got != "" || err != nil {
		t.Errorf("%q %v", got, err)
	}
	for text, want := range map[string]string{
		"image: dev\nsetup: [make]\noutputs: [dist/**]\nservices: compose.yaml\n": "compose.yaml",
		"image: dev\n": "",
	} {
		if err := os.WriteFile(at, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := declaredServices(dir); got != want || err != nil {
			t.Errorf("%q: %q %v", text, got, err)
		}
	}
	for _, text := range []string{"services: ../compose.yaml\n", "service: compose.yaml\n", "services: [compose.yaml]\n"} {
		if err := os.WriteFile(at, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := declaredServices(dir); err == nil || !strings.Contains(err.Error(), ".agentlab.yaml: ") {
			t.Errorf("%q: %v", text, err)
		}
	}
}
