package cli_test

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/cli/commands"
)

var update = flag.Bool("update", false, "write the generated documents")

const cliDocument = "../../docs/cli.md"

// docs/cli.md is generated from the command tree; run
// 'go test ./internal/cli -run TestCommandReference -update' after a change.
func TestCommandReference(t *testing.T) {
	var b bytes.Buffer
	b.WriteString("# Commands\n\nGenerated from `agentlab --help`. Flags may stand after positional arguments.\n")
	root := (&cli.App{Commands: commands.All()}).Root()
	fmt.Fprintf(&b, "\nFlags of every command:\n\n%s", flagList(root.PersistentFlags(), nil))
	reference(&b, root)
	if *update {
		if err := os.WriteFile(cliDocument, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(cliDocument)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(have, b.Bytes()) {
		t.Error("docs/cli.md is out of date: go test ./internal/cli -run TestCommandReference -update")
	}
}

func reference(b *bytes.Buffer, cmd *cobra.Command) {
	for _, c := range cmd.Commands() {
		if c.Hidden || c.Name() == "help" {
			continue
		}
		if c.Runnable() && (!c.HasSubCommands() || strings.Contains(c.Use, " ")) {
			fmt.Fprintf(b, "\n## %s\n\n", c.CommandPath())
			text := c.Long
			if text == "" {
				text = c.Short + "."
			}
			fmt.Fprintf(b, "%s\n\n```\n%s\n```\n", text, c.UseLine())
			if c.Example != "" {
				fmt.Fprintf(b, "\nExamples:\n\n```\n%s\n```\n", strings.ReplaceAll(strings.TrimPrefix(c.Example, "  "), "\n  ", "\n"))
			}
			c.InheritedFlags() // merges them into Flags
			if flags := flagList(c.Flags(), c.Root().PersistentFlags()); flags != "" {
				fmt.Fprintf(b, "\n%s", flags)
			}
		}
		if c.Name() != "completion" {
			reference(b, c)
		}
	}
}

// flagList describes flags, also those inherited from the commands above, but
// for those in the set without.
func flagList(flags, without *pflag.FlagSet) string {
	var b strings.Builder
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Name == "help" || f.Hidden || without != nil && without.Lookup(f.Name) == f {
			return
		}
		name := "--" + f.Name
		if f.Shorthand != "" {
			name = "-" + f.Shorthand + ", " + name
		}
		if kind, _ := pflag.UnquoteUsage(f); kind != "" {
			name += " " + kind
		}
		fmt.Fprintf(&b, "- `%s`: %s%s\n", name, f.Usage, flagDefault(f))
	})
	return b.String()
}

// flagDefault tells what a flag is that is not given, as --help does.
func flagDefault(f *pflag.Flag) string {
	switch f.DefValue {
	case "", "0", "0s", "false", "[]":
		return ""
	}
	if f.Value.Type() == "string" {
		return fmt.Sprintf(" (default %q)", f.DefValue)
	}
	return fmt.Sprintf(" (default %s)", f.DefValue)
}
