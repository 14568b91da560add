// Package cli is the command line of AgentLab. It turns arguments into calls
// of package client, and responses into text or JSON. It never accesses the
// daemon's files, a driver or the store, so it cannot do anything that the
// daemon would reject.
//
// Data goes to standard output, progress and errors to standard error. With
// --json, data is one JSON document (one per line for streams) and an error is
// one JSON object with its stable code.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/strictyaml"
	"github.com/agentlab-vm/agentlab/internal/version"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// The groups of commands in the help of the program.
const (
	GroupInteractive = "interactive"
	GroupWork        = "work"
	GroupSetup       = "setup"
	GroupOperate     = "operate"
)

// Command is a command of the program, with its subcommands. Each package of commands has a
// table of them, and package commands lists the tables.
type Command struct {
	Group string // in the help of the program; "" for a hidden command
	New   func(a *App) *cobra.Command
}

// own returns the commands that need the whole command line.
func own() []Command {
	return []Command{{GroupWork, (*App).mcpCmd}, {GroupOperate, (*App).versionCmd}}
}

// App is one run of the command line.
type App struct {
	Commands []Command

	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer
	Now    func() time.Time

	JSON      bool
	NoInput   bool
	Socket    string         // --socket; "" means the default of config.Paths
	Host      string         // --host; "" means AGENTLAB_HOST, or the daemon of this machine
	TokenFile string         // --token-file
	Started   bool           // this run started the daemon
	running   bool           // the command's RunE has been called
	internal  bool           // the run is part of another one: it needs no completion, whose functions cobra never frees
	Place     *mcpPlace      // what the run may send of this machine; nil is everything
	daemon    *client.Client // the last one that connect returned
	Shown     int64          // ID of the last event that showEvent printed

	LogIdle time.Duration // 0 means the constant logIdle
}

// Main runs the command line of these commands with the process's own streams and returns
// the exit code.
func Main(commands []Command, args []string) int {
	signals := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) { // ignored under nohup
		signals = append(signals, syscall.SIGHUP)
	}
	ctx, stop := signal.NotifyContext(context.Background(), signals...)
	defer stop()
	app := &App{Commands: commands, Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Now: time.Now}
	return app.Run(ctx, args)
}

// Run executes one command line, prints its error and returns its exit code (see
// exitCode).
func (a *App) Run(ctx context.Context, args []string) int {
	err := a.execute(ctx, args)
	if err != nil {
		a.PrintError(err)
	}
	a.noteOldDaemon()
	return ExitCode(err)
}

// execute executes one command line.
func (a *App) execute(ctx context.Context, args []string) error {
	root := a.Root()
	root.SetArgs(args)
	root.SetIn(a.Stdin)
	root.SetOut(a.Stdout)
	root.SetErr(a.Stderr)
	root.InitDefaultCompletionCmd() // uses the streams that are set above
	root.InitDefaultHelpCmd()
	root.InitDefaultVersionFlag()
	setHelpTexts(root)
	rejectUnknownSubcommands(root)
	cmd, err := root.ExecuteContextC(ctx)
	if err != nil && !a.running {
		if flag := unknownRootFlag(root, args); flag != "" {
			err = errors.New("unknown flag: " + flag)
		}
		err = asUsage(cmd, err)
		a.JSON = a.JSON || wantsJSON(args)
	}
	return err
}

// wantsJSON reports whether --json is among the arguments. Parsing stopped at
// an invalid one before a.json was set.
func wantsJSON(args []string) bool {
	for _, arg := range args {
		switch arg {
		case "--":
			return false
		case "--json", "--json=true", "--json=1":
			return true
		}
	}
	return false
}

// asUsage turns an error of cobra into a usage error.
func asUsage(cmd *cobra.Command, err error) error {
	if _, ok := errors.AsType[*agentlab.Error](err); ok {
		return err
	}
	text, _, _ := strings.Cut(err.Error(), "\n")
	return work.UsageErrorf("%s", plainUsage(cmd, text)).WithHint("see '%s --help'", cmd.CommandPath())
}

// markRunning sets a.running when the RunE of a command is called. Until then
// every error is a usage error.
func (a *App) markRunning(cmd *cobra.Command) {
	for _, c := range cmd.Commands() {
		if run := c.RunE; run != nil {
			c.RunE = func(cmd *cobra.Command, args []string) error {
				a.running = true
				return run(cmd, args)
			}
		}
		a.markRunning(c)
	}
}

// Root returns the command tree.
func (a *App) Root() *cobra.Command {
	root := &cobra.Command{
		Use:   "agentlab",
		Short: "Run AI coding agents in disposable virtual machines",
		Long: `AgentLab runs AI coding agents, with every permission granted, in disposable virtual
machines, without risk to this machine, its network or your secrets.

Start here, in a Git repository:
  agentlab claude
  agentlab sync

Or unattended:
  agentlab job run --repo . --agent claude --task "Fix the failing test"
  agentlab job list
  agentlab sandbox new --name play && agentlab ssh play`,
		SilenceErrors:     true,
		SilenceUsage:      true,
		Version:           version.String(),
		DisableAutoGenTag: true,
	}
	root.SetVersionTemplate("agentlab {{.Version}}\n")
	root.CompletionOptions.HiddenDefaultCmd = false
	root.SetFlagErrorFunc(FlagError)
	flags := root.PersistentFlags()
	flags.BoolVar(&a.JSON, "json", false, "print data and errors as JSON")
	flags.BoolVar(&a.NoInput, "no-input", false, "never prompt; fail instead")
	flags.StringVar(&a.Socket, "socket", "", "control socket of the daemon (default: from AGENTLAB_HOME or XDG)")
	flags.StringVar(&a.Host, "host", "", "URL of a daemon over TCP, https://HOST:PORT (default: AGENTLAB_HOST)")
	flags.StringVar(&a.TokenFile, "token-file", "", "file with the token for --host (default: AGENTLAB_TOKEN_FILE, or the token itself in AGENTLAB_TOKEN)")

	root.AddGroup(
		&cobra.Group{ID: GroupInteractive, Title: "Interactive work:"},
		&cobra.Group{ID: GroupWork, Title: "Jobs and sandboxes:"},
		&cobra.Group{ID: GroupSetup, Title: "Setup:"},
		&cobra.Group{ID: GroupOperate, Title: "Operation:"},
	)
	for _, c := range append(own(), a.Commands...) {
		cmd := c.New(a)
		cmd.GroupID = c.Group
		root.AddCommand(cmd)
	}
	if !a.internal {
		a.complete(root)
	}
	a.markRunning(root)
	return root
}

func (a *App) versionCmd() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: ExactArgs(),
		RunE: func(*cobra.Command, []string) error {
			return a.Emit(map[string]string{"version": version.String()}, func() error {
				_, err := fmt.Fprintf(a.Stdout, "agentlab %s\n", version.String())
				return err
			})
		},
	}
}

// setHelpTexts replaces the help texts of what cobra adds to the command tree.
func setHelpTexts(cmd *cobra.Command) {
	cmd.InitDefaultHelpFlag()
	cmd.Flags().Lookup("help").Usage = "print this help"
	if f := cmd.Flags().Lookup("version"); f != nil && cmd.Version != "" {
		f.Usage = "print the version"
	}
	switch path := strings.TrimPrefix(cmd.CommandPath(), "agentlab "); {
	case path == "help":
		cmd.Short, cmd.Long = "Print the help of a command", ""
	case path == "completion":
		cmd.Short, cmd.Long = "Print a script that completes command lines in a shell", ""
	case strings.HasPrefix(path, "completion "):
		_, instructions, _ := strings.Cut(cmd.Long, "\n")
		cmd.Short = "Print the completion script for " + cmd.Name()
		cmd.Long = cmd.Short + ".\n" + instructions
	}
	for _, c := range cmd.Commands() {
		setHelpTexts(c)
	}
}

// groupAnnotation marks the commands that only have subcommands.
const groupAnnotation = "group"

func isGroup(cmd *cobra.Command) bool {
	_, ok := cmd.Annotations[groupAnnotation]
	return ok
}

// rejectUnknownSubcommands makes a command and the groups below it return an
// error with a suggestion for an unknown subcommand. cobra does so for the root
// only, on several lines.
func rejectUnknownSubcommands(cmd *cobra.Command) {
	if cmd.HasSubCommands() && cmd.RunE == nil {
		cmd.Annotations = map[string]string{groupAnnotation: ""}
		cmd.RunE = func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmd.Help()
			}
			return unknownSubcommand(cmd, args[0])
		}
		cmd.Args = cobra.ArbitraryArgs
	}
	if cmd.CommandPath() == "agentlab help" { // cobra prints the help of the root for an unknown command
		cmd.Run, cmd.RunE = nil, func(cmd *cobra.Command, args []string) error {
			of, rest, err := cmd.Root().Find(args)
			switch {
			case err != nil:
				return err
			case isGroup(of) && len(rest) > 0:
				return unknownSubcommand(of, rest[0])
			}
			return of.Help()
		}
	}
	for _, c := range cmd.Commands() {
		rejectUnknownSubcommands(c)
	}
}

// unknownSubcommand returns the error for a word that is no subcommand of cmd, with the
// nearest one.
func unknownSubcommand(cmd *cobra.Command, word string) error {
	e := work.UsageErrorf("unknown command %q for %q", word, cmd.CommandPath())
	var names []string
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			names = append(append(names, c.Name()), c.Aliases...)
		}
	}
	near := strictyaml.Nearest(word, names)
	if near == "" { // the beginning of one
		near = FirstOf(slices.DeleteFunc(names, func(name string) bool { return !strings.HasPrefix(name, word) }))
	}
	if near == "" {
		return e.WithHint("see '%s --help'", cmd.CommandPath())
	}
	return e.WithHint("did you mean '%s %s'?", cmd.CommandPath(), near)
}

// RunE adapts a function that calls the daemon to cobra. It starts the user's
// daemon if none is running.
func (a *App) RunE(fn func(ctx context.Context, c *client.Client, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		c, err := a.Connect(cmd.Context())
		if err != nil {
			return err
		}
		return ArgumentError(cmd, fn(cmd.Context(), c, args))
	}
}

// Query returns a command that gets a T from the daemon and prints it: as JSON
// under --json, else by text.
func Query[T any](a *App, use, short string, args cobra.PositionalArgs, fetch func(ctx context.Context, c *client.Client, args []string) (T, error), text func(T) error) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: args}
	if use == "list" {
		cmd.Aliases = []string{"ls"}
	}
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		v, err := fetch(ctx, c, args)
		if err != nil {
			return err
		}
		return a.Emit(v, func() error { return text(v) })
	})
	return cmd
}

// All is the fetch function of a query without arguments.
func All[T any](call func(*client.Client, context.Context) (T, error)) func(context.Context, *client.Client, []string) (T, error) {
	return func(ctx context.Context, c *client.Client, _ []string) (T, error) { return call(c, ctx) }
}

// One is the fetch function of a query with one argument.
func One[T any](call func(*client.Client, context.Context, string) (T, error)) func(context.Context, *client.Client, []string) (T, error) {
	return func(ctx context.Context, c *client.Client, args []string) (T, error) { return call(c, ctx, args[0]) }
}

// Emit prints v as JSON under --json, else calls text.
func (a *App) Emit(v any, text func() error) error {
	if a.JSON {
		return a.PrintJSON(v)
	}
	return text()
}

// NoteMissing shows, for each backend that did not answer, that a list lacks its part.
func (a *App) NoteMissing(missing []string) {
	for _, why := range missing {
		a.Progressf("note: the list is incomplete: %s", agentlab.WithoutControls(why))
	}
}

// Silent is the text of a command that has already printed everything.
func Silent() error { return nil }

// Done is emit with a line of progress for the text.
func (a *App) Done(v any, format string, args ...any) error {
	return a.Emit(v, func() error { a.Progressf(format, args...); return nil })
}

// PrintJSON writes v as one indented JSON document.
func (a *App) PrintJSON(v any) error { return writeJSON(a.Stdout, v, "  ") }

// PrintJSONLine writes v as one line of JSON, for streams.
func (a *App) PrintJSONLine(v any) error { return writeJSON(a.Stdout, v, "") }

// writeJSON writes v as JSON in which no text of a guest controls a terminal.
func writeJSON(w io.Writer, v any, indent string) error {
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetIndent("", indent)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return err
	}
	_, err := io.WriteString(w, agentlab.EscapeJSON(b.String()))
	return err
}

// ExactArgs is cobra.ExactArgs with an error that names the missing argument.
func ExactArgs(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) < len(names):
			return work.UsageErrorf("%s is missing", names[len(args)]).WithHint("usage: %s", cmd.UseLine())
		case len(args) > len(names):
			return work.UsageErrorf("unexpected argument %q", args[len(names)]).WithHint("usage: %s", cmd.UseLine())
		}
		return nil
	}
}
