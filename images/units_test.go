package images

import (
	"io/fs"
	"regexp"
	"testing"
)

// guestd starts the runner. A unit that did so as well would have two of them
// race for the job.
func TestNothingEnablesTheRunnersUnit(t *testing.T) {
	enables := regexp.MustCompile(`(?m)^[^#\n]*(systemctl.* (enable|preset)|\.wants/).*agent-runner\.service`)
	for name, tree := range map[string]fs.FS{"scripts": Scripts, "files": Files, "cloud": Cloud} {
		err := fs.WalkDir(tree, ".", func(path string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() {
				return err
			}
			text, err := fs.ReadFile(tree, path)
			if err != nil {
				return err
			}
			if enables.Match(text) || regexp.MustCompile(`\.wants/agent-runner\.service$`).MatchString(path) {
				t.Errorf("%s: %s enables agent-runner.service", name, path)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}
