package cli_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/cli/commands"
)

// TestHintsNameCommandsThatExist looks through the strings of the whole program
// and through its scripts for commands of agentlab.
func TestHintsNameCommandsThatExist(t *testing.T) {
	t.Parallel()
	root := (&cli.App{Commands: commands.All()}).Root()
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	found := 0
	check := func(where, text string) {
		for _, m := range namedCommand.FindAllStringSubmatch(text, -1) {
			words := strings.Fields(m[1])
			if len(words) == 0 || notACommand[words[0]] {
				continue
			}
			found++
			if bad := unknownCommand(root, words); bad != "" {
				t.Errorf("%s: there is no command %q: %s", where, "agentlab "+bad, strings.TrimSpace(text))
			}
		}
	}
	top := filepath.Join("..", "..")
	for _, dir := range []string{"cmd", "internal", "client", "scripts", "."} {
		err := filepath.WalkDir(filepath.Join(top, dir), func(path string, e fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			if e.IsDir() && (e.Name() == "testdata" || dir == "." && path != filepath.Join(top, dir)) {
				return filepath.SkipDir
			}
			switch {
			case strings.HasSuffix(path, ".sh"):
				text, err := os.ReadFile(path)
				if err != nil {
					return err
				}
				for line := range strings.Lines(string(text)) {
					check(path, line)
				}
			case strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go"):
				return stringsOf(path, check)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if found < 100 {
		t.Errorf("only %d commands were found: this test proves nothing", found)
	}
}

var namedCommand = regexp.MustCompile(`(?:^|[^\w/.-])agentlab((?: [a-z][a-z-]*)+)`)

// notACommand are words that follow the name of the program, or what is
// called like it, in sentences.
var notACommand = map[string]bool{
	"agentlabd": true, "for": true, "guest": true, "installation": true, "is": true, "mac": true, "ports": true, "program": true, "user": true,
}

// unknownCommand returns as many words as it takes to name no command; "" when
// they name one, with arguments or without.
func unknownCommand(root *cobra.Command, words []string) string {
	at := root
	for i, w := range words {
		var next *cobra.Command
		for _, c := range at.Commands() {
			if c.Name() == w || c.HasAlias(w) {
				next = c
			}
		}
		if next == nil {
			if at.HasSubCommands() && !at.Runnable() {
				return strings.Join(words[:i+1], " ")
			}
			return ""
		}
		at = next
	}
	return ""
}

// stringsOf gives check every string literal of a Go file.
func stringsOf(path string, check func(where, text string)) error {
	files := token.NewFileSet()
	f, err := parser.ParseFile(files, path, nil, 0)
	if err != nil {
		return err
	}
	ast.Inspect(f, func(n ast.Node) bool {
		lit, ok := n.(*ast.BasicLit)
		if !ok || lit.Kind != token.STRING {
			return true
		}
		if text, err := strconv.Unquote(lit.Value); err == nil {
			for line := range strings.Lines(text) {
				check(files.Position(lit.Pos()).String(), line)
			}
		}
		return true
	})
	return nil
}

// The help has no text of cobra's own.
func TestHelpTexts(t *testing.T) {
	for _, args := range []string{"--help", "job list --help", "exec --help", "help --help", "completion --help", "completion bash --help", "completion powershell --help"} {
		var out strings.Builder
		a := &cli.App{Commands: commands.All(), Stdin: strings.NewReader(""), Stdout: &out, Stderr: &out, Now: time.Now}
		if code := a.Run(t.Context(), strings.Fields(args)); code != 0 {
			t.Errorf("%s: exit code %d", args, code)
		}
		for _, text := range []string{"help for", "version for", "autocompletion", "Help about", "Help provides"} {
			if strings.Contains(out.String(), text) {
				t.Errorf("%s contains %q:\n%s", args, text, out.String())
			}
		}
		if !strings.Contains(out.String(), "print this help") {
			t.Errorf("%s:\n%s", args, out.String())
		}
	}
}
