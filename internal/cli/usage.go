package cli

import (
	"regexp"
	"strings"

	"github.com/spf13/cobra"
)

var (
	tooFewArgs   = regexp.MustCompile(`^(requires at least|accepts between) .*received 0$`)
	excludeFlags = regexp.MustCompile(`^if any flags in the group \[(.+)\] are set none`)
	oneFlagOf    = regexp.MustCompile(`^at least one of the flags in the group \[(.+)\] is required`)
	requiredFlag = regexp.MustCompile(`^required flag\(s\) "([^"]+)" not set$`)
	invalidValue = regexp.MustCompile(`^invalid argument (".*") for "(?:-., )?(--[a-z-]+)" flag: (.*)$`)
)

// plainUsage rewrites usage errors of cobra and pflag.
func plainUsage(cmd *cobra.Command, text string) string {
	flags := func(m []string, between string) string {
		return "--" + strings.ReplaceAll(m[1], " ", between+"--")
	}
	if names := strings.Fields(cmd.Use); len(names) > 1 && tooFewArgs.MatchString(text) {
		return strings.TrimSuffix(names[1], "...") + " is missing"
	}
	if m := excludeFlags.FindStringSubmatch(text); m != nil {
		return flags(m, " and ") + " cannot be used together"
	}
	if m := oneFlagOf.FindStringSubmatch(text); m != nil {
		return flags(m, " or ") + " is required"
	}
	if m := requiredFlag.FindStringSubmatch(text); m != nil {
		return "--" + m[1] + " is required"
	}
	if m := invalidValue.FindStringSubmatch(text); m != nil {
		return m[2] + ": " + plainValue(m[1], m[3])
	}
	return text
}

// plainValue rewrites errors of package strconv about a quoted value.
func plainValue(value, text string) string {
	switch {
	case !strings.HasPrefix(text, "strconv."):
		return text
	case strings.Contains(text, "ParseBool"):
		return value + " is neither true nor false"
	case strings.HasSuffix(text, "out of range"):
		return value + " is out of range"
	}
	return value + " is not a whole number"
}

// unknownRootFlag returns the first unknown flag before the command's name.
// cobra takes the word after such a flag for its value, and then reports an
// unknown command.
func unknownRootFlag(root *cobra.Command, args []string) string {
	for i := 0; i < len(args) && strings.HasPrefix(args[i], "--") && args[i] != "--"; i++ {
		name, _, hasValue := strings.Cut(args[i][2:], "=")
		f := root.PersistentFlags().Lookup(name)
		switch {
		case f == nil && name != "help" && name != "version":
			return "--" + name
		case f != nil && !hasValue && f.NoOptDefVal == "":
			i++ // its value
		}
	}
	return ""
}
