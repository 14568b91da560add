package cli

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentlab-vm/agentlab"

	"github.com/agentlab-vm/agentlab/internal/work"
)

// choiceFlag is a flag with a fixed set of values, in upper or lower case.
type choiceFlag struct {
	name   string
	to     *string
	unset  string
	values []string
}

// Choice adds a choiceFlag. Its default is the value of to; if that is "", an
// empty value means that the flag is not set. Any other value is a usage error.
func Choice[T ~string](flags *pflag.FlagSet, to *string, name string, values []T, usage string) {
	f := choiceFlag{name: name, to: to, unset: *to}
	for _, v := range values {
		f.values = append(f.values, string(v))
	}
	flags.Var(f, name, usage)
}

func (f choiceFlag) String() string {
	if f.to == nil {
		return ""
	}
	return *f.to
}

// Type returns the type that help shows.
func (choiceFlag) Type() string { return "string" }

// Set stores the value in the spelling of the set.
func (f choiceFlag) Set(s string) error {
	if s == f.unset {
		*f.to = s
		return nil
	}
	i := slices.IndexFunc(f.values, func(v string) bool { return strings.EqualFold(v, s) })
	if i < 0 {
		return agentlab.Errorf(agentlab.CodeInvalid, "unknown %s %q", f.name, s).WithField(f.name).WithHint("use one of %s", strings.Join(f.values, ", "))
	}
	*f.to = f.values[i]
	return nil
}

// BackendFlag adds --backend. of is what the command creates there, with the default.
func BackendFlag(flags *pflag.FlagSet, to *string, of string) {
	flags.StringVar(to, "backend", "", "backend of "+of)
}

// countFlag is a number from least to most.
type countFlag struct {
	to          *int
	least, most int
}

// Count adds a number that is not negative, whose default is the value of to.
func Count(flags *pflag.FlagSet, to *int, name, usage string) {
	Between(flags, to, name, 0, math.MaxInt32, usage)
}

// Between adds a number from least to most, whose default is the value of to.
func Between(flags *pflag.FlagSet, to *int, name string, least, most int, usage string) {
	flags.Var(countFlag{to, least, most}, name, usage)
}

func (f countFlag) String() string {
	if f.to == nil {
		return ""
	}
	return strconv.Itoa(*f.to)
}

// Type returns the type that help shows.
func (countFlag) Type() string { return "int" }

// Set stores the number.
func (f countFlag) Set(s string) error {
	n, err := strconv.Atoi(s)
	switch {
	case err == nil && n < 0:
		return errors.New(s + " is negative")
	case err == nil && (n < f.least || n > f.most):
		return fmt.Errorf("%d is not between %d and %d", n, f.least, f.most)
	}
	*f.to = n
	return err
}

// DurationFlag returns a flag for a duration of at most limit; see durationFlag.
func DurationFlag(to *time.Duration, limit time.Duration) pflag.Value {
	return durationFlag{to, limit}
}

// durationFlag is a duration of at least a minute, in whole minutes, with days:
// 30m, 4h, 2d, 1d12h.
type durationFlag struct {
	to  *time.Duration
	max time.Duration
}

func (f durationFlag) String() string {
	if f.to == nil || *f.to == 0 {
		return ""
	}
	return agentlab.FormatTTL(*f.to)
}

// Type returns the type that help shows.
func (durationFlag) Type() string { return "duration" }

// Set stores the duration.
func (f durationFlag) Set(s string) error {
	d, err := parseDays(s)
	if err != nil {
		return err
	}
	if err := agentlab.CheckTTL(d, f.max); err != nil {
		return err
	}
	if d%time.Minute != 0 {
		return fmt.Errorf("%q is not a whole number of minutes", s)
	}
	*f.to = d
	return nil
}

// parseDays is time.ParseDuration with days in front.
func parseDays(s string) (time.Duration, error) {
	fail := fmt.Errorf("%q is not a duration such as 30m, 4h or 2d", s)
	days, rest, ok := strings.Cut(s, "d")
	if !ok {
		days, rest = "0", s
	}
	n, err := strconv.ParseUint(days, 10, 16)
	if err != nil {
		return 0, fail
	}
	d := time.Duration(0)
	if rest != "" || !ok {
		if d, err = time.ParseDuration(rest); err != nil {
			return 0, fail
		}
	}
	return d + time.Duration(n)*24*time.Hour, nil
}

// SinceFlag returns a flag for a point in time; see sinceFlag.
func SinceFlag(to *time.Time, now func() time.Time) pflag.Value { return sinceFlag{to, now} }

// sinceFlag is a point in time, or how long ago it was.
type sinceFlag struct {
	t   *time.Time
	now func() time.Time
}

func (f sinceFlag) String() string {
	if f.t == nil || f.t.IsZero() {
		return ""
	}
	return f.t.Format(time.RFC3339)
}

// Type returns the type that help shows.
func (sinceFlag) Type() string { return "duration|time" }

// Set stores the point in time.
func (f sinceFlag) Set(s string) error {
	t, err := time.Parse(time.RFC3339, s)
	if err != nil {
		ago, err := parseDays(s)
		if err != nil || ago < 0 {
			return fmt.Errorf("%q is neither a duration such as 10m, 4h or 2d nor a time such as 2026-01-31T15:04:05Z", s)
		}
		t = f.now().Add(-ago)
	}
	*f.t = t
	return nil
}

// WaitFlag adds --wait, which sets p and is the default, and its opposite
// --no-wait.
func WaitFlag(cmd *cobra.Command, p *bool, usage string) {
	cmd.Flags().BoolVar(p, "wait", true, usage)
	cmd.Flags().BoolFunc("no-wait", "return at once", func(string) error { *p = false; return nil })
}

// FlagError returns the usage error for a flag that pflag rejects. An error of
// the flag itself keeps its message, field and hint.
func FlagError(cmd *cobra.Command, err error) error {
	if e, ok := errors.AsType[*agentlab.Error](err); ok {
		name := ""
		if bad, ok := errors.AsType[*pflag.InvalidValueError](err); ok && e.Field != "" {
			name = bad.GetFlag().Name
		}
		return work.UsageError{Err: e, Flag: name}
	}
	// The flags after an unknown subcommand are those that the user wants of it.
	if args := cmd.Flags().Args(); len(args) > 0 && isGroup(cmd) {
		return cmd.RunE(cmd, args)
	}
	return work.UsageErrorf("%s", plainUsage(cmd, err.Error())).WithHint("see '%s --help'", cmd.CommandPath())
}

// ListLimit is how long lists are that the user does not limit.
const ListLimit = 1000

// LimitFlag adds the flag of commands that print a list with pages. The client
// requests as many pages as the limit needs.
func LimitFlag(cmd *cobra.Command, limit *int) {
	Count(cmd.Flags(), limit, "limit", "list at most this many; 0 means all")
}

// NoteMore says that a list continues, if next, the cursor of its next page, is not
// empty.
func (a *App) NoteMore(next string) {
	if next != "" {
		a.Progressf("the list continues; '--limit 0' shows all")
	}
}

// NameOrFlag makes a command take its argument NAME as --name, too, and returns what sets
// name from the arguments.
func NameOrFlag(cmd *cobra.Command, name *string, what string) (set func(args []string)) {
	cmd.Flags().StringVar(name, "name", "", "name of the "+what+", instead of NAME")
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if cmd.Flags().Changed("name") {
			return ExactArgs()(cmd, args)
		}
		return ExactArgs("NAME")(cmd, args)
	}
	return func(args []string) {
		if len(args) > 0 {
			*name = args[0]
		}
	}
}

// PreflightFlag adds --no-preflight.
func PreflightFlag(flags *pflag.FlagSet, p *bool) {
	flags.BoolVar(p, "no-preflight", false, "skip the check that the agent has an API key and can reach its model")
}

// SetupFlag adds --no-setup.
func SetupFlag(flags *pflag.FlagSet, p *bool) {
	flags.BoolVar(p, "no-setup", false, "do not run the commands under setup and start no services of the repository's .agentlab.yaml")
}

// DevcontainerFlag adds --devcontainer.
func DevcontainerFlag(flags *pflag.FlagSet, to *string) {
	Choice(flags, to, "devcontainer", agentlab.DevcontainerModes, "use the dev container of the repository: auto (if the image can), on or off (default: the profile's, or auto)")
}

// OptionalArg accepts at most one argument.
func OptionalArg(name string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) > 1 {
			return ExactArgs(name)(cmd, args)
		}
		return nil
	}
}

// NameFlag adds the required flag --name of a snapshot.
func NameFlag(cmd *cobra.Command, name *string, usage string) {
	cmd.Flags().StringVar(name, "name", "", usage)
	_ = cmd.MarkFlagRequired("name")
}
