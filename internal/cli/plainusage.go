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
	notANumber   = regexp.MustCompile(`^invalid argument (".*") for "(.+)" flag: strconv\.ParseU?[iI]nt: .*: invalid syntax$`)
)

// plainUsage puts what cobra and pflag say about a command line into our words.
func plainUsage(cmd *cobra.Command, text string) string {
	flags := func(m []string, between string) string {
		return "--" + strings.ReplaceAll(m[1], " ", between+"--")
	}
	if names := strings.Fields(cmd.Use); len(names) > 1 && tooFewArgs.MatchString(text) {
		return strings.TrimSuffix(names[1], "...") + " is missing"
	}
	if m := excludeFlags.FindStringSubmatch(text); m != nil {
		return flags(m, " and ") + " exclude each other"
	}
	if m := oneFlagOf.FindStringSubmatch(text); m != nil {
		return "give " + flags(m, " or ")
	}
	if m := requiredFlag.FindStringSubmatch(text); m != nil {
		return "--" + m[1] + " is required"
	}
	if m := notANumber.FindStringSubmatch(text); m != nil {
		return m[2] + ": " + m[1] + " is not a whole number"
	}
	return text
}
