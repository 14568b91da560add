package cli

import (
	"errors"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentlab-vm/agentlab"
)

// choiceFlag is a flag that takes one of a fixed set of values, in upper or
// lower case, or its default.
type choiceFlag struct {
	name   string
	to     *string
	unset  string
	values []string
}

// choice adds a choiceFlag. Its default is what to points at; where that is
// "", the flag with an empty value is as good as none. Any other value is a
// usage error, without a call to the daemon.
func choice[T ~string](flags *pflag.FlagSet, to *string, name string, values []T, usage string) {
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

// Set stores the value as it is written in the set.
func (f choiceFlag) Set(s string) error {
	if s == f.unset {
		*f.to = s
		return nil
	}
	i := slices.IndexFunc(f.values, func(v string) bool { return strings.EqualFold(v, s) })
	if i < 0 {
		return agentlab.Errorf(agentlab.CodeInvalid, "unknown %s %q", f.name, s).WithField(f.name).WithHint("choose one of %s", strings.Join(f.values, ", "))
	}
	*f.to = f.values[i]
	return nil
}

// flagError returns the usage error for a flag that pflag does not accept. An
// error of the flag itself keeps its message, field and hint.
func flagError(cmd *cobra.Command, err error) error {
	if e, ok := errors.AsType[*agentlab.Error](err); ok {
		return usageError{e}
	}
	return usageErrorf("%s", plainUsage(cmd, err.Error())).WithHint("see '%s --help'", cmd.CommandPath())
}
