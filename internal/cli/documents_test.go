package cli_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/cli/commands"
)

// commandDocuments are the documents that people and agents copy commands
// from. docs/cli.md is generated.
func commandDocuments(t *testing.T) []string {
	t.Helper()
	var out []string
	for _, glob := range []string{"../../README.md", "../../CONTRIBUTING.md", "../../docs/*.md", "../../skills/*/*.md"} {
		files, err := filepath.Glob(glob)
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: no such document: %v", glob, err)
		}
		out = append(out, files...)
	}
	return slices.DeleteFunc(out, func(f string) bool { return f == cliDocument })
}

// Every agentlab command in a document, in a block of code or in a sentence,
// is one that this program has, with flags and arguments that it takes.
func TestDocumentedCommands(t *testing.T) {
	t.Parallel()
	total := 0
	for _, file := range commandDocuments(t) {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range documentCommands(string(text)) {
			total++
			if err := c.check(); err != nil {
				t.Errorf("%s:%d: %s: %v", file, c.line, c.text, err)
			}
		}
	}
	if total < 150 {
		t.Errorf("only %d commands were found: this test reads the documents wrongly", total)
	}
}

// The same holds for the examples of --help.
func TestCommandsInHelp(t *testing.T) {
	t.Parallel()
	var each func(*cobra.Command)
	each = func(cmd *cobra.Command) {
		for _, c := range documentCommands("```\n" + cmd.Example + "\n```\n") {
			if err := c.check(); err != nil {
				t.Errorf("help of %q: %s: %v", cmd.CommandPath(), c.text, err)
			}
		}
		for _, c := range cmd.Commands() {
			each(c)
		}
	}
	each(newRoot())
}

// The same holds for commands that programs name in messages and help, in
// single quotes.
func TestCommandsInMessages(t *testing.T) {
	t.Parallel()
	quoted, verb := regexp.MustCompile(`'((?:sudo )?agentlab [a-z][^'"`+"`"+`]*)'`), regexp.MustCompile(`%[a-z]`)
	total := 0
	err := filepath.WalkDir("../..", func(file string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() || !strings.HasSuffix(file, ".go") || strings.HasSuffix(file, "_test.go") {
			return err
		}
		text, err := os.ReadFile(file)
		for _, m := range quoted.FindAllStringSubmatch(string(text), -1) {
			total++
			for _, c := range documentCommands("`" + verb.ReplaceAllString(strings.ReplaceAll(m[1], "\n", " "), "X") + "`") {
				if err := c.check(); err != nil {
					t.Errorf("%s: %s: %v", file, c.text, err)
				}
			}
		}
		return err
	})
	if err != nil || total < 40 {
		t.Errorf("%d commands were found: %v", total, err)
	}
}

// newRoot returns the command tree as it is when a command line is read.
func newRoot() *cobra.Command {
	root := (&cli.App{Commands: commands.All(), Now: time.Now}).Root()
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	root.InitDefaultVersionFlag()
	return root
}

func TestDocumentedCommandsAreRead(t *testing.T) {
	for text, wants := range map[string]string{ // "": no error
		"`agentlab job list`":                                              "",
		"`agentlab job run`":                                               "",
		"`agentlab exec`":                                                  "",
		"`agentlab secrets …`":                                             "",
		"`agentlab policy show|check`":                                     "",
		"`agentlab policy show|bogus`":                                     `unknown command "bogus"`,
		"`agentlab workplace list`":                                        "unknown command",
		"`agentlab job lost`":                                              "unknown command",
		"`agentlab job list --all`":                                        "unknown flag",
		"`agentlab policy check play HOST:PORT`":                           "unexpected argument",
		"`agentlab egress log [SANDBOX] [--job] [--denied]`":               "",
		"`agentlab egress log [SANDBOX] [--jobs]`":                         "unknown flag",
		"```\n$ agentlab job show JOB   # a comment x y\n```":              "",
		"```\nagentlab job show\n```":                                      "JOB is missing",
		"```\nagentlab sandbox stop play; agentlab sandbox start a b\n```": "unexpected argument",
		"```\neval \"$(agentlab ssh --print play) uname -a\"\n```":         "",
		"```\neval \"$(agentlab ssh --prints play) uname -a\"\n```":        "unknown flag",
		"```\nsudo bin/agentlab init --aply\n```":                          "unknown flag",
		"```\nagentlab job run --repo . \\\n  --agent \"my agent\" --task 'a; b | c' --ttl TIME\n```": "",
		"```\nagentlab job run --ttl soon\n```":                                                       "soon",
		"```\nagentlab exec -ti play bash --login\n```":                                               "",
		"```\necho x | agentlab secrets set a b\n```":                                                 "unexpected argument",
		"```\nagentlab events > file\n```":                                                            "",
	} {
		var err error
		list := documentCommands(text)
		for _, c := range list {
			if e := c.check(); e != nil {
				err = e
			}
		}
		if len(list) == 0 || (err == nil) != (wants == "") || err != nil && !strings.Contains(err.Error(), wants) {
			t.Errorf("%s: %v, want %q; %+v", text, err, wants, list)
		}
	}
}

// README.md names the version of Go that go.mod asks for.
func TestDocumentedGoVersion(t *testing.T) {
	mod, err := os.ReadFile("../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindSubmatch(mod)
	if m == nil {
		t.Fatal("go.mod names no version of Go")
	}
	named := regexp.MustCompile(`\bGo (\d+\.\d+)`).FindAllSubmatch(readme, -1)
	if len(named) == 0 {
		t.Fatalf("README.md does not say that it needs Go %s", m[1])
	}
	for _, n := range named {
		if string(n[1]) != string(m[1]) {
			t.Errorf("README.md says Go %s, go.mod %s", n[1], m[1])
		}
	}
}

// documentCommand is a command line that a document shows.
type documentCommand struct {
	line   int
	text   string
	inline bool // in a sentence, where a command may be named without its arguments
}

// spot is where the name of the program stands as a command.
var spot = regexp.MustCompile("(?:^|[;&|`\"]|\\$\\(|\\bsudo )\\s*(?:[A-Z_]+=\\S+ )*(?:bin/)?agentlab\\s")

var inlineCode = regexp.MustCompile("`([^`]+)`")

// documentCommands finds the commands in a document.
func documentCommands(text string) (out []documentCommand) {
	add := func(line int, code string, inline bool) {
		for _, at := range spot.FindAllStringIndex(code, -1) {
			begin := at[0] + strings.LastIndex(code[at[0]:at[1]], "agentlab")
			out = append(out, documentCommand{line, strings.TrimSpace(code[begin:]), inline})
		}
	}
	fenced, pending := false, ""
	for i, line := range strings.Split(text, "\n") {
		switch trimmed := strings.TrimSpace(line); {
		case strings.HasPrefix(trimmed, "```"):
			fenced = !fenced
		case fenced && strings.HasSuffix(trimmed, `\`):
			pending += strings.TrimSuffix(trimmed, `\`) + " "
		case fenced:
			add(i+1, pending+strings.TrimPrefix(trimmed, "$ ")+" ", false)
			pending = ""
		default:
			for _, m := range inlineCode.FindAllStringSubmatch(line, -1) {
				add(i+1, m[1]+" ", true)
			}
		}
	}
	return out
}

// shellWords splits the first command of a line into words, without quotes.
func shellWords(s string) (words []string) {
	word, in := "", false
	end := func() {
		if in {
			words = append(words, word)
		}
		word, in = "", false
	}
	var quote rune
	for i, r := range s {
		switch {
		case quote != 0:
			if r == quote {
				quote = 0
			} else {
				word += string(r)
			}
		case r == '\'' || r == '"':
			quote, in = r, true
		case r == ' ' || r == '\t':
			end()
		case strings.ContainsRune(";&)<>`", r) || r == '#' && !in || r == '|' && (i+1 < len(s) && s[i+1] == ' '):
			end()
			return words
		default:
			word, in = word+string(r), true
		}
	}
	end()
	return words
}

// alternatives makes one list of words for each choice that a word like
// show|check gives.
func alternatives(words []string) [][]string {
	for i, w := range words {
		if strings.HasPrefix(w, "-") || w == strings.ToUpper(w) || !regexp.MustCompile(`^[a-z]+(\|[a-z]+)+$`).MatchString(w) {
			continue
		}
		var out [][]string
		for _, one := range strings.Split(w, "|") {
			out = append(out, alternatives(slices.Concat(words[:i], []string{one}, words[i+1:]))...)
		}
		return out
	}
	return [][]string{words}
}

func (d documentCommand) check() error {
	for _, words := range alternatives(shellWords(d.text)) {
		if err := d.checkWords(words[1:]); err != nil {
			return err
		}
	}
	return nil
}

// sketchy is what marks a usage line rather than a command.
func sketchy(word string) bool { return strings.ContainsAny(word, "[]…|") || word == "..." }

func (d documentCommand) checkWords(words []string) error {
	root := newRoot()
	sketch := slices.ContainsFunc(words, sketchy)
	if i := slices.IndexFunc(words, func(w string) bool { return strings.HasPrefix(w, "…") || w == "..." }); i >= 0 {
		words = words[:i]
	}
	for i, w := range words {
		if sketchy(w) {
			words[i] = strings.Trim(w, "[].…")
		}
	}
	cmd, args, err := root.Find(words)
	if err != nil {
		return err
	}
	cmd.InitDefaultHelpFlag()
	if cmd.HasSubCommands() && !strings.Contains(cmd.Use, " ") && cmd != root {
		for _, w := range args {
			if !strings.HasPrefix(w, "-") {
				return fmt.Errorf("unknown command %q for %q", w, cmd.CommandPath())
			}
		}
	}
	if sketch {
		return knownFlags(cmd, args)
	}
	if err := cmd.ParseFlags(samples(cmd, args)); err != nil {
		return err
	}
	rest := cmd.Flags().Args()
	if d.inline && len(rest) == 0 || cmd.HasSubCommands() && len(rest) == 0 {
		return nil
	}
	return cmd.ValidateArgs(rest)
}

// knownFlags checks the names of flags alone.
func knownFlags(cmd *cobra.Command, args []string) error {
	for _, w := range args {
		name, _, _ := strings.Cut(strings.TrimLeft(w, "-"), "=")
		switch {
		case strings.HasPrefix(w, "--") && name != "" && flagOf(cmd, name) == nil:
			return fmt.Errorf("unknown flag: %s", w)
		case w == "--":
			return nil
		}
	}
	return nil
}

func flagOf(cmd *cobra.Command, name string) *pflag.Flag {
	if f := cmd.Flags().Lookup(name); f != nil {
		return f
	}
	return cmd.InheritedFlags().Lookup(name)
}

// samples replaces each placeholder, such as DURATION, by a value.
func samples(cmd *cobra.Command, args []string) []string {
	args = slices.Clone(args)
	standsFor := regexp.MustCompile(`^[A-Z][A-Z_-]*$`)
	for i := 1; i < len(args); i++ {
		f := flagOf(cmd, strings.TrimLeft(args[i-1], "-"))
		if !strings.HasPrefix(args[i-1], "--") || f == nil || !standsFor.MatchString(args[i]) {
			continue
		}
		switch f.Value.Type() {
		case "int":
			args[i] = "1"
		case "string", "stringSlice":
		default:
			args[i] = "1h"
		}
	}
	return args
}
