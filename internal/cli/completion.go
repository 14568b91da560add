package cli

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
)

// completionLimit is how long a shell waits for names.
const completionLimit = time.Second

// completionJobs is how many jobs, the newest, are offered.
const completionJobs = 50

// lister lists names of objects, each with a description after a tab.
type lister func(ctx context.Context, c *client.Client) ([]cobra.Completion, error)

func names[T any](list api.List[T], err error, name func(T) cobra.Completion) ([]cobra.Completion, error) {
	var out []cobra.Completion
	for _, item := range list.Items {
		out = append(out, name(item))
	}
	return out, err
}

func listSandboxes(ctx context.Context, c *client.Client) ([]cobra.Completion, error) {
	list, err := c.Sandboxes(ctx, client.SandboxQuery{})
	return names(list, err, func(sb api.Sandbox) cobra.Completion {
		return cobra.CompletionWithDesc(sb.Name, sb.State+", profile "+sb.Profile)
	})
}

func listJobs(ctx context.Context, c *client.Client) ([]cobra.Completion, error) {
	list, err := c.Jobs(ctx, client.JobQuery{Limit: completionJobs})
	return names(list, err, func(j api.Job) cobra.Completion {
		return cobra.CompletionWithDesc(j.ID, plain(j.Status+", "+firstLine(j.Task, 40)))
	})
}

func listProfiles(ctx context.Context, c *client.Client) ([]cobra.Completion, error) {
	list, err := c.Profiles(ctx)
	return names(list, err, func(p api.Profile) cobra.Completion { return p.Name })
}

func listImages(ctx context.Context, c *client.Client) ([]cobra.Completion, error) {
	list, err := c.Images(ctx)
	return names(list, err, func(i api.Image) cobra.Completion { return i.Name })
}

func listBundles(ctx context.Context, c *client.Client) ([]cobra.Completion, error) {
	list, err := c.Secrets(ctx)
	return names(list, err, func(b api.SecretBundle) cobra.Completion { return b.Name })
}

func listTokens(ctx context.Context, c *client.Client) ([]cobra.Completion, error) {
	list, err := c.Tokens(ctx)
	return names(list, err, func(t api.Token) cobra.Completion { return t.Name })
}

func listPresets(ctx context.Context, c *client.Client) ([]cobra.Completion, error) {
	list, err := c.PolicyPresets(ctx)
	return names(list, err, func(p api.PolicyPreset) cobra.Completion {
		return cobra.CompletionWithDesc(p.Name, p.About)
	})
}

func listOrphanUIDs(ctx context.Context, c *client.Client) ([]cobra.Completion, error) {
	list, err := c.Orphans(ctx)
	return names(list, err, func(o api.Orphan) cobra.Completion {
		return cobra.CompletionWithDesc(plain(o.UID), plain(fmt.Sprintf("VMID %d, %s %s", o.VMID, o.Name, o.Power)))
	})
}

// words is a lister of words that need no daemon.
func words(list ...string) lister {
	return func(context.Context, *client.Client) ([]cobra.Completion, error) { return list, nil }
}

// argumentListers complete arguments by the word for them in a usage line;
// a NAME is one of what its command is about.
var argumentListers = map[string]lister{
	"SANDBOX": listSandboxes, "JOB": listJobs, "PROFILE": listProfiles,
	"profile NAME": listProfiles, "image NAME": listImages, "policy NAME": listPresets, "token NAME": listTokens,
}

// dependentListers are like argumentListers, for names that depend on the rest
// of the command line: on the arguments before, and on flags. An argument that
// is called the same in other commands has its command before it.
var dependentListers = map[string]func(cmd *cobra.Command, given []string) lister{
	"KEY":           func(cmd *cobra.Command, _ []string) lister { return secretKeysOf(cmd.Flag("bundle").Value.String()) },
	"download PATH": func(_ *cobra.Command, given []string) lister { return artifactsOf(given[0]) },
}

// secretKeysOf lists the keys that a secrets bundle has.
func secretKeysOf(bundle string) lister {
	return func(ctx context.Context, c *client.Client) ([]cobra.Completion, error) {
		list, err := c.SecretKeys(ctx, bundle)
		return names(list, err, func(key string) cobra.Completion { return key })
	}
}

// artifactsOf lists the artifacts of a job. A guest chose their names: what a
// terminal would not show as it is, is left out.
func artifactsOf(job string) lister {
	return func(ctx context.Context, c *client.Client) ([]cobra.Completion, error) {
		list, err := c.Artifacts(ctx, job)
		list.Items = slices.DeleteFunc(list.Items, func(f api.Artifact) bool { return plain(f.Path) != f.Path })
		return names(list, err, func(f api.Artifact) cobra.Completion {
			return cobra.CompletionWithDesc(f.Path, byteSize(f.Size)+", "+plain(f.MIME))
		})
	}
}

// newNames are the commands whose NAME is of something new.
var newNames = []string{"agentlab token create", "agentlab secrets create"}

// flagListers complete the values of flags by their name.
var flagListers = map[string]lister{
	"sandbox": listSandboxes, "job": listJobs, "profile": listProfiles, "image": listImages, "bundle": listBundles,
	"agent": words(agentlab.Agents...),
}

// fileFlags take the name of a file or folder, which the shell completes.
var fileFlags = []string{"file", "out", "repo", "socket", "task-file", "token-file"}

// placeholder is an argument in a usage line: SANDBOX, [JOB], SANDBOX|JOB,
// NAME... .
var placeholder = regexp.MustCompile(`^\[?([A-Z]+(?:\|[A-Z]+)*)(\.\.\.)?\]?$`)

// complete gives every command below cmd the completion of its arguments and
// flags.
func (a *App) complete(cmd *cobra.Command) {
	for _, c := range cmd.Commands() {
		if c.ValidArgsFunction == nil && len(c.ValidArgs) == 0 {
			c.ValidArgsFunction = a.completeArgs(c)
		}
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if v, ok := f.Value.(choiceFlag); ok {
				_ = c.RegisterFlagCompletionFunc(f.Name, a.completeWith(words(v.values...))) // it has none yet
			} else if list, ok := flagListers[f.Name]; ok {
				_ = c.RegisterFlagCompletionFunc(f.Name, a.completeWith(list)) // it has none yet
			} else if !slices.Contains(fileFlags, f.Name) {
				_ = c.RegisterFlagCompletionFunc(f.Name, cobra.NoFileCompletions)
			}
		})
		a.complete(c)
	}
}

// completeArgs completes the arguments of a command by its usage line.
func (a *App) completeArgs(c *cobra.Command) cobra.CompletionFunc {
	type argument struct {
		lists   []lister
		depends func(cmd *cobra.Command, given []string) lister
		file    bool
	}
	var args []argument
	repeated := false
	for _, word := range strings.Fields(c.Use)[1:] {
		m := placeholder.FindStringSubmatch(word)
		if m == nil {
			break // flags, or what follows "--"
		}
		var arg argument
		for _, name := range strings.Split(m[1], "|") {
			if name == "NAME" && !slices.Contains(newNames, c.CommandPath()) {
				name = c.Parent().Name() + " NAME"
			}
			if list, ok := argumentListers[name]; ok {
				arg.lists = append(arg.lists, list)
			}
			for _, key := range []string{name, c.Name() + " " + name} {
				if list, ok := dependentListers[key]; ok {
					arg.depends = list
				}
			}
			arg.file = arg.file || name == "FILE"
		}
		args, repeated = append(args, arg), m[2] != ""
	}
	return func(cmd *cobra.Command, given []string, begin string) ([]cobra.Completion, cobra.ShellCompDirective) {
		n := len(given)
		if repeated {
			n = min(n, len(args)-1)
		}
		switch {
		case n >= len(args):
			return nil, cobra.ShellCompDirectiveNoFileComp
		case args[n].file:
			return nil, cobra.ShellCompDirectiveDefault
		}
		lists := args[n].lists
		if depends := args[n].depends; depends != nil {
			lists = append(slices.Clone(lists), depends(cmd, given))
		}
		if orphan, err := cmd.Flags().GetBool("orphan"); err == nil && orphan {
			lists = []lister{listOrphanUIDs}
		}
		out := a.names(cmd.Context(), begin, lists...)
		return slices.DeleteFunc(out, func(s cobra.Completion) bool {
			name, _, _ := strings.Cut(s, "\t")
			return slices.Contains(given, name)
		}), cobra.ShellCompDirectiveNoFileComp
	}
}

func (a *App) completeWith(list lister) cobra.CompletionFunc {
	return func(cmd *cobra.Command, _ []string, begin string) ([]cobra.Completion, cobra.ShellCompDirective) {
		return a.names(cmd.Context(), begin, list), cobra.ShellCompDirectiveNoFileComp
	}
}

// names asks the daemon for names with that beginning, each once: several
// builds of an image have the same name. A daemon that does not run is not started
// for it, and every error means that there are none.
func (a *App) names(ctx context.Context, begin string, lists ...lister) []cobra.Completion {
	ctx, cancel := context.WithTimeout(ctx, completionLimit)
	defer cancel()
	c, err := a.dial()
	if err != nil {
		return nil
	}
	defer c.Close()
	var out []cobra.Completion
	for _, list := range lists {
		found, err := list(ctx, c)
		if err == nil {
			out = append(out, found...)
		}
	}
	seen := map[string]bool{}
	return slices.DeleteFunc(out, func(s cobra.Completion) bool {
		name, _, _ := strings.Cut(s, "\t")
		unwanted := seen[name] || !strings.HasPrefix(name, begin)
		seen[name] = true
		return unwanted
	})
}
