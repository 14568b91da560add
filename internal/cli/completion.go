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
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/session"
)

// completionLimit limits the time for completing a word.
const completionLimit = time.Second

// completionJobs is the number of jobs, the newest, that are offered.
const completionJobs = 50

// lister lists names of objects, each with a description after a tab.
type lister func(ctx context.Context, c *client.Client) ([]cobra.Completion, error)

// listOf returns a lister that calls list and names each item by name.
func listOf[T any](list func(*client.Client, context.Context) (api.List[T], error), name func(T) cobra.Completion) lister {
	return func(ctx context.Context, c *client.Client) ([]cobra.Completion, error) {
		l, err := list(c, ctx)
		var out []cobra.Completion
		for _, item := range l.Items {
			out = append(out, name(item))
		}
		return out, err
	}
}

// The listers of all kinds of objects.
var (
	// ListSandboxes lists the names of sandboxes.
	ListSandboxes = listOf(func(c *client.Client, ctx context.Context) (api.List[api.Sandbox], error) {
		return c.Sandboxes(ctx, client.SandboxQuery{Limit: ListLimit})
	}, func(sb api.Sandbox) cobra.Completion {
		return cobra.CompletionWithDesc(sb.Name, sb.State+", profile "+sb.Profile)
	})
	listJobs = listOf(func(c *client.Client, ctx context.Context) (api.List[api.Job], error) {
		return c.Jobs(ctx, client.JobQuery{Limit: completionJobs})
	}, func(j api.Job) cobra.Completion {
		return cobra.CompletionWithDesc(j.ID, agentlab.WithoutControls(j.Status+", "+FirstLine(j.Task, 40)))
	})
	listProfiles = listOf((*client.Client).Profiles, func(p api.Profile) cobra.Completion { return p.Name })
	listImages   = listOf((*client.Client).Images, func(i api.Image) cobra.Completion { return i.Name })
	listBackends = listOf((*client.Client).Backends, func(b api.Backend) cobra.Completion {
		return cobra.CompletionWithDesc(b.Name, "driver "+b.Driver)
	})
	listBundles = listOf((*client.Client).Secrets, func(b api.SecretBundle) cobra.Completion { return b.Name })
	listTokens  = listOf((*client.Client).Tokens, func(t api.Token) cobra.Completion { return t.Name })
	listPresets = listOf((*client.Client).PolicyPresets, func(p api.PolicyPreset) cobra.Completion {
		return cobra.CompletionWithDesc(p.Name, p.About)
	})
	listTemplates = listOf((*client.Client).Templates, func(t api.Template) cobra.Completion {
		return cobra.CompletionWithDesc(t.Key, agentlab.WithoutControls(fmt.Sprintf("%s, %d cores, %d MiB", t.Image, t.Cores, t.MemoryMB)))
	})
	listSetups = listOf((*client.Client).Setups, func(s api.Setup) cobra.Completion {
		return cobra.CompletionWithDesc(s.ID, agentlab.WithoutControls(s.Repo+" "+s.Ref))
	})
	listWorkspaces = listOf(func(c *client.Client, ctx context.Context) (api.List[api.Workspace], error) {
		return c.Workspaces(ctx, false)
	}, func(w api.Workspace) cobra.Completion {
		return cobra.CompletionWithDesc(w.Name, fmt.Sprintf("%s, %d GiB", w.State, w.SizeGB))
	})
	// ListSessions lists the names of sessions.
	ListSessions = listOf((*client.Client).Sessions, func(s api.Session) cobra.Completion {
		return cobra.CompletionWithDesc(s.Name, "session, profile "+s.Profile)
	})
	listTrash = listOf(func(c *client.Client, ctx context.Context) (api.List[api.Workspace], error) {
		return c.Workspaces(ctx, true)
	}, func(w api.Workspace) cobra.Completion { return cobra.CompletionWithDesc(w.ID, w.Name) })
	listOrphanUIDs = listOf((*client.Client).Orphans, func(o api.Orphan) cobra.Completion {
		return cobra.CompletionWithDesc(agentlab.WithoutControls(o.UID), agentlab.WithoutControls(fmt.Sprintf("VMID %d, %s %s", o.VMID, o.Name, o.Power)))
	})
)

// words is a lister of fixed words.
func words(list ...string) lister {
	return func(context.Context, *client.Client) ([]cobra.Completion, error) { return list, nil }
}

// argumentListers complete arguments by their placeholder in a usage line; NAME
// depends on the parent command.
var argumentListers = map[string]lister{
	"SANDBOX": ListSandboxes, "SESSION": ListSessions, "JOB": listJobs, "PROFILE": listProfiles, "TEMPLATE": listTemplates, "BACKEND": listBackends, "SETUP": listSetups, "WORKSPACE": listWorkspaces,
	"profile NAME": listProfiles, "image NAME": listImages, "policy NAME": listPresets, "token NAME": listTokens,
}

// dependentListers are like argumentListers for names that depend on earlier
// arguments or on flags. A placeholder that other commands also use is preceded
// by its command.
var dependentListers = map[string]func(cmd *cobra.Command, given []string) lister{
	"KEY":                func(cmd *cobra.Command, _ []string) lister { return secretKeysOf(cmd.Flag("bundle").Value.String()) },
	"undelete WORKSPACE": func(*cobra.Command, []string) lister { return listTrash },
	"download PATH":      func(_ *cobra.Command, given []string) lister { return artifactsOf(given[0]) },
}

// secretKeysOf lists the keys of a secrets bundle.
func secretKeysOf(bundle string) lister {
	return listOf(func(c *client.Client, ctx context.Context) (api.List[string], error) {
		return c.SecretKeys(ctx, bundle)
	},
		func(key string) cobra.Completion { return key })
}

// artifactsOf lists the artifacts of a job, without those whose names contain
// control characters: guests choose the names.
func artifactsOf(job string) lister {
	return listOf(func(c *client.Client, ctx context.Context) (api.List[api.Artifact], error) {
		list, err := c.Artifacts(ctx, job)
		list.Items = slices.DeleteFunc(list.Items, func(f api.Artifact) bool { return agentlab.WithoutControls(f.Path) != f.Path })
		return list, err
	}, func(f api.Artifact) cobra.Completion {
		return cobra.CompletionWithDesc(f.Path, work.ByteSize(f.Size)+", "+agentlab.WithoutControls(f.MIME))
	})
}

// newNames are the commands whose NAME is that of a new object.
var newNames = []string{"agentlab token create", "agentlab secrets create", "agentlab workspace create", "agentlab workspace rename", "agentlab session create", "agentlab session rename", "agentlab session branch"}

var sessionAgents = words(append(slices.Clone(session.Agents), session.ShellOnly)...)

// flagListers complete the values of flags, by the name of the flag, and of those of one
// command that has other values; nil means that there are none to complete.
var flagListers = map[string]lister{
	"sandbox": ListSandboxes, "job": listJobs, "profile": listProfiles, "image": listImages, "bundle": listBundles, "backend": listBackends,
	"workspace": listWorkspaces, "session": ListSessions, "agent": words(agentlab.Agents...),
	"agentlab start --agent": sessionAgents, "agentlab sessionizer --agent": sessionAgents,
	"agentlab attach --session": nil, "agentlab workspace move --to": listBackends,
	"sync": words(session.SyncManual, session.SyncOnCommit, session.SyncOnIdle), "terminal": words(agentlab.TerminalTmux, agentlab.TerminalZellij), "attempt-agent": words(agentlab.Agents...),
}

// fileFlags take the name of a file or directory, which the shell completes.
var fileFlags = []string{"file", "out", "repo", "socket", "task-file", "token-file"}

// placeholder is an argument in a usage line: SANDBOX, [JOB], SANDBOX|JOB,
// NAME... .
var placeholder = regexp.MustCompile(`^\[?([A-Z]+(?:\|[A-Z]+)*)(\.\.\.)?\]?$`)

// complete adds completion of arguments and flags to every command below cmd.
func (a *App) complete(cmd *cobra.Command) {
	for _, c := range cmd.Commands() {
		if c.ValidArgsFunction == nil && len(c.ValidArgs) == 0 {
			c.ValidArgsFunction = a.completeArgs(c)
		}
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if v, ok := f.Value.(choiceFlag); ok {
				_ = c.RegisterFlagCompletionFunc(f.Name, a.completeWith(words(v.values...))) // it has none yet
			} else if list := flagLister(c, f.Name); list != nil {
				_ = c.RegisterFlagCompletionFunc(f.Name, a.completeWith(list)) // it has none yet
			} else if !slices.Contains(fileFlags, f.Name) {
				_ = c.RegisterFlagCompletionFunc(f.Name, cobra.NoFileCompletions)
			}
		})
		a.complete(c)
	}
}

// flagLister returns the lister of a flag of a command, nil if it has none.
func flagLister(c *cobra.Command, flag string) lister {
	if list, ok := flagListers[c.CommandPath()+" --"+flag]; ok {
		return list
	}
	return flagListers[flag]
}

// completeArgs returns the completion of a command's arguments, by its usage line.
func (a *App) completeArgs(c *cobra.Command) cobra.CompletionFunc {
	type argument struct {
		lists   []lister
		depends func(cmd *cobra.Command, given []string) lister
		file    bool
	}
	var args []argument
	repeated := false
	for _, word := range strings.Fields(c.Use)[1:] {
		m := placeholder.FindStringSubmatch(strings.ReplaceAll(word, "[/WORKTREE]", ""))
		if m == nil {
			break // flags, or words after "--"
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
					arg.depends, arg.lists = list, nil
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
		out := a.Names(cmd.Context(), begin, lists...)
		return slices.DeleteFunc(out, func(s cobra.Completion) bool {
			name, _, _ := strings.Cut(s, "\t")
			return slices.Contains(given, name)
		}), cobra.ShellCompDirectiveNoFileComp
	}
}

func (a *App) completeWith(list lister) cobra.CompletionFunc {
	return func(cmd *cobra.Command, _ []string, begin string) ([]cobra.Completion, cobra.ShellCompDirective) {
		return a.Names(cmd.Context(), begin, list), cobra.ShellCompDirectiveNoFileComp
	}
}

// Names returns the names with a prefix, without duplicates: several builds of an
// image have the same name. It does not start a daemon and ignores all errors.
func (a *App) Names(ctx context.Context, begin string, lists ...lister) []cobra.Completion {
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
