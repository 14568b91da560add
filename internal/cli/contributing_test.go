package cli_test

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
)

// addressCommand is the example of CONTRIBUTING.md for a command.
func addressCommand(a *cli.App) *cobra.Command {
	return cli.Query(a, "address SANDBOX", "Print the address of a sandbox", cli.ExactArgs("SANDBOX"), cli.One((*client.Client).Sandbox), func(sb api.Sandbox) error {
		_, err := fmt.Fprintln(a.Stdout, cli.OrDash(sb.IP))
		return err
	})
}

// TestContributingExample checks that the Go code of CONTRIBUTING.md compiles: it is
// addressCommand.
func TestContributingExample(t *testing.T) {
	if name := addressCommand(&cli.App{}).Name(); name != "address" {
		t.Errorf("the command is %q", name)
	}
	text, err := os.ReadFile("../../CONTRIBUTING.md")
	if err != nil {
		t.Fatal(err)
	}
	source, err := os.ReadFile("contributing_test.go")
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?s)```go\n(.*?)\n *```").FindAllSubmatch(text, -1)
	if len(blocks) != 1 {
		t.Fatalf("CONTRIBUTING.md has %d blocks of Go, want 1", len(blocks))
	}
	if want := withoutIndent(string(blocks[0][1])); !strings.Contains(withoutIndent(string(source)), "\nreturn "+want+"\n}\n") {
		t.Errorf("addressCommand differs from CONTRIBUTING.md:\n%s", want)
	}
}

func withoutIndent(code string) string {
	lines := strings.Split(code, "\n")
	for i, l := range lines {
		lines[i] = strings.TrimLeft(l, " \t")
	}
	return strings.Join(lines, "\n")
}
